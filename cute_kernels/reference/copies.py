"""The buffers of one direction by name, and the parts in which they are read and written."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..formats import Format
from ..layout.slots import TILE_ROWS
from .groups import Groups

#: Elements that are converted at a time: bounds the memory, and stays in the cache.
_CHUNK = 1 << 19


def slices(count: int, elements_each: int) -> Iterator[slice]:
    """Parts of ``count`` things of ``elements_each`` elements that are converted at a time."""
    step = max(1, _CHUNK // max(1, elements_each))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def tile_parts(groups: Groups, cols: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tile, group and rows of the slot tiles that groups use, in parts (``Groups.used_tiles``)."""
    tiles, group, rows = groups.used_tiles()
    for part in slices(len(tiles), TILE_ROWS * cols):
        yield tiles[part], group[part], rows[part]


def by_name(names: Sequence[str], copy: Sequence[Tensor]) -> dict[str, Tensor]:
    """Buffers by their rowwise names. Codes are bytes: few ops of torch take FP8 dtypes."""
    buffers = dict(zip(names, copy, strict=True))
    buffers["codes"] = buffers["codes"].view(torch.uint8)
    return buffers


def rows_first(copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rowwise copy of uniform groups, its codes and second level one row after the other.

    Views: the rows of all groups are equally far apart. Scales stay as they are.
    """
    views = {name: t if name == "scales" else t.flatten() for name, t in copy.items()}
    return views | {"codes": copy["codes"].flatten(0, 1)}


def code_tiles(fmt: Format, codes_t: Tensor) -> Tensor:
    """Columnwise codes with the slot tile first: ([G,] tiles, K, codes of 128 rows).

    Those that are not transposed: ([G,] tiles, 128, K).
    """
    if fmt.columnwise == "untransposed":
        return codes_t.unflatten(-2, (-1, TILE_ROWS))
    by_tile = codes_t.unflatten(-1, (-1, fmt.element.width(TILE_ROWS)))
    return by_tile.movedim(-2, -3)


def tile_index(groups: Groups, tile: Tensor) -> tuple[Tensor, ...]:
    """Index of slot tiles into the views above."""
    if not groups.is_uniform:
        return (tile,)
    each = groups.num_tiles // len(groups)
    return (tile // each, tile % each)
