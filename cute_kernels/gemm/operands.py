"""Views of the layout contract's buffers as (rows, K, groups), the way that TMA and MMA see them.

Row pitches and group strides are 64-bit; a mode that the grouping lacks has extent 1.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int64, cute

from cute_kernels.formats import NVFP4
from cute_kernels.gemm.config import OperandKind
from cute_kernels.shapes import SF_TILE_BYTES, SF_TILE_COLS, SF_TILE_ROWS

__all__ = ["codes_view", "element_type", "plain_view", "scale_type", "scales_view"]

_ELEMENTS = {NVFP4.name: cutlass.Float4E2M1FN}
_SCALES = {NVFP4.name: cutlass.Float8E4M3FN}


def element_type(kind: OperandKind) -> Any:
    """The DSL's type of an operand's elements."""
    return _ELEMENTS[kind.name]


def scale_type(kind: OperandKind) -> Any:
    """The DSL's type of an operand's block scales."""
    return _SCALES[kind.name]


def codes_view(codes: cute.Tensor, kind: OperandKind) -> cute.Tensor:
    """Packed codes (rows, bytes) or (G, rows, bytes) as elements (rows, K, G or 1)."""
    per_byte = 8 // kind.bits
    is_grouped = len(codes.shape) == 3
    rows, width = codes.shape[-2:]
    # TMA takes pitches of whole 16 bytes only; the argument's own stride promises that.
    pitch = cute.assume(Int64(codes.stride[-2]) * per_byte, 16 * per_byte)
    groups, group_stride = 1, Int64(0)
    if is_grouped:
        groups = codes.shape[0]
        group_stride = cute.assume(Int64(codes.stride[0]) * per_byte, 16 * per_byte)
    layout = cute.make_layout((rows, width * per_byte, groups), stride=(pitch, 1, group_stride))
    return cute.make_tensor(cute.recast_ptr(codes.iterator, dtype=element_type(kind)), layout)


def scales_view(scales: cute.Tensor, kind: OperandKind) -> cute.Tensor:
    """Scale tiles ([G,] row tiles, K tiles, 512) as (((32, 4), row tiles), ((vec, 4), K tiles), G)."""
    row_tiles, k_tiles, _ = scales.shape[-3:]
    groups = scales.shape[0] if len(scales.shape) == 4 else 1
    row_stride = Int64(k_tiles) * SF_TILE_BYTES
    layout = cute.make_layout(
        (
            ((32, SF_TILE_ROWS // 32), row_tiles),
            ((kind.sf_vec_size, SF_TILE_COLS), k_tiles),
            groups,
        ),
        stride=(((16, 4), row_stride), ((0, 1), SF_TILE_BYTES), row_stride * row_tiles),
    )
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=scale_type(kind)), layout)


def plain_view(tensor: cute.Tensor) -> cute.Tensor:
    """(rows, cols) or (G, rows, cols) as (G or 1, rows, cols)."""
    if len(tensor.shape) == 3:
        return tensor
    rows, cols = tensor.shape
    layout = cute.make_layout((1, rows, cols), stride=(Int64(0), *tensor.stride))
    return cute.make_tensor(tensor.iterator, layout)
