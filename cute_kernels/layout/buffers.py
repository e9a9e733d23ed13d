"""Buffers of a quantized tensor of each format, and their shapes.

Ops and their fakes, launchers, ``grouped`` and tests all call ``buffers``. No other code computes
the shape of codes, scales or global scales.
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
        shape: Shape.
        dtype: Dtype.
        pitch: Number of elements from one row to the next. None if contiguous.
        zeroed: True if a fresh tensor reads as zeros where the op does not write. Otherwise
            unwritten elements are unspecified (the reference backend gives zeros there, too).
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
        """Number of entries from the first to the end of the last row, including row padding."""
        *rows, width = self.shape
        return math.prod(rows) * (width if self.pitch is None else self.pitch)

    def allocate(self, device: torch.device, zeroed: bool) -> Tensor:
        """Return a fresh tensor, zeroed if ``zeroed``."""
        if self.pitch is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if zeroed else out


class MemberSpan(NamedTuple):
    """Range of one member in a flat buffer of groups that have shapes of their own.

    Attributes:
        spec: Spec of the member: the buffer of a uniform tensor of this one group, (1, ...).
        start: First entry in the flat buffer.
        end: Entry at which the next member starts.
    """

    spec: BufferSpec
    start: int
    end: int

    def view_of(self, buffer: Tensor) -> Tensor:
        """Return the member in ``buffer`` as a view of the shape of ``spec``."""
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
    """Return the buffers of a quantized tensor by name, in the order of ``fmt.buffer_names``.

    Args:
        fmt: Format.
        shape: (T, K) of a ragged tensor, (G, N, K) of a uniform one, or (capacity,) with
            ``shapes``.
        num_groups: G of a ragged tensor. None if uniform, or with ``shapes``.
        rowwise: Include the copy with blocks along K.
        columnwise: Include the copy with blocks along the rows of each group. The names of its
            buffers end in ``_t``. Its rows lie in slots (``slots``). A ragged tensor has P = 128 *
            tiles of them. A uniform tensor has P in each group, and its buffers have G as first
            dimension.
        shapes: (m, n) of each member, if their last dimensions differ.

    Returns:
        Rowwise codes are (T, K) elements, packed, with a row pitch for TMA. Columnwise codes are
        (K, P) if transposed, else (P, K). Block scales in 128x4 tiles are (P / 128, tiles along
        K, 512) and (ceil(K / 128), tiles along P, 512). MN-major scales are (blocks along K, P)
        and (P / block, K), or (P / 128, blocks along K) of square blocks in both directions. A
        vector of the global scale has one number per group or per row.

        With ``shapes`` every buffer is flat: the members are consecutive, as in
        ``member_spans``. Their sizes do not depend on the capacity.
    """
    if shapes is not None:
        spans = member_spans(fmt, shapes, rowwise=rowwise, columnwise=columnwise)
        return {name: BufferSpec((p[-1].end,), p[-1].spec.dtype) for name, p in spans.items()}
    *rows, cols = shape
    batch: tuple[int, ...] = ()
    if num_groups is None:
        batch, groups, tiles = (rows[0],), rows[0], uniform_tiles(rows[1])
    else:
        groups, tiles = num_groups, num_slot_tiles(rows[0], num_groups)
    specs_by_name: dict[str, BufferSpec] = {}
    for is_requested, is_columnwise in ((rowwise, False), (columnwise, True)):
        if not is_requested:
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
        specs_by_name |= zip(fmt.buffer_names(is_columnwise), specs, strict=True)
    return specs_by_name


def member_spans(
    fmt: Format, shapes: Sequence[Sequence[int]], *, rowwise: bool = True, columnwise: bool = False
) -> dict[str, list[MemberSpan]]:
    """Return the range of each member (m, n) in the flat buffers of groups of several shapes.

    The range of a member is the buffer of a uniform tensor of this one group, including the row
    pitch: ``buffers(fmt, (1, m, n), None)``. Codes and scales of a member start at the next
    multiple of ``MEMBER_ALIGNMENT`` bytes, and the buffer ends at such a multiple. Vectors of the
    global scale have no gaps: (G,), or one entry for each row of each member.

    Returns:
        The ranges in the order of the members, by the name of the buffer.
    """
    member_specs = [
        buffers(fmt, (1, *shape), None, rowwise=rowwise, columnwise=columnwise) for shape in shapes
    ]
    vectors = _vectors(fmt)
    spans: dict[str, list[MemberSpan]] = {}
    for name, first_spec in member_specs[0].items():
        step = 1 if name in vectors else MEMBER_ALIGNMENT // first_spec.dtype.itemsize
        spans[name], start = [], 0
        for specs in member_specs:
            end = round_up(start + specs[name].extent, step)
            spans[name].append(MemberSpan(specs[name], start, end))
            start = end
    return spans


def _vectors(fmt: Format) -> set[str]:
    """Return the names of the vectors of the global scale."""
    scales = ((columnwise, fmt.global_scale_for(columnwise)) for columnwise in (False, True))
    return {
        name
        for columnwise, scale in scales
        if scale is not None
        for name in fmt.buffer_names(columnwise)[-len(scale.buffers) :]
    }


def _rows_of_codes(element: ElementType, rows: tuple[int, ...], cols: int) -> BufferSpec:
    """Return the spec of rows of ``cols`` codes, with a row pitch for TMA."""
    width = element.width(cols)
    return BufferSpec((*rows, width), element.dtype, code_pitch(width, element.dtype.itemsize))


def code_pitch(width: int, itemsize: int = 1) -> int:
    """Return the number of elements from one row of codes to the next, padded for TMA."""
    return round_up(width * itemsize, PITCH_ALIGNMENT) // itemsize


def _columnwise_codes(fmt: Format, batch: tuple[int, ...], tiles: int, cols: int) -> BufferSpec:
    """Return the spec of columnwise codes."""
    slots = tiles * TILE_ROWS
    if fmt.columnwise == "untransposed":
        return _rows_of_codes(fmt.element, (*batch, slots), cols)
    # The width of whole tiles is always a valid pitch for TMA.
    return _rows_of_codes(fmt.element, (*batch, cols), slots)._replace(pitch=None)


def _scales(
    fmt: Format, batch: tuple[int, ...], tiles: int, cols: int, columnwise: bool
) -> BufferSpec:
    """Return the spec of block scales."""
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
