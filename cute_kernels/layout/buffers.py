"""The buffers of a quantized tensor: what there is of each format, and how large. Stated once.

``buffers`` is asked by the ops and their fakes, by the hosts of kernels, by ``grouped`` and by
tests; nothing else works out the shape of a code, a scale or a second level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from cute_kernels.layout.shapes import (
    PITCH_ALIGNMENT,
    SF_TILE_BYTES,
    TILE_ROWS,
    ceil_div,
    num_slot_tiles,
    round_up,
    scale_tiles,
    uniform_tiles,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.formats import ElementType, Format

__all__ = ["BufferSpec", "buffers"]


class BufferSpec(NamedTuple):
    """One tensor that an op writes.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        pitch: elements from one row to the next; None if contiguous.
        zeroed: a fresh one reads as zeros wherever the op does not write. Elsewhere what is not
            written is unspecified (the reference backend gives zeros there, too).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pitch: int | None = None
    zeroed: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides, with rows ``pitch`` apart."""
        strides = [1]
        for i, size in enumerate(reversed(self.shape[1:])):
            strides.append(strides[-1] * size if i or self.pitch is None else self.pitch)
        return tuple(reversed(strides))

    def allocate(self, device: torch.device, zeroed: bool) -> torch.Tensor:
        """A fresh tensor, of zeros if ``zeroed``."""
        if self.pitch is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if zeroed else out


def buffers(
    fmt: Format,
    shape: Sequence[int],
    num_groups: int | None,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
) -> dict[str, BufferSpec]:
    """The buffers of a quantized tensor by name, in the order of ``fmt.buffer_names``.

    Args:
        fmt: the format.
        shape: (T, K) of a ragged tensor, or (G, N, K) of a uniform one.
        num_groups: G of a ragged tensor; None if uniform.
        rowwise: the copy with blocks along K is there.
        columnwise: the copy with blocks along the rows of each group is there. Its buffers end in
            ``_t``. Its rows lie in slots (``slots``): P = 128 * tiles of them for a ragged tensor,
            and as many for each group of a uniform one, whose buffers have G as first dimension.

    Returns:
        Rowwise codes are (T, K) elements, packed, in rows that TMA can take. Columnwise ones are
        (K, P) if transposed and (P, K) if not. Block scales in 128x4 tiles are (P / 128, tiles
        along K, 512) and (ceil(K / 128), tiles along P, 512); MN-major ones (blocks along K, P) and
        (P / block, K), or (P / 128, blocks along K) of square blocks in both. A vector of the
        second level has one number a group or a row.
    """
    *rows, cols = shape
    if num_groups is None:
        batch, groups, tiles = (rows[0],), rows[0], uniform_tiles(rows[1])
    else:
        batch, groups, tiles = (), num_groups, num_slot_tiles(rows[0], num_groups)
    found: dict[str, BufferSpec] = {}
    for is_asked, is_columnwise in ((rowwise, False), (columnwise, True)):
        if not is_asked:
            continue
        specs = [
            _columnwise_codes(fmt, batch, tiles, cols)
            if is_columnwise
            else _rows_of_codes(fmt.element, tuple(rows), cols)
        ]
        if fmt.scale is not None:
            specs.append(_scales(fmt, batch, tiles, cols, is_columnwise))
        level = fmt.level(is_columnwise)
        if level is not None:
            vector = tuple(rows) if level.per == "row" else (groups,)
            specs += [BufferSpec(vector, torch.float32)] * len(level.buffers)
        found |= zip(fmt.buffer_names(is_columnwise), specs, strict=True)
    return found


def _rows_of_codes(element: ElementType, rows: tuple[int, ...], cols: int) -> BufferSpec:
    """Codes of rows of ``cols`` elements, each row padded to a pitch that TMA can take."""
    width = ceil_div(cols * element.bits, element.dtype.itemsize * 8)
    return BufferSpec((*rows, width), element.dtype, code_pitch(width, element.dtype.itemsize))


def code_pitch(width: int, itemsize: int = 1) -> int:
    """Elements from one row of codes to the next: ``width``, padded to what TMA takes."""
    return round_up(width * itemsize, PITCH_ALIGNMENT) // itemsize


def _columnwise_codes(fmt: Format, batch: tuple[int, ...], tiles: int, cols: int) -> BufferSpec:
    slots = tiles * TILE_ROWS
    if fmt.columnwise == "untransposed":
        return _rows_of_codes(fmt.element, (*batch, slots), cols)
    # Whole tiles are always a pitch that TMA can take.
    return _rows_of_codes(fmt.element, (*batch, cols), slots)._replace(pitch=None)


def _scales(
    fmt: Format, batch: tuple[int, ...], tiles: int, cols: int, columnwise: bool
) -> BufferSpec:
    scale = fmt.scale
    assert scale is not None
    vec, slots = scale.vec_size, tiles * TILE_ROWS
    shape: tuple[int, ...]
    if scale.layout == "tiles_128x4":
        if columnwise:
            shape = (ceil_div(cols, TILE_ROWS), tiles * scale_tiles(TILE_ROWS, vec), SF_TILE_BYTES)
        else:
            shape = (tiles, scale_tiles(cols, vec), SF_TILE_BYTES)
    elif fmt.is_2d:
        shape = (slots // vec, ceil_div(cols, vec))
    else:
        shape = (slots // vec, cols) if columnwise else (ceil_div(cols, vec), slots)
    return BufferSpec((*batch, *shape), scale.dtype)
