"""What is done to operands before the GEMM of sm_100a: it takes fp32 powers of two as E8M0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cute_kernels.gemm.sm100.config import ScaleTilesConfig, Sm100GemmConfig
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, ceil_div
from cute_kernels.ops.registry import Allocator

from .sm90_operands import rows_first

if TYPE_CHECKING:
	from torch import Tensor

	from cute_kernels.ops.gemm import GroupedGemm
	from cute_kernels.runtime.launch import Launcher

	from .sm90_operands import Parts, Prepare


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
		sides = turn(*sides, op.offs)
	squares = before.a_squares, before.b_squares
	specs = [scale_tiles(x[1], sq) for x, sq in zip(sides, squares, strict=True) if x[1] is not None]
	workspace = Allocator(specs, op.device)

	def run(a: Parts, b: Parts, offs: Tensor) -> tuple[Parts, Parts]:
		if turn is not None:
			a, b = turn(a, b, offs)
		a_tiles, b_tiles = workspace.make()
		kernel(a[1], a_tiles, b[1], b_tiles, launch.num_sms)
		return (a[0], a_tiles, a[2]), (b[0], b_tiles, b[2])

	return run
