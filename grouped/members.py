"""One group's part of a quantized tensor, taken out of the buffers that all groups share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cute_kernels.capability import require
from cute_kernels.formats import NVFP4, Format
from cute_kernels.layout.shapes import TILE_ROWS, ceil_div, scale_tiles, slot_tile, uniform_tiles
from cute_kernels.reference.groups import untile_scales

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupSpan", "GroupedMember", "QuantizedCopy", "group_spans", "member", "nvfp4"]


def nvfp4(fmt: Format) -> NVFP4:
    """``fmt``, which must be of the one format that is built so far.

    Raises:
        TypeError: it is no format record; a class, perhaps, instead of an instance.
        cute_kernels.UnsupportedError: it is a record of another format.
    """
    if isinstance(fmt, NVFP4):
        return fmt
    if isinstance(fmt, Format):
        require("grouped_quantize", fmt, "reference")
    raise TypeError(f"fmt must be a format record such as NVFP4(), got {fmt!r}")


class QuantizedCopy(NamedTuple):
    """One direction of a quantized tensor: codes, block scales in 128x4 tiles, second level.

    The scales are uint8, bytes of an opaque layout for kernels, padding included;
    ``GroupedMember`` has those of a group as the float8 values that they are.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor


@dataclasses.dataclass(frozen=True)
class GroupedMember:
    """One group of m rows, scales linear and without padding; None for an absent direction.

    Attributes:
        codes: (m, K / 2) uint8, two E2M1 codes a byte, the even column in the low nibble.
        scales: (m, K / 16) float8_e4m3fn.
        amax: fp32 scalar, or (m,) when row-scaled.
        codes_t: (K, ceil(m / 2)) uint8.
        scales_t: (K, ceil(m / 16)) float8_e4m3fn.
        amax_t: fp32 scalar.
    """

    codes: Tensor | None = None
    scales: Tensor | None = None
    amax: Tensor | None = None
    codes_t: Tensor | None = None
    scales_t: Tensor | None = None
    amax_t: Tensor | None = None


class GroupSpan(NamedTuple):
    """Where a group lies: its number, rows [start, start + rows), and its first slot tile."""

    group: int
    start: int
    rows: int
    tile: int


def group_spans(offs: Tensor | None, shape: Sequence[int]) -> list[GroupSpan]:
    """All groups of a (T, K) tensor with ``offs``, read on the host, or of a (G, N, K) one.

    Raises:
        RuntimeError: the stream is being captured into a CUDA graph.
    """
    if offs is None:
        groups, rows = shape[:2]
        tiles = uniform_tiles(rows)
        return [GroupSpan(g, g * rows, rows, g * tiles) for g in range(groups)]
    if offs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("member() and unbind() read offs on the host: not while capturing")
    ends = offs.tolist()
    return [
        GroupSpan(g, start, end - start, slot_tile(start, g))
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def member(
    span: GroupSpan,
    fmt: NVFP4,
    columns: int,
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
) -> GroupedMember:
    """Take one group out of a tensor of ``columns`` columns."""
    fields: dict[str, Tensor] = {}
    if rowwise is not None:
        fields |= _rowwise(span, fmt, columns, rowwise)
    if columnwise is not None:
        fields |= _columnwise(span, fmt, columns, columnwise)
    return GroupedMember(**fields)


def _rowwise(span: GroupSpan, fmt: NVFP4, columns: int, copy: QuantizedCopy) -> dict[str, Tensor]:
    rows = slice(span.start, span.start + span.rows)
    tiles = copy.scales.flatten(0, -3)[span.tile : span.tile + ceil_div(span.rows, TILE_ROWS)]
    linear = untile_scales(tiles.unsqueeze(1), ceil_div(columns, fmt.sf_vec_size)).flatten(0, 1)
    return {
        "codes": copy.codes.flatten(0, -2)[rows],
        "scales": linear[: span.rows].view(torch.float8_e4m3fn),
        "amax": copy.amax.flatten()[rows] if fmt.row_scaled else copy.amax[span.group],
    }


def _columnwise(
    span: GroupSpan, fmt: NVFP4, columns: int, copy: QuantizedCopy
) -> dict[str, Tensor]:
    codes, scales, tile = copy.codes, copy.scales, span.tile
    if codes.dim() == 3:  # uniform: each group has tiles of its own
        codes, scales, tile = codes[span.group], scales[span.group], 0
    first_byte = tile * TILE_ROWS // 2
    first_tile = tile * scale_tiles(TILE_ROWS, fmt.sf_vec_size)
    last_tile = first_tile + scale_tiles(span.rows, fmt.sf_vec_size)
    linear = untile_scales(scales[:, first_tile:last_tile], ceil_div(span.rows, fmt.sf_vec_size))
    return {
        "codes_t": codes[:, first_byte : first_byte + ceil_div(span.rows, 2)],
        "scales_t": linear[:columns].view(torch.float8_e4m3fn),
        "amax_t": copy.amax[span.group],
    }
