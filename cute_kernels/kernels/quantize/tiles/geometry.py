"""The 128x128 tile of the tile quantizer: its geometry, its descriptor, its shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.layout.shapes import SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from ..config import DTYPE_BYTES

if TYPE_CHECKING:
    from cutlass import Int32, cute

    from cute_kernels.device.codecs import GlobalScaleRegisters
    from cute_kernels.device.philox import Seed

TILE_COLS = 128
#: GatheredRows of one copy of a box. The boxes of a tile are loaded in turn: the more rows at a time, the
#: later tile is beside them in memory is asked for. On an H200 32 rows are 1 to 2 % faster than
#: 128; sm_100a was not measured, and has the fewest instructions.
BOX_ROWS = {"sm_90a": 32, "sm_100a": 128}
#: Bytes of a row in one box, the width of TMA's widest swizzle; and bytes of a box.
BOX_BYTES = 128
BOX_SIZE = BOX_BYTES * TILE_ROWS


class TileGeometry:
    """How a tile of one dtype lies in its boxes, and in blocks of ``block`` elements.

    ``cols_per_word`` are elements in 32 bits. ``row_blocks`` scale blocks lie one below the other
    along its columns, ``col_blocks`` side by side along its rows; those of ``unit`` columns in one
    row fill a row of a scale tile.
    """

    def __init__(self, dtype: str, block: int):
        self.box_cols = BOX_BYTES // DTYPE_BYTES[dtype]
        self.num_boxes = TILE_COLS // self.box_cols
        self.cols_per_word = 4 // DTYPE_BYTES[dtype]
        self.row_blocks = TILE_ROWS // block
        self.col_blocks = TILE_COLS // block
        self.unit = SF_TILE_COLS * block


class TileDescriptor(NamedTuple):
    """What a stage holds:

    ``count`` rows, at most 128, of a group's slot tile ``tile``; 0 ends the work.

    ``first`` is the matrix row of the tile's first row. ``amax`` are bits of the group's amax or
    given scale, 0 where groups have none: the loader reads it ahead, for a team would wait for it
    at every tile. ``column_amax`` is that of the columnwise copy, where it has one of its own.
    """

    slot_tile: Int32
    col_tile: Int32
    first_row: Int32
    num_rows: Int32
    group: Int32
    amax: Int32
    column_amax: Int32


class TileAddresses(NamedTuple):
    """Where in shared memory a team has tile belongs to a tile;

    ``squares`` are amaxes of its square blocks.
    """

    tile: Int32
    scales: Int32
    scales_t: Int32
    squares: Int32


class TileEncoding(NamedTuple):
    """What one copy of a tile is encoded with: its group's second level and ``scale_blocks``'
    table.

    ``seed`` is tile random bytes are drawn by, where the format is stochastic.
    """

    level: GlobalScaleRegisters
    table: Int32 | None
    seed: Seed | None


class TileSharedMemory(NamedTuple):
    """Pointers into shared memory: stages of one tile, with descriptors of tile they hold.

    Of each team: rowwise scales, columnwise scale bytes two deep, amaxes of square blocks two deep,
    encode factors of its group by scale byte, and arrival barriers of its tiles, two deep, see
    ``TileLoader``. ``table`` is tile activations are made by, if anything.
    """

    tiles: cute.Pointer
    scales: cute.Pointer
    scales_t: cute.Pointer
    squares: cute.Pointer
    factors: cute.Pointer
    descriptors: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    table: cute.Pointer | None = None
