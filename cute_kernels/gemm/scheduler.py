"""The scheduler warp: which tiles this CTA works on, found on the device.

Tiles are numbered group by group and a cluster takes every ``num_clusters``-th. In an m_grouped
product the number of tiles of a group depends on its rows; the warp holds a window of 32 groups,
one a lane, with a running count of tiles, and moves it forward only. The whole walk reads ``offs``
once, however many tiles there are. Where several kernels share a product, each takes the tiles
whose rows are in its range. In a k_grouped product all groups have the same number of tiles.

Groups of one row tile wait for memory, those of several for the tensor cores. A configuration that
``mixes_groups`` has a list of each in a window, and a cluster goes through both at the same pace.

Each tile is handed to the other warps as a record of eight words through a ring in shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute, pipeline

from ..device.constants import WARP_SIZE
from ..device.groups import group_end, group_start
from ..device.ptx import asm_volatile
from ..layout.slots import TILE_ROWS, slot_tile

if TYPE_CHECKING:
	from .problem import Extents, GemmConfig

#: Words of a tile record.
TILE_WORDS = 8


class WorkTile(NamedTuple):
	"""One tile of the output, or the end of the work.

	Attributes:
	  group: its group, -1 at the end; the number of groups for the tail of the buffer.
	  m_row: first row of operand M.
	  m_sf_row: that row in the order of the block scales.
	  n_row: first row of operand N.
	  n_sf_row: that row in the order of the block scales.
	  k_start: first element of K: a slot's, or a row's if K is ragged.
	  k_blocks: MMA instructions along K; 0 for an empty group and for the tail.
	  rows: rows of the group: in an m_grouped product those from the tile's first on.
	"""

	group: Int32
	m_row: Int32
	m_sf_row: Int32
	n_row: Int32
	n_sf_row: Int32
	k_start: Int32
	k_blocks: Int32
	rows: Int32


def _record(buffer: cute.Tensor, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
	"""Both 16-byte halves of a tile record in shared memory."""
	halves = []
	for half in range(2):
		address = buffer.iterator.toint() + (stage * TILE_WORDS + half * 4) * 4
		pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
		halves.append(cute.make_tensor(pointer, cute.make_layout(4)))
	return tuple(halves)


class TileReader:
	"""A warp's view of the ring of tile records."""

	def __init__(self, ring: pipeline.PipelineAsync, buffer: cute.Tensor):
		self.ring = ring
		self.buffer = buffer

	@cute.jit
	def next(self, state: Any) -> tuple[WorkTile, Any]:
		"""Take the record at ``state`` and free its place; the record and the next state."""
		self.ring.consumer_wait(state)
		# One access for all lanes; vectors would be read by eight lanes at a time.
		word = self.buffer[state.index * TILE_WORDS + cute.arch.lane_idx() % TILE_WORDS]
		cute.arch.sync_warp()
		with cute.arch.elect_one():
			self.ring.consumer_release(state)
		state.advance()
		return WorkTile(*(cute.arch.shuffle_sync(word, i) for i in range(TILE_WORDS))), state

	def new_state(self) -> Any:
		"""Where a warp starts to read."""
		return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.ring.num_stages)


class TileScheduler:
	"""The scheduler warp.

	Args:
	  buffer: its (stages * 8,) int32 in shared memory.
	  extents: the sizes; a grouping uses some of them.
	"""

	def __init__(
		self, config: GemmConfig, ring: pipeline.PipelineAsync, buffer: cute.Tensor, offs: cute.Tensor, extents: Extents
	):
		self.config = config
		self.ring = ring
		self.buffer = buffer
		self.offs = offs
		self.extents = extents
		self.tile = config.tile

	@cute.jit
	def run(self) -> None:
		state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.ring.num_stages)
		if cutlass.const_expr(self.config.grouping == "m_grouped"):
			state = self.walk_ragged(state)
		else:
			state = self.walk_uniform(state)
		state = self.put(state, WorkTile(Int32(-1), *[Int32(0)] * (TILE_WORDS - 1)))
		self.ring.producer_tail(state)

	@cute.jit
	def put(self, state: Any, tile: WorkTile) -> Any:
		"""Hand a record to the other warps at ``state``; the next state."""
		self.ring.producer_acquire(state)
		with cute.arch.elect_one():
			halves = _record(self.buffer, state.index)
			for half, words in zip(halves, (tile[:4], tile[4:]), strict=True):
				registers = cute.make_rmem_tensor(4, Int32)
				for i in cutlass.range_constexpr(4):
					registers[i] = words[i]
				cute.autovec_copy(registers, half)
			self.ring.producer_commit(state)
		cute.arch.sync_warp()
		state.advance()
		return state

	def position(self) -> tuple[Int32, Int32]:
		"""The number of this cluster, and how many there are."""
		num_ctas = self.tile.num_ctas
		return cute.arch.block_idx()[0] // num_ctas, cute.arch.grid_dim()[0] // num_ctas

	def num_listed(self) -> Int32:
		"""Groups that have tiles."""
		return self.offs.shape[0] + int(self.config.zero_tail)

	@cute.jit
	def group_rows(self, group: Int32) -> tuple[Int32, Int32]:
		"""First row and number of rows of a group, clamped to the buffer; none past the last.

		The tail of the buffer, if it is to be zeroed, is one more group.
		"""
		start, end = Int32(0), Int32(0)
		if group < self.num_listed():
			end = Int32(self.extents.rows)
			if group < self.offs.shape[0]:
				end = group_end(self.offs, group, self.extents.rows)
			start = group_start(self.offs, group, self.extents.rows)
		return start, cutlass.max(end - start, 0)

	@cute.jit
	def row_tiles(self, rows: Int32) -> tuple[Int32, Int32]:
		"""How many row tiles of a group are this kernel's, and the row where they begin."""
		part = self.config.rows_taken
		count, first = (rows + (part.chunk - 1)) // part.chunk, Int32(0)
		if cutlass.const_expr((part.least, part.most) != (0, part.chunk)):
			whole = rows // part.chunk
			left = rows - whole * part.chunk
			count = whole
			if cutlass.const_expr(part.most < part.chunk):
				count, first = Int32(0), whole * part.chunk
			if left > part.least and left <= part.most:
				count += 1
		return count, first

	@cute.jit
	def window(self, first: Int32, col_tiles: Int32) -> Any:
		"""This lane's group of the 32 from ``first`` on: first row, row count, and ``listed`` of each list."""
		start, rows = self.group_rows(first + cute.arch.lane_idx())
		row_tiles, _ = self.row_tiles(rows)
		tiles = row_tiles * col_tiles
		if cutlass.const_expr(not self.config.mixes_groups):
			return start, rows, (self.listed(tiles),)
		large = Int32(0)
		if row_tiles > 1:
			large = tiles
		return start, rows, (self.listed(tiles - large), self.listed(large))

	@cute.jit
	def listed(self, tiles: Int32) -> tuple[Int32, Int32, Int32]:
		"""Tiles of a list before this lane's group, up to its end, and of all lanes."""
		lane = cute.arch.lane_idx()
		upto = tiles
		for shift in cutlass.range_constexpr(5):
			below = cute.arch.shuffle_sync_up(upto, 1 << shift, mask_and_clamp=0)
			if lane >= 1 << shift:
				upto += below
		return upto - tiles, upto, cute.arch.shuffle_sync(upto, WARP_SIZE - 1)

	@cute.jit
	def prefetch_offs(self) -> None:
		"""Ask for the ``offs`` of the first 1024 groups, a line of 32 a lane.

		A walk that finds few tiles would wait for one line after another.
		"""
		group = cute.arch.lane_idx() * WARP_SIZE
		if group < self.offs.shape[0]:
			address = self.offs.iterator.toint() + Int64(group) * 4
			asm_volatile("prefetch.global.L1 [$0];", [address])

	@cute.jit
	def walk_ragged(self, state: Any) -> Any:
		num_cols = self.extents.m if cutlass.const_expr(self.tile.swap_ab) else self.extents.n
		col_tiles = (num_cols + (self.tile.cols - 1)) // self.tile.cols
		instruction_k = self.config.instruction_k
		k_blocks = (self.extents.k + (instruction_k - 1)) // instruction_k
		first = Int32(0)
		if cutlass.const_expr(self.config.rows_taken.least > 0):
			self.prefetch_offs()
		start, rows, lists = self.window(first, col_tiles)
		position, step = self.position()
		# The cluster's next tile of each list, from the window's first on.
		indices = (position,)
		places = indices
		if cutlass.const_expr(self.config.mixes_groups):
			# More of one list, less of the other.
			indices = (position, step - 1 - position)
			places = indices
		while first < self.num_listed():
			which = self.next_list(indices, lists)
			if which >= 0:
				local, before, upto = indices[0], lists[0][0], lists[0][1]
				if cutlass.const_expr(self.config.mixes_groups):
					if which == 1:
						local, before, upto = indices[1], lists[1][0], lists[1][1]
				owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= local))
				group_start = cute.arch.shuffle_sync(start, owner)
				group_rows = cute.arch.shuffle_sync(rows, owner)
				local -= cute.arch.shuffle_sync(before, owner)
				row_tiles, first_row = self.row_tiles(group_rows)
				row = first_row + local % row_tiles * self.tile.rows
				col = local // row_tiles * self.tile.cols
				group = first + owner
				tile_k_blocks = k_blocks
				if cutlass.const_expr(self.config.zero_tail):
					if group == self.offs.shape[0]:
						tile_k_blocks = Int32(0)
				sf_row = slot_tile(group_start, group) * TILE_ROWS + row
				ragged, uniform = (group_start + row, sf_row), (col, col)
				if cutlass.const_expr(self.tile.swap_ab):
					ragged, uniform = uniform, ragged
				state = self.put(state, WorkTile(group, *ragged, *uniform, Int32(0), tile_k_blocks, group_rows - row))
				indices, places = self.advance(which, indices, places, step)
			else:
				indices = tuple(index - count for index, (_, _, count) in zip(indices, lists, strict=True))
				first += WARP_SIZE
				start, rows, lists = self.window(first, col_tiles)
		return state

	@cute.jit
	def next_list(self, indices: tuple[Int32, ...], lists: Any) -> Int32:
		"""Of which list the next tile is; -1 if there is none."""
		which = Int32(-1)
		if indices[0] < lists[0][2]:
			which = Int32(0)
		if cutlass.const_expr(self.config.mixes_groups):
			if indices[1] < lists[1][2]:
				if which < 0 or Int64(indices[1]) * lists[0][2] <= Int64(indices[0]) * lists[1][2]:
					which = Int32(1)
		return which

	@cute.jit
	def advance(self, which: Int32, indices: tuple[Int32, ...], places: tuple[Int32, ...], step: Int32) -> Any:
		"""After a tile of a list, a turn of all clusters further: numbers, and places in the turn.

		Of two lists a cluster's place changes, or it might get partial tiles only.
		"""
		if cutlass.const_expr(not self.config.mixes_groups):
			return (indices[0] + step,), places
		index, place = indices[0], places[0]
		if which == 1:
			index, place = indices[1], places[1]
		index += step - 1
		place -= 1
		if place < 0:
			index += step
			place += step
		if which == 1:
			indices, places = (indices[0], index), (places[0], place)
		else:
			indices, places = (index, indices[1]), (place, places[1])
		return indices, places

	@cute.jit
	def walk_uniform(self, state: Any) -> Any:
		tiles_m = (self.extents.m + (self.tile.rows - 1)) // self.tile.rows
		tiles_n = (self.extents.n + (self.tile.cols - 1)) // self.tile.cols
		tiles = tiles_m * tiles_n
		instruction_k = self.config.instruction_k
		index, step = self.position()
		while index < self.offs.shape[0] * tiles:
			group = index // tiles
			local = index - group * tiles
			start, rows = self.group_rows(group)
			row, col = local % tiles_m * self.tile.rows, local // tiles_m * self.tile.cols
			k_start = start
			if cutlass.const_expr(not self.config.ragged_k):
				k_start = slot_tile(start, group) * TILE_ROWS
			# An empty group leaves its output alone when accumulating, and zeros it otherwise.
			if rows > 0 or cutlass.const_expr(not self.config.accumulate):
				state = self.put(
					state, WorkTile(group, row, row, col, col, k_start, (rows + (instruction_k - 1)) // instruction_k, rows)
				)
			index += step
		return state
