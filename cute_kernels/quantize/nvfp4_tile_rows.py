"""The rowwise half of the tile quantizer: a tile's rows to codes and scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.encode import encode_row_block
from cute_kernels.device.memory import exchange_halves, load_shared, store_global
from cute_kernels.device.nvfp4 import absmax_words, second_level
from cute_kernels.device.ptx import bits_as_f32, select
from cute_kernels.quantize.tile import (
    BLOCK,
    BOX_BYTES,
    BOX_SIZE,
    COL_BLOCKS,
    TILE_COLS,
    Descriptor,
    Level,
    TileGeometry,
    pack_halves,
    scale_blocks,
)
from cute_kernels.shapes import SF_TILE_BYTES, SF_TILE_COLS

if TYPE_CHECKING:
    from cute_kernels.quantize.config import TileConfig

__all__ = ["RowConverter"]


class RowConverter:
    """Converts the rows of tiles in shared memory, a row a lane."""

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.tile = TileGeometry(config.dtype)

    @cute.jit
    def level(self, row_amax: cute.Tensor, what: Descriptor, row: Int32) -> Level:
        """The second level of a row; of a row that does not exist, that of a zero row."""
        g = Float32(0.0)
        if row < what.count:
            g = row_amax[what.first + row]
        return Level(*second_level(g), Int32(0))

    @cute.jit
    def convert(
        self,
        cols: Int32,
        level: Level,
        codes: cute.Tensor,
        scales: cute.Tensor,
        what: Descriptor,
        row: Int32,
        tile_at: Int32,
        squares_at: Int32,
    ) -> None:
        """A lane's row, 64 columns at a time; a warp has eight rows of each quarter of the tile."""
        live = row < what.count
        tabled = self.config.tables_factors and not self.config.row_scaled
        pitch = codes.stride[len(codes.stride) - 2]
        tiles_along_k = (cols + (4 * BLOCK - 1)) // (4 * BLOCK)
        row_at = tile_at + row * BOX_BYTES + row % 8 * 16
        codes_at = codes.iterator.toint() + Int64(what.first + row) * pitch
        scales_at = scales.iterator.toint() + Int64(what.tile) * tiles_along_k * SF_TILE_BYTES
        scales_at += row % 32 * 16 + row // 32 * SF_TILE_COLS
        boxes = 64 // self.tile.box_cols
        # The first row of the warp's is the lowest: without it there are only scales to clear.
        idle = row % 32 // 8 * 8 >= what.count
        for u in cutlass.range_constexpr(TILE_COLS // 64):
            col = what.col_tile * TILE_COLS + u * 64
            if col < cols and idle:
                store_global(scales_at + (col // 64) * SF_TILE_BYTES, [Uint32(0)])
            elif col < cols:
                words = []
                for chunk in cutlass.range_constexpr(8 * boxes):
                    box = u * boxes + chunk // 8
                    words += load_shared((row_at + box * BOX_SIZE) ^ (chunk % 8 * 16), 4)
                per_block = len(words) // 4
                blocks = [words[i : i + per_block] for i in range(0, len(words), per_block)]
                if cutlass.const_expr(self.config.square_blocks):
                    at = squares_at + (row // BLOCK * COL_BLOCKS + u * 4) * 4
                    a = [bits_as_f32(word) for word in load_shared(at, 4)]
                else:
                    a = [absmax_words(block, self.dtype, self.arch) for block in blocks]
                low, enc0, enc1 = scale_blocks(a[0], a[1], level, tabled)
                high, enc2, enc3 = scale_blocks(a[2], a[3], level, tabled)
                scale_word = select(live, pack_halves(low, high), Uint32(0))
                store_global(scales_at + (col // 64) * SF_TILE_BYTES, [scale_word])
                out = []
                for block, enc in zip(blocks, (enc0, enc1, enc2, enc3), strict=True):
                    out += encode_row_block(block, enc, self.dtype, self.arch)
                target, left = codes_at + col // 2, cols - col
                if cutlass.const_expr(self.arch == "sm_90a"):
                    if left >= 64 and pitch % 32 == 0:
                        self.store_in_pairs(target, out, row, what.count, pitch)
                    elif live:
                        self.store_codes(target, out, left, pitch)
                elif live:
                    self.store_codes(target, out, left, pitch)

    @cute.jit
    def store_in_pairs(
        self, target: Int64, words: list, row: Int32, count: Int32, pitch: Int64
    ) -> None:
        """Codes of 64 columns, with the lane that has the neighbouring row; rows may not exist."""
        first, second = exchange_halves(words)
        odd = row % 2
        even_at = target - odd * (pitch - 16)
        if row - odd < count:
            store_global(even_at, first)
        if row - odd + 1 < count:
            store_global(even_at + pitch, second)

    @cute.jit
    def store_codes(self, target: Int64, words: list, left: Int32, pitch: Int64) -> None:
        """Codes of up to 64 columns of a row, of which ``left`` exist; K is a multiple of 16."""
        if left >= 64 and pitch % 32 == 0:
            store_global(target, words)
        else:
            # The pitch is a multiple of 16 bytes, the codes of two blocks.
            for i in cutlass.range_constexpr(0, 4, 2):
                if left >= (i + 2) * BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 4])
                elif left > i * BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 2])
