"""What an activation makes of a staged tile, to codes and block scales.

A block of 128 columns is made of 256 of the product: a consumer warpgroup staged them for the one that
stores, or four have 64 each and tell each other the amaxes of their parts. Rows of scales lie in slots:
those that no row has in a group's last tile of 128 are zeros, as the quantizer leaves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ...device.absmax import fmax
from ...device.memory import load_shared, store_global, store_shared
from ...device.ptx import bits_as_f32, f32_as_bits, select
from ...layout.slots import TILE_ROWS
from ..activated import Quantizer, Window, store_if
from ..output import VECTOR_BYTES
from ..problem import QUANTIZED_COLS
from ..scheduler import WorkTile
from .warp_schedule import CONSUMERS_BARRIER, WARPGROUP_SIZE

if TYPE_CHECKING:
	from .config import Sm90GemmConfig

#: Lanes of a staged row of 128 bytes; rows of as many lanes.
_LANES = 8
#: Vectors that a lane activates at once, and words of codes of a store.
_AT_ONCE, _STORE_WORDS = 2, 4


class QuantizedRows:
	"""The quantizing part of a warpgroup's epilogue."""

	def __init__(self, config: Sm90GemmConfig, epilogue: Any):
		self.config = config
		self.epilogue = epilogue
		self.quantizer = Quantizer(config)
		self.everyone = config.consumers * WARPGROUP_SIZE

	def scale_at(self, col: Int32, slot: Int32) -> Int64:
		"""Where the scale of a slot row goes, of the block of the product's columns from ``col`` on."""
		scales = self.epilogue.tensors.scales
		return scales.iterator.toint() + (Int64(col // (2 * QUANTIZED_COLS)) * scales.stride[0] + slot) * 4

	@cute.jit
	def store_tile(self, tile: WorkTile) -> None:
		"""Quantize 64 rows that a consumer warpgroup staged as four blocks: a lane has a row of one of them."""
		config, epilogue = self.config, self.epilogue
		warp, lane = epilogue.thread // 32, epilogue.lane
		row, block = warp * _LANES + lane % _LANES, lane // _LANES
		swizzled = lane % _LANES * VECTOR_BYTES
		at = epilogue.blocks + block * config.block_bytes + row * (_LANES * VECTOR_BYTES)
		first = epilogue.first_m
		rows = tile.rows - first - row
		# The lane's part is 32 columns of the output.
		window = Window.of(config, epilogue.tensors, tile.group, tile.m_row + first + row, tile.n_row + block * 64, rows)
		scale_at = self.scale_at(tile.n_row, tile.m_sf_row + first + row)
		for i in cutlass.range(config.tile.m // config.consumers // (4 * _LANES), unroll=1):
			after = i * (4 * _LANES)
			words = []
			for j in cutlass.range_constexpr(0, _LANES, _AT_ONCE):
				places = [at + after * (_LANES * VECTOR_BYTES) + (swizzled ^ (j + k) * VECTOR_BYTES) for k in range(_AT_ONCE)]
				words += self.quantizer.activate([load_shared(place, 4) for place in places])
			codes, stored = self.quantizer.encode(words, self.quantizer.amax(words, (_LANES, 2 * _LANES)))
			live = window.moved(after, Int32(0), 1, 2)
			for j in cutlass.range_constexpr(0, len(codes), _STORE_WORDS):
				store_if(live.out.at(0, 4 * j), codes[j : j + _STORE_WORDS], (live.rows, 0), (live.cols, 0))
			if block == 0:
				store_global(scale_at + after * 4, [select(live.rows > 0, stored, Uint32(0))])

	@cute.jit
	def begin(self, tile: WorkTile) -> None:
		"""Wait until amaxes of the tile before have been read; zero what a group's last tile has after it."""
		epilogue = self.epilogue
		cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=self.everyone)
		if tile.rows <= self.config.tile.n:
			first = tile.n_sf_row + tile.rows
			if (epilogue.group == 0) & (epilogue.thread < ((0 - first) & (TILE_ROWS - 1))):
				store_global(self.scale_at(tile.m_row, first + epilogue.thread), [Uint32(0)])

	@cute.jit
	def store_block(self, tile: WorkTile, buffer: Int32, window: Window, slot: Int32, first: int) -> None:
		"""Quantize rows from ``first`` on of which four warpgroups have a quarter each: a lane has one vector."""
		epilogue, quantizer = self.epilogue, self.quantizer
		row, lane = epilogue.own_row, epilogue.thread % _LANES
		words = quantizer.activate([load_shared(epilogue.place(buffer, row, epilogue.own_col), 4)])
		amax = quantizer.amax(words, (1, 2, 4))
		parts = epilogue.amaxes + (slot * epilogue.block_rows + row) * (4 * self.config.consumers)
		if (lane == 0) & (epilogue.thread < epilogue.vectors):
			store_shared(parts + epilogue.group * 4, [f32_as_bits(amax)])
		cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=self.everyone)
		amax, *others = (bits_as_f32(word) for word in load_shared(parts, self.config.consumers))
		for other in others:
			amax = fmax(amax, other)
		codes, stored = quantizer.encode(words, amax)
		store_if(window.out.at(first, 0), codes, (window.rows, first), (window.cols, 0))
		if (epilogue.group == 0) & (lane == 0) & (window.rows > first):
			store_global(self.scale_at(tile.m_row, tile.n_sf_row + first + row), [stored])
