"""Buffers of one direction by name, and the slices in which they are read and written."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..formats import Format
from ..layout.slots import TILE_ROWS
from .groups import Groups

#: Number of elements that are converted at a time: it bounds memory use, and fits in cache.
_CHUNK = 1 << 19


def slices(count: int, elements_each: int) -> Iterator[slice]:
    """Yield slices of ``count`` items of ``elements_each`` elements to convert at a time."""
    step = max(1, _CHUNK // max(1, elements_each))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def tile_parts(groups: Groups, cols: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tile, group and rows of the used slot tiles, in slices (``Groups.used_tiles``)."""
    tiles, group, rows = groups.used_tiles()
    for tile_slice in slices(len(tiles), TILE_ROWS * cols):
        yield tiles[tile_slice], group[tile_slice], rows[tile_slice]


def buffers_by_name(names: Sequence[str], copy: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return buffers by their rowwise names, codes as bytes: few ops of torch support FP8."""
    buffers = dict(zip(names, copy, strict=True))
    buffers["codes"] = buffers["codes"].view(torch.uint8)
    return buffers


def rows_first(copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a rowwise copy of uniform groups with all rows in one dimension.

    The result has views: rows of all groups have one pitch. Scales stay as they are.
    """
    views = {name: t if name == "scales" else t.flatten() for name, t in copy.items()}
    return views | {"codes": copy["codes"].flatten(0, 1)}


def code_tiles(fmt: Format, codes_t: Tensor) -> Tensor:
    """Return columnwise codes with the slot tile first.

    Transposed codes are ([G,] tiles, K, codes of 128 rows), others ([G,] tiles, 128, K).
    """
    if fmt.columnwise == "untransposed":
        return codes_t.unflatten(-2, (-1, TILE_ROWS))
    tiled = codes_t.unflatten(-1, (-1, fmt.element.width(TILE_ROWS)))
    return tiled.movedim(-2, -3)


def tile_index(groups: Groups, tile: Tensor) -> tuple[Tensor, ...]:
    """Return the index of slot tiles into the views of ``code_tiles`` and ``tile_view``."""
    if not groups.is_uniform:
        return (tile,)
    tiles_per_group = groups.num_tiles // len(groups)
    return (tile // tiles_per_group, tile % tiles_per_group)
