"""The 128x128 tile of the tile quantizer: its geometry, its descriptor and its shared memory."""

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
#: Rows of one copy of a box. The boxes of a tile are loaded one after another. With more rows at a
#: time, the data beside them in memory is requested later. On an H200 32 rows are 1 to 2 % faster
#: than 128. sm_100a has not been measured; 128 rows take the fewest instructions.
BOX_ROWS = {"sm_90a": 32, "sm_100a": 128}
#: Bytes of a row in one box, which is the width of TMA's widest swizzle, and bytes of a box.
BOX_BYTES = 128
BOX_SIZE = BOX_BYTES * TILE_ROWS


class TileGeometry:
    """Position of a tile's elements in its boxes and in scale blocks.

    Attributes:
        box_cols: Columns of a box.
        num_boxes: Boxes of a tile, side by side.
        cols_per_word: Elements in 32 bits.
        row_blocks: Scale blocks along a column of the tile.
        col_blocks: Scale blocks along a row of the tile.
        unit: Columns whose scales fill one row of a scale tile.
    """

    def __init__(self, dtype: str, block: int):
        self.box_cols = BOX_BYTES // DTYPE_BYTES[dtype]
        self.num_boxes = TILE_COLS // self.box_cols
        self.cols_per_word = 4 // DTYPE_BYTES[dtype]
        self.row_blocks = TILE_ROWS // block
        self.col_blocks = TILE_COLS // block
        self.unit = SF_TILE_COLS * block


class TileDescriptor(NamedTuple):
    """Contents of a stage. The loader writes it and the team reads it.

    Attributes:
        slot_tile: Slot tile.
        col_tile: Column of tiles.
        first_row: Matrix row of the first row of the tile.
        num_rows: Rows that exist, at most 128; 0 ends the work.
        group: Group of the slot tile.
        amax: Bits of the group's fp32 amax or given scale. It is 0 if groups have none. The loader
            reads it ahead, because a team would wait for it at every tile.
        column_amax: Bits of the columnwise copy's amax, if it has its own.
    """

    slot_tile: Int32
    col_tile: Int32
    first_row: Int32
    num_rows: Int32
    group: Int32
    amax: Int32
    column_amax: Int32


class TileAddresses(NamedTuple):
    """Shared-memory addresses of the data of one tile.

    Attributes:
        tile: Elements.
        scales: Rowwise scales.
        scales_t: Columnwise scales.
        squares: fp32 amaxes of square blocks.
    """

    tile: Int32
    scales: Int32
    scales_t: Int32
    squares: Int32


class TileEncoding(NamedTuple):
    """Parameters that one copy of a tile is encoded with.

    Attributes:
        global_scale: Global scale of the group.
        table: Shared-memory address of the encode factors for ``scale_blocks``, or None.
        seed: Seed of the random numbers, or None without stochastic rounding.
    """

    global_scale: GlobalScaleRegisters
    table: Int32 | None
    seed: Seed | None


class TileSharedMemory(NamedTuple):
    """Pointers into shared memory.

    Attributes:
        tiles: Stages of one tile each.
        scales: Rowwise scales of each team.
        scales_t: Columnwise scale bytes of each team, in two buffers.
        squares: Amaxes of square blocks of each team, in two buffers.
        factors: Encode factors of each team's group, by scale byte.
        descriptors: A ``TileDescriptor`` per stage.
        full: Arrival barriers of each team's tiles, in two buffers, see ``TileLoader``.
        empty: Barriers of stages that the team has read.
        table: Table of activation factors. None if absent.
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
