"""Views of the layout contract's buffers as (rows, K, groups), as TMA and MMA see them.

Row pitches and group strides are 64-bit. A mode that the grouping lacks has extent 1.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from cute_kernels.layout.shapes import (
    PITCH_ALIGNMENT,
    SF_TILE_BYTES,
    SF_TILE_COLS,
    SF_TILE_ROWS,
    SF_TILE_WORDS,
)
from cute_kernels.layout.slots import TILE_ROWS, most_rows

from .config import GemmConfig
from .operand_kinds import OperandKind
from .problem import RAGGED_ROWS, Extents, GemmArguments


def element_type(kind: OperandKind) -> Any:
    """Return the DSL's type of an element."""
    return getattr(cutlass, kind.dsl_types[0])


def codes_type(kind: OperandKind) -> Any:
    """Return the DSL's type of a buffer of codes: bytes if several codes share one."""
    return element_type(kind) if kind.bits >= 8 else cutlass.Uint8


def scale_type(kind: OperandKind) -> Any:
    """Return the DSL's type of a block scale."""
    name = kind.dsl_types[1]
    assert name is not None
    return getattr(cutlass, name)


#: Stride of a mode. Its coordinate ``RAGGED_ROWS`` makes the address wrap around at 2^64 bytes.
_WRAP_STRIDE = 2**34


def ragged_rows_view(matrix: cute.Tensor) -> cute.Tensor:
    """View (T, rows) as (rows, K, (ends, wrap)), so that TMA zero-fills past the end of a group.

    A tensor map bounds each mode by itself, and groups end anywhere. So K counts up to the fixed
    extent ``RAGGED_ROWS``. For a group that ends at row e and has n rows, element k is at ``K =
    RAGGED_ROWS - n + k``, ``ends = e``, ``wrap = RAGGED_ROWS``: past the group's end K leaves the
    extent. The modes ``ends`` and ``wrap`` move the address back by ``RAGGED_ROWS - e`` rows, in
    arithmetic modulo 2^64. Triton's ragged tensor descriptors do the same.
    """
    width = matrix.element_type.width // 8
    aligned = PITCH_ALIGNMENT // width
    pitch = cute.assume(Int64(matrix.stride[0]), aligned)
    wrap = cute.assume(Int64(_WRAP_STRIDE) - pitch, aligned)
    layout = cute.make_layout(
        (matrix.shape[1], RAGGED_ROWS, (2**31 - 1, 2**31 - 1)), stride=(1, pitch, (pitch, wrap))
    )
    return cute.make_tensor(matrix.iterator, layout)


def extents_of(config: GemmConfig, x: GemmArguments, m: cute.Tensor, n: cute.Tensor) -> Extents:
    """Return the sizes of a product from its arguments and the views of operands M and N."""
    if config.gathered:
        num_rows = x.rows.shape[0]
    elif config.grouping == "m_grouped" or config.ragged_k:
        num_rows = x.a.shape[0]
    else:
        # T itself is not known here; the most rows that the slots can hold give the same slots.
        num_rows = most_rows(n.shape[1] // TILE_ROWS, x.offs.shape[0])
    depth = (n if config.tile.swap_ab else m).shape[1]
    return Extents(
        *(Int32(size) for size in (num_rows, cute.size(m, mode=[0]), cute.size(n, mode=[0]), depth))
    )


def matrix_view(
    matrix: cute.Tensor, kind: OperandKind, mn_major: bool, depth: Any = None
) -> cute.Tensor:
    """View an operand's matrix, or one per group, as elements (rows, K, G or 1).

    Args:
        matrix: ([G,] rows, K), with packed codes as bytes; ([G,] K, rows) if ``mn_major``.
        kind: Kind of the operand.
        mn_major: True if the operand is contiguous along rows.
        depth: K if the matrix may be padded along it. Then TMA gives zeros for the padding. None
            otherwise.
    """
    per_item = matrix.element_type.width // kind.bits
    # TMA needs pitches that are multiples of 16 bytes. The stride of the argument promises that.
    aligned = 128 // kind.bits
    pitch = cute.assume(Int64(matrix.stride[-2]) * per_item, aligned)
    shape = [matrix.shape[-2], matrix.shape[-1] * per_item, 1]
    stride = [pitch, 1, Int64(0)]
    if len(matrix.shape) == 3:
        shape[2] = matrix.shape[0]
        stride[2] = cute.assume(Int64(matrix.stride[0]) * per_item, aligned)
    if mn_major:
        shape[:2], stride[:2] = shape[1::-1], stride[1::-1]
    if depth is not None:
        shape[1] = depth
    layout = cute.make_layout(tuple(shape), stride=tuple(stride))
    return cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=element_type(kind)), layout)


def interleaved_rows(x: cute.Tensor) -> cute.Tensor:
    """View (rows, ...) as ((2, rows / 2), ...): row 2 i + h is row i of half h."""
    half, pitch = x.shape[0] // 2, x.stride[0]
    aligned = PITCH_ALIGNMENT * 8 // x.element_type.width
    strides = (cute.assume(Int64(pitch) * half, aligned), pitch)
    layout = cute.make_layout(((2, half), *x.shape[1:]), stride=(strides, *x.stride[1:]))
    return cute.make_tensor(x.iterator, layout)


def codes_view(codes: cute.Tensor, width: Any = None) -> cute.Tensor:
    """View ([G,] rows, bytes) codes as (rows, width, G or 1) bytes; None is the full width."""
    groups, group_stride = 1, Int64(0)
    if len(codes.shape) == 3:
        groups = codes.shape[0]
        group_stride = cute.assume(Int64(codes.stride[0]), PITCH_ALIGNMENT)
    rows, row_bytes = codes.shape[-2:]
    pitch = cute.assume(Int64(codes.stride[-2]), PITCH_ALIGNMENT)
    shape = (rows, row_bytes if width is None else width, groups)
    layout = cute.make_layout(shape, stride=(pitch, 1, group_stride))
    return cute.make_tensor(cute.recast_ptr(codes.iterator, dtype=cutlass.Uint8), layout)


def scale_words_view(scales: cute.Tensor) -> cute.Tensor:
    """View scale tiles ([G,] row tiles, K tiles, 512) as words (row tiles, K tiles, words, G)."""
    row_tiles, k_tiles, _ = scales.shape[-3:]
    groups = scales.shape[0] if len(scales.shape) == 4 else 1
    row_stride = cute.assume(Int64(k_tiles) * SF_TILE_WORDS, SF_TILE_WORDS)
    group_stride = cute.assume(row_stride * row_tiles, SF_TILE_WORDS)
    layout = cute.make_layout(
        (row_tiles, k_tiles, SF_TILE_WORDS, groups),
        stride=(row_stride, SF_TILE_WORDS, 1, group_stride),
    )
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Int32), layout)


def scales_view(scales: cute.Tensor, kind: OperandKind) -> cute.Tensor:
    """View scale tiles ([G,] rows, K tiles, 512) as (((32, 4), rows), ((vec, 4), K tiles), G)."""
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


def row_scales_view(scales: cute.Tensor) -> cute.Tensor:
    """View ([G,] blocks along K, rows) fp32 scales as (rows, blocks along K, G or 1)."""
    groups, group_stride = 1, Int64(0)
    if len(scales.shape) == 3:
        groups, group_stride = scales.shape[0], Int64(scales.stride[0])
    blocks, rows = scales.shape[-2:]
    aligned = PITCH_ALIGNMENT * 8 // scales.element_type.width
    strides = (cute.assume(x, aligned) for x in (Int64(scales.stride[-2]), group_stride))
    layout = cute.make_layout((rows, blocks, groups), stride=(1, *strides))
    return cute.make_tensor(scales.iterator, layout)


def squares_view(scales: cute.Tensor) -> cute.Tensor:
    """View ([G,] blocks along rows, blocks along K) fp32 scales of squares with the group last."""
    groups, group_stride = 1, Int64(0)
    if len(scales.shape) == 3:
        groups, group_stride = scales.shape[0], Int64(scales.stride[0])
    shape = (*scales.shape[-2:], groups)
    strides = (*(Int64(s) for s in scales.stride[-2:]), group_stride)
    return cute.make_tensor(scales.iterator, cute.make_layout(shape, stride=strides))


def output_view(tensor: cute.Tensor) -> cute.Tensor:
    """View (rows, cols) or (G, rows, cols) as (G or 1, rows, cols)."""
    if len(tensor.shape) == 3:
        return tensor
    rows, cols = tensor.shape
    layout = cute.make_layout((1, rows, cols), stride=(Int64(0), *tensor.stride))
    return cute.make_tensor(tensor.iterator, layout)
