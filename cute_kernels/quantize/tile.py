"""The 128x128 tile of the tile quantizer: its geometry in shared memory, its descriptor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from cutlass import Float32, Int32, Uint16, Uint32

from cute_kernels.device.memory import load_shared
from cute_kernels.device.nvfp4 import scale_bytes, scale_pair
from cute_kernels.device.ptx import asm, bits_as_f32
from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import TILE_ROWS
from cute_kernels.quantize.config import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BLOCK",
    "BOX_BYTES",
    "BOX_SIZE",
    "COL_BLOCKS",
    "ROW_BLOCKS",
    "SCALE_CODES",
    "TILE_COLS",
    "Descriptor",
    "Level",
    "TileGeometry",
    "join_scales",
    "scale_blocks",
]

BLOCK = NVFP4.sf_vec_size
TILE_COLS = 128
#: Bytes of a row in one box, the width of TMA's widest swizzle; and bytes of a box.
BOX_BYTES = 128
BOX_SIZE = BOX_BYTES * TILE_ROWS
#: Scale blocks of a tile along its rows and along its columns.
ROW_BLOCKS = TILE_ROWS // BLOCK
COL_BLOCKS = TILE_COLS // BLOCK
#: Scale bytes that are not negative.
SCALE_CODES = 128


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


class Level(NamedTuple):
    """The second level of scales that a block's own scale is relative to.

    Attributes:
        s_dec: its decode scale.
        mult: what an amax is multiplied with for its scale.
        factors: where in shared memory the encode factors of all ``SCALE_CODES`` scales are, as
            fp32; used if there is such a table.
    """

    s_dec: Float32
    mult: Float32
    factors: Int32


def scale_blocks(
    a: Float32, b: Float32, level: Level, tabled: bool
) -> tuple[Uint16, Float32, Float32]:
    """Scale bytes of two blocks with amaxes ``a`` and ``b``, that of ``a`` lowest; their factors.

    Args:
        a: amax of the first block.
        b: amax of the second.
        level: their second level.
        tabled: look factors up instead of computing them.
    """
    if not tabled:
        return scale_pair(a, b, level.s_dec, level.mult)
    pair = scale_bytes(a, b, level.mult)
    word, mask = Uint32(pair), 4 * SCALE_CODES - 4
    enc_a, enc_b = (
        bits_as_f32(load_shared(level.factors + Int32(place & mask), 1)[0])
        for place in (word << 2, word >> 6)
    )
    return pair, enc_a, enc_b


def join_scales(pairs: Sequence[Uint16]) -> Uint32:
    """One word of one pair or two of scale bytes."""
    if len(pairs) == 1:
        return Uint32(pairs[0])
    return asm("mov.b32 $0, {$1, $2};", [Uint32], pairs)
