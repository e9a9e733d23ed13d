"""The 128x128 tile of the tile quantizer: its geometry, its descriptor, its shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...layout.shapes import SF_TILE_COLS
from ...layout.slots import TILE_ROWS
from ..config import DTYPE_BYTES

if TYPE_CHECKING:
	from cutlass import Int32, cute

	from ...device.codecs import Level
	from ...device.philox import Seed

TILE_COLS = 128
#: Rows of one copy of a box. The boxes of a tile are loaded in turn: the more rows at a time, the
#: later what is beside them in memory is asked for. On an H200 32 rows are 1 to 2 % faster than
#: 128; sm_100a was not measured, and has the fewest instructions.
BOX_ROWS = {"sm_90a": 32, "sm_100a": 128}
#: Bytes of a row in one box, the width of TMA's widest swizzle; and bytes of a box.
BOX_BYTES = 128
BOX_SIZE = BOX_BYTES * TILE_ROWS


class TileGeometry:
	"""How a tile of one dtype lies in its boxes, and in blocks of ``block`` elements.

	Attributes:
	  box_cols: columns of a box.
	  num_boxes: boxes of a tile.
	  cols_per_word: elements in 32 bits.
	  row_blocks: scale blocks of a tile along its columns, one below the other.
	  col_blocks: scale blocks of a tile along its rows, side by side.
	  unit: columns whose scales in one row fill a row of a scale tile.
	"""

	def __init__(self, dtype: str, block: int):
		self.box_cols = BOX_BYTES // DTYPE_BYTES[dtype]
		self.num_boxes = TILE_COLS // self.box_cols
		self.cols_per_word = 4 // DTYPE_BYTES[dtype]
		self.row_blocks = TILE_ROWS // block
		self.col_blocks = TILE_COLS // block
		self.unit = SF_TILE_COLS * block


class Descriptor(NamedTuple):
	"""What a stage holds; ``count`` 0 ends the work.

	Attributes:
	  tile: slot tile.
	  col_tile: which 128 columns.
	  first: matrix row of the tile's first row.
	  count: rows that exist, at most 128.
	  group: the group.
	  amax: bits of the group's amax or given scale, 0 where groups have none. The loader reads
	    it ahead, for a team would wait for it at every tile.
	  column_amax: likewise of the columnwise copy, where it has one of its own.
	"""

	tile: Int32
	col_tile: Int32
	first: Int32
	count: Int32
	group: Int32
	amax: Int32
	column_amax: Int32


class TilePlaces(NamedTuple):
	"""Where in shared memory a team has what belongs to a tile.

	Attributes:
	  tile: the tile.
	  scales: its rowwise scales, where they go through shared memory.
	  scales_t: its columnwise scale bytes.
	  squares: amaxes of its square blocks.
	"""

	tile: Int32
	scales: Int32
	scales_t: Int32
	squares: Int32


class Encoding(NamedTuple):
	"""What one copy of a tile is encoded with.

	Attributes:
	  level: the second level of its group.
	  table: where in shared memory encode factors are, see ``scale_blocks``.
	  seed: what random bytes are drawn by, where the format is stochastic.
	"""

	level: Level
	table: Int32 | None
	seed: Seed | None


class SharedMemory(NamedTuple):
	"""Pointers into shared memory.

	Attributes:
	  tiles: num_stages stages of one tile.
	  scales: rowwise scales of each team's tile.
	  scales_t: columnwise scale bytes of each team's tile, two deep.
	  squares: amaxes of the square blocks of each team's tile, two deep.
	  factors: encode factors of each team's group, by scale byte.
	  descriptors: what each stage holds, see ``Descriptor``.
	  full: arrival barriers of each team's tiles, two deep, see ``TileLoader``.
	  empty: release barriers of the stages.
	"""

	tiles: cute.Pointer
	scales: cute.Pointer
	scales_t: cute.Pointer
	squares: cute.Pointer
	factors: cute.Pointer
	descriptors: cute.Pointer
	full: cute.Pointer
	empty: cute.Pointer
