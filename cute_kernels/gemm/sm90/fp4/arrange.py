"""Plain activations put into the order in which the GEMM contracts them beside NVFP4 weights.

The order is that of ``expand``. A warp takes a row, a quad of lanes 128 elements of it. For each
``p`` and ``w`` lane j of a quad reads elements ``8 w`` to ``8 w + 7`` of block ``2 j + p``, and
lane q writes elements q and q + 4 of all four.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import Grouping
from cute_kernels.device.launch import DSL_TYPES, GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, store_global, transpose_four
from cute_kernels.device.ptx import asm
from cute_kernels.layout.shapes import PIECE_K

from ...problem import N_ALIGN
from .config import ArrangeConfig

_ROWS = 8
_QUAD = 4
#: Chunks of 128 elements that a warp takes at once, one a quad.
_CHUNKS = WARP_SIZE // _QUAD
_VECTOR_BYTES = 16


class ArrangeKernel(GridKernel):
	"""The pass of one configuration, see the module."""

	ctas_per_sm, num_threads = 8, WARP_SIZE * _ROWS

	def __init__(self, config: ArrangeConfig):
		self.config = config

	@staticmethod
	def fake_args(config: ArrangeConfig) -> tuple[Any, ...]:
		dtype = DSL_TYPES[config.dtype]
		rows, depth, pitch = (cute.sym_int(divisibility=d) for d in (1, N_ALIGN, N_ALIGN))
		wide = cute.sym_int(divisibility=PIECE_K)
		return (
			make_fake_tensor(dtype, (rows, depth), (pitch, 1), assumed_align=_VECTOR_BYTES),
			compact(Int32, cute.sym_int(), align=4),
			compact(dtype, rows, wide, align=_VECTOR_BYTES),
			Int32(1),
			env_stream(),
		)

	@cute.kernel
	def kernel(self, x: cute.Tensor, offs: cute.Tensor, out: cute.Tensor) -> None:
		"""The pass of (rows, K) fp16 or bf16 with (G,) int32 end rows.

		K of ``out`` is filled up to a multiple of 128; rows of the tail are not written.
		"""
		rows, wide = out.shape
		last = Grouping(offs, offs.shape[0], rows, Int32(0)).last_row()
		spans = (wide + (_CHUNKS * PIECE_K - 1)) // (_CHUNKS * PIECE_K)
		items = (last + (_ROWS - 1)) // _ROWS * spans
		item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
		for index in cutlass.range(item, items, step, unroll=1):
			row = index // spans * _ROWS + cute.arch.warp_idx()
			if row < last:
				self.arrange(x, out, row, index % spans)

	@cute.jit
	def arrange(self, x: cute.Tensor, out: cute.Tensor, row: Int32, span: Int32) -> None:
		lane = cute.arch.lane_idx()
		quad_lane = lane % _QUAD
		first = (span * _CHUNKS + lane // _QUAD) * PIECE_K
		source = x.iterator.toint() + Int64(row) * x.stride[0] * 2
		target = out.iterator.toint() + Int64(row) * out.shape[1] * 2
		for part in cutlass.range_constexpr(4):
			# Elements 8 w .. 8 w + 7 of block 2 j + p.
			at = first + quad_lane * 32 + part * 8
			words = load_global_if(source + at * 2, _VECTOR_BYTES, at, x.shape[1])
			# Elements q and q + 4 for each lane q, then lane j's for this one from all j.
			pairs = [
				asm(f"prmt.b32 $0, $1, $2, {('0x5410', '0x7632')[q % 2]};", [Uint32], operands)
				for q, operands in ((q, [words[q // 2], words[2 + q // 2]]) for q in range(_QUAD))
			]
			values = transpose_four(pairs, 1)
			if first < out.shape[1]:
				store_global(target + (first + part * 32 + quad_lane * 8) * 2, values)
