"""The 128x128 tile of the tile quantizer: its geometry in shared memory, its descriptor."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from cutlass import Int32, Uint16, Uint32

from cute_kernels.device.ptx import asm
from cute_kernels.formats import NVFP4
from cute_kernels.quantize.config import DTYPE_BYTES
from cute_kernels.shapes import TILE_ROWS

__all__ = [
    "BLOCK",
    "BOX_BYTES",
    "BOX_SIZE",
    "COL_BLOCKS",
    "ROW_BLOCKS",
    "TILE_COLS",
    "Descriptor",
    "TileGeometry",
    "pack_halves",
]

BLOCK = NVFP4.sf_vec_size
TILE_COLS = 128
#: Bytes of a row in one box, the width of TMA's widest swizzle; and bytes of a box.
BOX_BYTES = 128
BOX_SIZE = BOX_BYTES * TILE_ROWS
#: Scale blocks of a tile along its rows and along its columns.
ROW_BLOCKS = TILE_ROWS // BLOCK
COL_BLOCKS = TILE_COLS // BLOCK


@dataclasses.dataclass(frozen=True)
class TileGeometry:
    """How a tile of one dtype lies in its boxes."""

    dtype: str

    @property
    def box_cols(self) -> int:
        """Columns of a box."""
        return BOX_BYTES // DTYPE_BYTES[self.dtype]

    @property
    def num_boxes(self) -> int:
        """Boxes of a tile."""
        return TILE_COLS // self.box_cols

    @property
    def cols_per_word(self) -> int:
        """Elements in 32 bits."""
        return 4 // DTYPE_BYTES[self.dtype]


class Descriptor(NamedTuple):
    """What a stage holds; ``count`` 0 ends the work.

    Attributes:
        tile: slot tile.
        col_tile: which 128 columns.
        first: matrix row of the tile's first row.
        count: rows that exist, at most 128.
        group: the group.
        amax: bits of the group's amax, 0 where groups have none. The loader reads it ahead, for
            a team would wait for it at every tile.
    """

    tile: Int32
    col_tile: Int32
    first: Int32
    count: Int32
    group: Int32
    amax: Int32


def pack_halves(low: Uint16, high: Uint16) -> Uint32:
    """One word of two halves."""
    return asm("mov.b32 $0, {$1, $2};", [Uint32], [low, high])
