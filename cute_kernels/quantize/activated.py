"""Rows through an activation to codes of blocks with scales of their own, where arithmetic sets the pace.

A warp has a row, a lane eight neighbouring columns of every 256, so that nothing is made that is
not there, and an SM has as many warps as it holds: what an activation takes is a long chain of
dependent instructions. By rows in shared memory (``rows``) swiglu of 32768 x 768 takes 103 us on an H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cute_kernels.device.absmax import absmax_words, fmax
from cute_kernels.device.codecs import codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import Grouping
from cute_kernels.device.launch import GridKernel, env_stream
from cute_kernels.device.memory import load_global_if, store_global
from cute_kernels.layout.slots import TILE_ROWS

from .elements import ElementMaker
from .fakes import FakeBuffers
from .rows import row_address

if TYPE_CHECKING:
	from .config import ActivatedConfig

_WARPS = 8


class ActivatedQuantizer(GridKernel):
	"""Quantizer by rows, see the module."""

	ctas_per_sm, num_threads = 8, _WARPS * WARP_SIZE

	def __init__(self, config: ActivatedConfig):
		self.config = config
		self.codec = codec_of(config.format, config.dtype, config.arch)
		self.maker = ElementMaker(config.prologue, config.dtype, config.arch)
		#: Lanes of a block.
		self.sharing = self.codec.block // self.maker.unit

	@staticmethod
	def fake_args(config: ActivatedConfig) -> tuple[Any, ...]:
		"""Stand-ins for the arguments of ``RowsConfig``."""
		fake = FakeBuffers(config.dtype, config.grouping, config.format)
		output = (None, fake.codes(), fake.scales(), None, None)
		return (fake.x(config.prologue), None, fake.offs(), *output, Int32(1), env_stream())

	@cute.kernel
	def kernel(
		self,
		x: cute.Tensor,
		grad: None,
		offs: cute.Tensor,
		amax: None,
		codes: cute.Tensor,
		scales: cute.Tensor,
		scale_inv: None,
		scale: None,
	) -> None:
		lane = cute.arch.lane_idx()
		groups, cols = Grouping.of(x, offs), self.maker.cols(x)
		row_bytes = self.maker.row_bytes(cols)[0]
		row = cute.arch.block_idx()[0] * _WARPS + cute.arch.thread_idx()[0] // WARP_SIZE
		last, group = groups.last_row(), Int32(0)
		while row < last:
			group, end = groups.holding(row, group)
			first, start, _ = groups.span(group)
			slot = first * TILE_ROWS + (row - start)
			x_at = x.iterator.toint() + Int64(row) * row_bytes
			column = lane * self.maker.unit
			# As many turns for all lanes.
			for _ in cutlass.range((cols + WARP_SIZE * self.maker.unit - 1) // (WARP_SIZE * self.maker.unit), unroll=1):
				places = self.maker.places(x_at, x_at, column, cols)
				words = self.maker.make([load_global_if(at, 16, column, cols) for at in places])
				a = absmax_words(words, self.config.dtype, self.config.arch)
				for bit in cutlass.range_constexpr(self.sharing.bit_length() - 1):
					a = fmax(a, cute.arch.shuffle_sync_bfly(a, offset=1 << bit))
				stored, factor = self.codec.block_scale(a, ())
				if column < cols:
					store_global(row_address(codes, row) + column, self.codec.encode_row(words, factor))
					if lane % self.sharing == 0:
						self.store_scale(scales, column // self.codec.block, slot, stored)
				column += WARP_SIZE * self.maker.unit
			if row == end - 1:
				# Rows that the group's last tile does not have.
				for s in cutlass.range(slot + 1 + lane, (slot // TILE_ROWS + 1) * TILE_ROWS, WARP_SIZE, unroll=1):
					for b in cutlass.range(scales.shape[0], unroll=1):
						self.store_scale(scales, b, s, Uint32(0))
			row += cute.arch.grid_dim()[0] * _WARPS

	@cute.jit
	def store_scale(self, scales: cute.Tensor, block: Int32, slot: Int32, stored: Uint32) -> None:
		"""Write the scale of a block."""
		place = Int64(block) * scales.shape[1] + slot
		store_global(scales.iterator.toint() + place * 4, [stored])
