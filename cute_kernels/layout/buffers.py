"""The buffers of a quantized tensor: what there is of each format, and how large. Stated once.

``buffers`` is asked by the ops and their fakes, by the hosts of kernels, by ``grouped`` and by
tests; nothing else works out the shape of a code, a scale or a second level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .shapes import (
    MEMBER_ALIGNMENT,
    PITCH_ALIGNMENT,
    SF_TILE_BYTES,
    ceil_div,
    round_up,
    scale_tiles,
)
from .slots import TILE_ROWS, num_slot_tiles, uniform_tiles

if TYPE_CHECKING:
    from ..formats import ElementType, Format


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

    @property
    def extent(self) -> int:
        """Entries from its first to the end of its last row, the padding of rows included."""
        *rows, width = self.shape
        return math.prod(rows) * (width if self.pitch is None else self.pitch)

    def allocate(self, device: torch.device, zeroed: bool) -> Tensor:
        """A fresh tensor, of zeros if ``zeroed``."""
        if self.pitch is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if zeroed else out


class MemberSpan(NamedTuple):
    """One member's part of a flat buffer of groups that have shapes of their own.

    Attributes:
        spec: what it is: the buffer of a uniform tensor of this one group, (1, ...).
        start: entry of the flat buffer at which it starts.
        end: entry at which the next member's part starts.
    """

    spec: BufferSpec
    start: int
    end: int

    def view_of(self, buffer: Tensor) -> Tensor:
        """The part of ``buffer``, of the shape of ``spec``: a view."""
        *rows, width = self.spec.shape
        pitch = width if self.spec.pitch is None else self.spec.pitch
        return (
            buffer.narrow(0, self.start, self.spec.extent).view(*rows, pitch).narrow(-1, 0, width)
        )


def buffers(
    fmt: Format,
    shape: Sequence[int],
    num_groups: int | None,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    shapes: Sequence[Sequence[int]] | None = None,
) -> dict[str, BufferSpec]:
    """The buffers of a quantized tensor by name, in the order of ``fmt.buffer_names``.

    Args:
        fmt: the format.
        shape: (T, K) of a ragged tensor, (G, N, K) of a uniform one, or (capacity,) with
            ``shapes``.
        num_groups: G of a ragged tensor; None if uniform, or with ``shapes``.
        rowwise: the copy with blocks along K is there.
        columnwise: the copy with blocks along the rows of each group is there. Its buffers end
            in ``_t``. Its rows lie in slots (``slots``): P = 128 * tiles of them for a
            ragged tensor, and as many for each group of a uniform one, whose buffers have G
            as first dimension.
        shapes: (m, n) of each member, where the last dimension varies or both do.

    Returns:
        Rowwise codes are (T, K) elements, packed, in rows that TMA can take. Columnwise ones
        are (K, P) if transposed and (P, K) if not. Block scales in 128x4 tiles are (P / 128,
        tiles along K, 512) and (ceil(K / 128), tiles along P, 512); MN-major ones (blocks along
        K, P) and (P / block, K), or (P / 128, blocks along K) of square blocks in both. A
        vector of the second level has one number a group or a row.

        With ``shapes`` every buffer is flat: the parts of the members one after the other, as
        ``member_spans`` has them. The capacity counts for none of them.
    """
    if shapes is not None:
        parts = member_spans(fmt, shapes, rowwise=rowwise, columnwise=columnwise)
        return {name: BufferSpec((p[-1].end,), p[-1].spec.dtype) for name, p in parts.items()}
    *rows, cols = shape
    batch: tuple[int, ...] = ()
    if num_groups is None:
        batch, groups, tiles = (rows[0],), rows[0], uniform_tiles(rows[1])
    else:
        groups, tiles = num_groups, num_slot_tiles(rows[0], num_groups)
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
        level = fmt.global_scale_for(is_columnwise)
        if level is not None:
            vector = tuple(rows) if level.per == "row" else (groups,)
            specs += [BufferSpec(vector, torch.float32)] * len(level.buffers)
        found |= zip(fmt.buffer_names(is_columnwise), specs, strict=True)
    return found


def member_spans(
    fmt: Format, shapes: Sequence[Sequence[int]], *, rowwise: bool = True, columnwise: bool = False
) -> dict[str, list[MemberSpan]]:
    """Where each member (m, n) lies in the flat buffers of groups that have shapes of their own.

    A member's part of a buffer is that buffer of a uniform tensor of this one group, row pitch
    included: ``buffers(fmt, (1, m, n), None)``. Codes and scales of a member start at the next
    multiple of ``MEMBER_ALIGNMENT`` bytes, and so does what would come after the last one. Vectors
    of the second level have no gaps: (G,), or one entry for each row of each member.

    Returns:
        The parts in the order of the members, by the name of the buffer.
    """
    of_members = [
        buffers(fmt, (1, *shape), None, rowwise=rowwise, columnwise=columnwise) for shape in shapes
    ]
    vectors = _vectors(fmt)
    found: dict[str, list[MemberSpan]] = {}
    for name, first in of_members[0].items():
        step = 1 if name in vectors else MEMBER_ALIGNMENT // first.dtype.itemsize
        found[name], start = [], 0
        for specs in of_members:
            end = round_up(start + specs[name].extent, step)
            found[name].append(MemberSpan(specs[name], start, end))
            start = end
    return found


def _vectors(fmt: Format) -> set[str]:
    levels = ((way, fmt.global_scale_for(way)) for way in (False, True))
    return {
        name
        for way, level in levels
        if level is not None
        for name in fmt.buffer_names(way)[-len(level.buffers) :]
    }


def _rows_of_codes(element: ElementType, rows: tuple[int, ...], cols: int) -> BufferSpec:
    """Codes of rows of ``cols`` elements, each row padded to a pitch that TMA can take."""
    width = element.width(cols)
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
