"""Block scales before the GEMM of sm_100a.

Powers of two become E8M0 tiles, and the rows of the two halves of B are interleaved.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...kernels.gemm.common.operand_kinds import operand_of
from ...kernels.gemm.sm100.config import ScaleTilesConfig, Sm100GemmConfig
from ...layout.buffers import BufferSpec
from ...layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, ceil_div
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..arguments import dtype_name
from .base_op import GroupedGemm, MGrouped
from .operand_tensors import Operands, OperandTensors, Prepare
from .operands import code_fields, transpose_squares


def scale_tiles(scales: Tensor, is_square: bool) -> BufferSpec:
    """Return the spec of the E8M0 tiles of fp32 scales.

    Args:
        scales: ([G,] blocks along K, rows), or ([G,] row blocks, blocks along K) of squares.
        is_square: True for scales of squares.

    Returns:
        ([G,] row tiles, K tiles, 512) uint8.
    """
    *lead, num_blocks, num_rows = scales.shape
    shape = (ceil_div(num_rows, SF_TILE_ROWS), num_blocks)
    if is_square:
        shape = (num_blocks, num_rows)
    return BufferSpec((*lead, *shape, SF_TILE_BYTES), torch.uint8)


def sm100_operand_fields(op: GroupedGemm) -> dict[str, Any]:
    """Return the fields of a configuration for sm_100a that describe both operands."""
    a, b = op.a_record, op.b_record
    if b is None:
        return {"operand": dtype_name(op.a.dtype)}
    if a is None:
        return {"operand": dtype_name(op.a.dtype), "b_operand": operand_of(b).name}
    return code_fields(a, b)


def sm100_preparation(op: GroupedGemm, config: Sm100GemmConfig, launch: Launcher) -> Prepare | None:
    """Return a function that prepares the operands of calls like ``op``. None if none is needed."""
    transpose = transpose_squares(op, config)
    tiles_config = ScaleTilesConfig.for_gemm(config)
    if tiles_config is None:
        return transpose
    kernel = launch.kernel(tiles_config)
    a, b = op.operands()
    if transpose is not None:
        a, b = transpose(op, a, b, op.offs, op.index)
    sides = ((a.block_scales, tiles_config.a_squares), (b.block_scales, tiles_config.b_squares))
    specs = [scale_tiles(scales, square) for scales, square in sides if scales is not None]
    if tiles_config.has_tiles:
        specs = [BufferSpec(tuple(cast("Tensor", b.block_scales).shape), torch.uint8)]
    workspace = Allocator(specs, op.device)
    half = cast("MGrouped", op).cols // 2 if tiles_config.interleaves_halves else 0

    def run(
        op: GroupedGemm, a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> Operands:
        """Transpose the scales of squares, then write the tiles."""
        if transpose is not None:
            a, b = transpose(op, a, b, offs, rows)
        *a_workspace, b_tiles = workspace.make()
        if a_workspace:
            (a_tiles,) = a_workspace
            kernel(a.block_scales, a_tiles, b.block_scales, b_tiles, half, launch.num_sms)
            a = OperandTensors(a.codes, a_tiles, a.global_scale)
        else:
            kernel(None, None, b.block_scales, b_tiles, half, launch.num_sms)
        return a, OperandTensors(b.codes, b_tiles, b.global_scale)

    return run
