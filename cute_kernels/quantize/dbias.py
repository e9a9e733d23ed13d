"""Column sums of groups in a fixed order, from one read of the rows that exist.

The order is that of ``cute_kernels.reference.reductions.grouped_dbias``: a binary tree over the 128
rows of a tile, row i with row i + 64 first, and the tiles of a group one after the other. A lane
owns the rows of one residue class, which keeps the upper levels of the tree to itself; the last
levels are exchanges within the warp. The exchanges add the same two numbers in both lanes, and the
order of two operands does not matter.

Work comes in items of one group and one strip of columns, 128 bytes of a row. The warps of a CTA
take consecutive tiles of the group at the same time and leave their sums in shared memory, where
one thread a column adds them in order. So a group keeps at most N / 64 CTAs busy (of bf16; N / 32
of fp32), however many rows it has: few groups of few columns do not fill the GPU. Splitting a group
over CTAs would take the sums of its tiles through global memory.

Buffers:   sums of a round, one row a warp, two deep: a barrier of the CTA between the writers of a
           round and its readers; the one of the next round frees the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ..device.constants import WARP_SIZE
from ..device.convert import unpack_words
from ..device.groups import group_end, group_start
from ..device.launch import DSL_TYPES, GridKernel, compact, env_stream
from ..device.memory import load_global_if, load_shared, store_global, store_shared
from ..device.ptx import bits_as_f32, f32_as_bits
from ..layout.slots import TILE_ROWS
from .config import DTYPE_BYTES, DbiasConfig
from .elements import ElementMaker

_WARPS = 4
#: Rows that a lane loads before it adds any: of the input, and of what an activation takes, which
#: is so much code that it is in a loop.
_BATCH, _BATCH_MADE = 16, 4


class DbiasReducer(GridKernel):
	"""Column sums of ragged groups, see the module."""

	ctas_per_sm, num_threads = 4, _WARPS * WARP_SIZE

	def __init__(self, config: DbiasConfig):
		self.dtype = config.dtype
		self.maker = None
		if config.prologue is not None:
			self.maker = ElementMaker(config.prologue, "float32", config.arch)
			self.maker.unit = config.columns_per_lane
		self.columns = config.columns_per_lane
		self.lanes_per_row = 8 if config.vectorized else WARP_SIZE
		#: Residue classes of rows, one a lane of each column.
		self.classes = WARP_SIZE // self.lanes_per_row
		#: Columns of an item.
		self.strip = self.lanes_per_row * self.columns

	@staticmethod
	def fake_args(config: DbiasConfig) -> tuple[Any, ...]:
		element = DTYPE_BYTES[config.dtype]
		rows, groups = cute.sym_int(), cute.sym_int()
		cols = cute.sym_int(divisibility=config.columns_per_lane)
		wide = half = cols
		if config.prologue is not None and config.prologue.record.is_gated:
			wide, half = cute.sym_int(), cute.sym_int(divisibility=config.columns_per_lane)
			wide, half = (wide, None) if config.prologue.halves else (cols, half)

		def plain(width: Any) -> Any:
			return compact(DSL_TYPES[config.dtype], rows, width, align=config.columns_per_lane * element)

		takes_grad = config.prologue is not None and config.prologue.is_gradient
		return (
			plain(wide),
			plain(half) if takes_grad else None,
			compact(Int32, groups, align=4),
			compact(Float32, groups, cols, align=4),
			Int32(1),
			env_stream(),
		)

	@cute.kernel
	def kernel(self, dy: cute.Tensor, grad: cute.Tensor | None, offs: cute.Tensor, dbias: cute.Tensor) -> None:
		smem = cutlass.memory.SmemAllocator()
		sums = smem.allocate_array(Float32, 2 * _WARPS * self.strip, byte_alignment=16).toint()
		num_rows, cols = dy.shape[0], dbias.shape[1]
		tid = cute.arch.thread_idx()[0]
		warp = cute.arch.make_warp_uniform(tid // WARP_SIZE)
		strips = (cols + self.strip - 1) // self.strip
		buffer = Int32(0)
		first_item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
		for item in cutlass.range(first_item, offs.shape[0] * strips, step, unroll=1):
			group = item // strips
			column = (item - group * strips) * self.strip
			row = group_start(offs, group, num_rows)
			end = group_end(offs, group, num_rows)
			total = Float32(0.0)
			while row < end:
				base = sums + buffer * (4 * _WARPS * self.strip)
				first = row + warp * TILE_ROWS
				self.store_tile(dy, grad, cols, base, first, end, column, warp)
				cute.arch.sync_threads()
				if tid < self.strip:
					# Tiles past the end of the group are zeros, which change nothing.
					for w in cutlass.range_constexpr(_WARPS):
						at = base + (w * self.strip + tid) * 4
						total += bits_as_f32(load_shared(at, 1)[0])
				buffer ^= 1
				row += _WARPS * TILE_ROWS
			if tid < self.strip:
				if column + tid < cols:
					at = Int64(group) * cols + column + tid
					store_global(dbias.iterator.toint() + at * 4, [f32_as_bits(total)])

	@cute.jit
	def store_tile(
		self,
		dy: cute.Tensor,
		grad: cute.Tensor | None,
		cols: Int32,
		base: Int32,
		row: Int32,
		end: Int32,
		column: Int32,
		warp: Int32,
	) -> None:
		"""A warp's tile: the sums of its columns to the warp's part of the buffer at ``base``."""
		lane = cute.arch.lane_idx()
		totals = cute.make_rmem_tensor(self.columns, Float32)
		totals.fill(0.0)
		if row < end:
			mine = column + lane % self.lanes_per_row * self.columns
			row += lane // self.lanes_per_row
			if mine >= cols:
				end = Int32(0)  # no loads
			inputs, is_second = self.inputs(dy, grad, cols, row, mine)
			if cutlass.const_expr(self.maker is None):
				numbers = self.tree(inputs, is_second, row, end, 0, self.classes)
			else:
				numbers = self.made_tree(inputs, is_second, row, end)
			for c in cutlass.range_constexpr(self.columns):
				number = numbers[c]
				lanes = WARP_SIZE // 2
				while lanes >= self.lanes_per_row:
					number += cute.arch.shuffle_sync_bfly(number, lanes)
					lanes //= 2
				totals[c] = number
		if lane < self.lanes_per_row:
			at = base + (warp * self.strip + lane * self.columns) * 4
			for c in cutlass.range_constexpr(0, self.columns, 4):
				count = min(4, self.columns)
				store_shared(at + c * 4, [f32_as_bits(totals[c + i]) for i in range(count)])

	def inputs(
		self, dy: cute.Tensor, grad: cute.Tensor | None, cols: Int32, row: Int32, col: Int32
	) -> tuple[list[tuple[Int64, Int64]], Boolean | None]:
		"""A lane's place in each input and the bytes from row to row; and of which half it is."""
		if self.maker is None:
			pitch = Int64(cols) * DTYPE_BYTES[self.dtype]
			at = dy.iterator.toint() + row * pitch + col * DTYPE_BYTES[self.dtype]
			return [(at, pitch)], None
		return self.maker.sources(dy, grad, row, col, cols)

	def tree(
		self, inputs: list[tuple[Int64, Int64]], is_second: Boolean | None, row: Int32, end: Int32, first: int, step: int
	) -> list[Float32]:
		"""Sums over the rows ``first``, ``first + step``, ... of the tile, one a column.

		Args:
		  inputs: address of the lane's first row, and bytes from one row to the next, of each.
		  is_second: which half the columns are of, see ``ElementMaker.column``.
		  row: the lane's first row.
		  end: rows from here on count as zeros.
		  first: the first row, relative to ``row``.
		  step: a power of two.
		"""
		if TILE_ROWS // step > _BATCH:
			halves = [self.tree(inputs, is_second, row, end, start, 2 * step) for start in (first, first + step)]
			return _added(*halves)
		return self.leaf(inputs, is_second, row, end, range(first, TILE_ROWS, step))

	@cute.jit
	def made_tree(
		self, inputs: list[tuple[Int64, Int64]], is_second: Boolean | None, row: Int32, end: Int32
	) -> list[Float32]:
		"""``tree`` of all rows of the lane, leaf by leaf.

		A leaf is added to that of the last one that waits at its level, and so on up.
		"""
		levels = (TILE_ROWS // self.classes // _BATCH_MADE).bit_length() - 1
		waiting = cute.make_rmem_tensor(levels * self.columns, Float32)
		waiting.fill(0.0)
		out = cute.make_rmem_tensor(self.columns, Float32)
		for leaf in cutlass.range(1 << levels, unroll=1):
			first = Int32(0)
			for bit in cutlass.range_constexpr(levels):
				first += (leaf >> (levels - 1 - bit)) % 2 * (self.classes << bit)
			places = [first + i * (self.classes << levels) for i in range(_BATCH_MADE)]
			sums = self.leaf(inputs, is_second, row, end, places)
			for c in cutlass.range_constexpr(self.columns):
				out[c] = sums[c]
			is_alone = Boolean(False)
			for level in cutlass.range_constexpr(levels):
				if not is_alone:
					is_alone = (leaf >> level) % 2 == 0
					for c in cutlass.range_constexpr(self.columns):
						at = level * self.columns + c
						if is_alone:
							waiting[at] = out[c]
						else:
							out[c] = waiting[at] + out[c]
		return [out[c] for c in range(self.columns)]

	def leaf(
		self,
		inputs: list[tuple[Int64, Int64]],
		is_second: Boolean | None,
		row: Int32,
		end: Int32,
		places: Sequence[Int32 | int],
	) -> list[Float32]:
		"""Sums over rows, a power of two of them, that are loaded before any are added."""
		num_bytes = self.columns * DTYPE_BYTES[self.dtype]
		loaded = [[load_global_if(at + pitch * i, num_bytes, row + i, end) for at, pitch in inputs] for i in places]
		rows = [self.numbers(words, is_second)[: self.columns] for words in loaded]
		while len(rows) > 1:
			half = len(rows) // 2
			rows = [_added(rows[i], rows[i + half]) for i in range(half)]
		return rows[0]

	def numbers(self, words: list[list[Uint32]], is_second: Boolean | None) -> list[Float32]:
		"""What is summed, of words of each input."""
		if self.maker is None:
			return unpack_words(words[0], self.dtype)
		return self.maker.numbers(words, is_second)


def _added(a: list[Float32], b: list[Float32]) -> list[Float32]:
	return [x + y for x, y in zip(a, b, strict=True)]
