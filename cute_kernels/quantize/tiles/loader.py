"""The loader warp of the tile quantizer: which tiles hold rows, and their copies by TMA.

Tiles are taken in bands of ``config.band`` slot tiles: down the band's column of tiles, then the
next column, so that what is written to a column of the columnwise copy at about the same time is
contiguous. Bands of which no tile holds rows are skipped.

A tile's arrival barrier is its team's, not its stage's: a team waits for its own tiles only, so on
a stage's barrier it could be ahead of another team's load that has not landed, and take the parity
of an older phase for its own. Two a team are enough: a stage is refilled only after its team has
seen its barrier, and that comes before the team's next tile but one is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.device.groups import Grouping, next_item
from cute_kernels.device.launch import DSL_TYPES
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.layout.slots import TILE_ROWS

from .geometry import BOX_BYTES, BOX_ROWS, BOX_SIZE, TILE_COLS, Descriptor, SharedMemory, TileGeometry

if TYPE_CHECKING:
	from cute_kernels.quantize.config import TileConfig

DESCRIPTOR_WORDS = 8


class Tma(NamedTuple):
	"""Copies of a box: the atom, its view of the matrix, the layout it leaves."""

	atom: cute.CopyAtom
	source: cute.Tensor
	layout: cute.ComposedLayout


class TileLoader:
	"""Finds and loads tiles, see the module."""

	def __init__(self, config: TileConfig, tile: TileGeometry):
		self.config = config
		self.tile = tile
		self.box_rows = BOX_ROWS[config.arch]

	def copy_of(self, x: cute.Tensor, rows: Int32) -> tuple[Any, ...]:
		"""What copies boxes of a matrix: atom, source and layout."""
		cols, box = x.shape[len(x.shape) - 1], (self.box_rows, self.tile.box_cols)
		matrix = cute.make_tensor(x.iterator, cute.make_layout((rows, cols), stride=(Int64(cols), 1)))
		atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, x.element_type)
		layout = cute.tile_to_shape(atom, box, order=(0, 1))
		op = cpasync.CopyBulkTensorTileG2SOp()
		return (*cpasync.make_tiled_tma_atom(op, matrix, layout, box), layout)

	@cute.jit
	def load(
		self,
		groups: Grouping,
		cols: Int32,
		group_amax: cute.Tensor | None,
		column_amax: cute.Tensor | None,
		inputs: Any,
		shared: SharedMemory,
	) -> None:
		"""Load the tiles of this CTA that hold rows, with rows of the next group to whole boxes.

		Without ``inputs``, copies of boxes, only say which tiles those are.
		"""
		stage, phase, full = Int32(0), Int32(1), Int32(0)
		amax, own, amax_of = Int32(0), Int32(0), Int32(-1)
		col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
		step = cute.arch.grid_dim()[0]
		item = cute.arch.block_idx()[0]
		num_tiles = groups.num_tiles()
		num_items = num_tiles * col_tiles
		# The last group met so far; of the band, the one before it and the first tile with rows.
		band, hint, reach, head = Int32(-1), Int32(0), Int32(0), Int32(0)
		# Of the group met last: its first tile, its first row and the row after its last.
		group, origin, start, end = Int32(0), Int32(0), Int32(0), Int32(0)
		while item < num_items:
			band_was = band
			band = item // (self.config.band * col_tiles)
			first_tile = band * self.config.band
			if band != band_was:
				hint = reach
				head = groups.seek(first_tile, hint)[0]
			wanted, col_tile = self.tile_of(item, first_tile, num_tiles, col_tiles)
			# Most tiles are of the group of the one before: no look at the ends of groups.
			tile, first = wanted, start + (wanted - origin) * TILE_ROWS
			count = cutlass.min(end - first, Int32(TILE_ROWS))
			if wanted < origin or count <= 0:
				tile, group, first, count = groups.seek(wanted, hint)
				origin, start, end = groups.span(group)
			if tile != wanted:
				item = self.skip(item, step, first_tile, head, col_tiles)
			else:
				reach = cutlass.max(reach, group)
				if cutlass.const_expr(group_amax is not None):
					if group != amax_of:
						amax, amax_of = Int32(f32_as_bits(group_amax[group])), group
						if cutlass.const_expr(column_amax is not None):
							own = Int32(f32_as_bits(column_amax[group]))
				cute.arch.mbarrier_wait(shared.empty + stage, phase)
				what = Descriptor(tile, col_tile, first, count, group, amax, own)
				self.describe(shared, stage, what)
				if cutlass.const_expr(inputs is not None):
					self.load_tile(what, inputs, stage, full, shared)
				self.announce(shared, full)
				stage, phase = self.next_stage(stage, phase, 1)
				full = self.next_barrier(full)
				item += step
		for _ in cutlass.range(self.config.num_teams, unroll=1):
			cute.arch.mbarrier_wait(shared.empty + stage, phase)
			zero = Int32(0)
			self.describe(shared, stage, Descriptor(*[zero] * 7))
			self.announce(shared, full)
			stage, phase = self.next_stage(stage, phase, 1)
			full = self.next_barrier(full)

	@cute.jit
	def announce(self, shared: SharedMemory, full: Int32) -> None:
		with cute.arch.elect_one():
			cute.arch.mbarrier_arrive(shared.full + full)

	def tile_of(self, item: Int32, first_tile: Int32, num_tiles: Int32, col_tiles: Int32) -> tuple[Int32, Int32]:
		"""The slot tile and the column of tiles of an item of the band from ``first_tile`` on."""
		tall = cutlass.min(num_tiles - first_tile, Int32(self.config.band))
		within = item - first_tile * col_tiles
		col_tile = within // tall
		return first_tile + (within - col_tile * tall), col_tile

	@cute.jit
	def skip(self, item: Int32, step: Int32, first_tile: Int32, head: Int32, col_tiles: Int32) -> Int32:
		"""The item after one without rows; in the band of ``head`` if that is a later one."""
		item += step
		if head >= first_tile + self.config.band:
			band_of = head // self.config.band * self.config.band
			item = next_item(item - step, step, band_of, col_tiles)
		return item

	@cute.jit
	def load_tile(self, what: Descriptor, inputs: Any, stage: Int32, full: Int32, shared: SharedMemory) -> None:
		strips = (what.count + (self.box_rows - 1)) // self.box_rows
		bar, target = shared.full + full, shared.tiles + stage * self.config.tile_bytes
		with cute.arch.elect_one():
			cute.arch.mbarrier_expect_tx(bar, strips * (self.config.tile_bytes // TILE_ROWS * self.box_rows))
		for n in cutlass.range(strips, unroll=1):
			row = n * self.box_rows
			for t, (tma, first) in enumerate(self.sources(what, inputs)):
				for b in range(self.tile.num_boxes):
					place = target + ((t * self.tile.num_boxes + b) * BOX_SIZE + row * BOX_BYTES)
					self.copy_box(tma, what.first + row, first + b * self.tile.box_cols, place, bar)

	def sources(self, what: Descriptor, inputs: Any) -> list[tuple[Tma, Int32]]:
		"""What each tile of a stage is copied from, and its first column there."""
		return [(inputs, what.col_tile * TILE_COLS)]

	@cute.jit
	def copy_box(self, tma: Tma, row: Int32, col: Int32, target: cute.Pointer, bar: cute.Pointer) -> None:
		dtype = DSL_TYPES[self.config.dtype]
		pointer = cute.recast_ptr(target, tma.layout.inner, dtype=dtype)
		window = cute.local_tile(cute.domain_offset((row, col), tma.source), (self.box_rows, self.tile.box_cols), (0, 0))
		to, what = cpasync.tma_partition(
			tma.atom,
			0,
			cute.make_layout(1),
			cute.group_modes(cute.make_tensor(pointer, tma.layout.outer), 0, 2),
			cute.group_modes(window, 0, 2),
		)
		cute.copy(tma.atom, what, to, tma_bar_ptr=bar)

	@cute.jit
	def next_stage(self, stage: Int32, phase: Int32, by: int) -> tuple[Int32, Int32]:
		stage += by
		if stage >= self.config.num_stages:
			stage -= self.config.num_stages
			phase ^= 1
		return stage, phase

	@cute.jit
	def next_barrier(self, full: Int32) -> Int32:
		"""The arrival barrier of the next tile: first and second of each team in turn."""
		full += 2
		if full >= 2 * self.config.num_teams:
			full = full - 2 * self.config.num_teams ^ 1
		return full

	@cute.jit
	def describe(self, shared: SharedMemory, stage: Int32, what: Descriptor) -> None:
		at = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
		with cute.arch.elect_one():
			store_shared(at, [Uint32(value) for value in what[:4]])
			words = [Uint32(value) for value in what[4:]]
			store_shared(at + 16, [*words, Uint32(0)] if self.config.has_own_columns else words[:2])

	@cute.jit
	def read_descriptor(self, shared: SharedMemory, stage: Int32) -> Descriptor:
		at = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
		words = load_shared(at, 4)
		words += load_shared(at + 16, 4 if self.config.has_own_columns else 2)
		# A second amax, or the first again.
		return Descriptor(*[Int32(word) for word in (words + words[5:6])[:7]])
