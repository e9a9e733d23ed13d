"""What is done to block scales before the GEMM of sm_100a: powers of two as E8M0, halves of B by
turns.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ...kernels.gemm.sm100.config import ScaleTilesConfig, Sm100GemmConfig
from ...layout.buffers import BufferSpec
from ...layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, ceil_div
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from .op import GroupedGemm, MGrouped
from .operand_tensors import OperandTensors, Prepare
from .operands_sm90 import rows_first


def scale_tiles(scales: Tensor, is_square: bool) -> BufferSpec:
    """The E8M0 tiles of fp32 scales ([G,] blocks along K, rows), or ([G,] row blocks, K blocks)."""
    *lead, first, last = scales.shape
    shape = (first, last) if is_square else (ceil_div(last, SF_TILE_ROWS), first)
    return BufferSpec((*lead, *shape, SF_TILE_BYTES), torch.uint8)


def sm100_preparation(op: GroupedGemm, config: Sm100GemmConfig, launch: Launcher) -> Prepare | None:
    """What the operands of calls like ``op`` go through; None if they stay as they are."""
    turn = rows_first(op, config)
    before = ScaleTilesConfig.before(config)
    if before is None:
        return turn
    kernel = launch.kernel(before)
    sides = op.operands()
    if turn is not None:
        sides = turn(*sides, op.offs, op.index)
    squares = before.a_squares, before.b_squares
    specs = [
        scale_tiles(x[1], sq) for x, sq in zip(sides, squares, strict=True) if x[1] is not None
    ]
    if before.has_tiles:
        specs = [BufferSpec(tuple(cast("Tensor", sides[1][1]).shape), torch.uint8)]
    workspace, half = (
        Allocator(specs, op.device),
        cast("MGrouped", op).cols // 2 if before.pairs_rows else 0,
    )

    def run(
        a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> tuple[OperandTensors, OperandTensors]:
        if turn is not None:
            a, b = turn(a, b, offs, rows)
        *first, b_tiles = workspace.make()
        scales, tiles = (a[1], first[0]) if first else (None, None)
        kernel(scales, tiles, b[1], b_tiles, half, launch.num_sms)
        return ((a[0], tiles, a[2]) if first else a), (b[0], b_tiles, b[2])

    return run
