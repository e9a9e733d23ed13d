"""The rowwise half of the tile quantizer: a tile's rows to codes and scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.encode import encode_row_block
from cute_kernels.device.memory import load_shared, store_global, store_global_half
from cute_kernels.device.nvfp4 import absmax_words, second_level
from cute_kernels.device.ptx import bits_as_f32, select
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.quantize.config import DTYPE_BYTES
from cute_kernels.quantize.tile import (
    BLOCK,
    BOX_BYTES,
    BOX_SIZE,
    COL_BLOCKS,
    TILE_COLS,
    Descriptor,
    Level,
    TileGeometry,
    join_scales,
    scale_blocks,
)

if TYPE_CHECKING:
    from cute_kernels.quantize.config import TileConfig

__all__ = ["RowConverter"]


class RowConverter:
    """Converts the rows of tiles in shared memory.

    On sm_100a a lane has a row of the warp's and stores the 32 bytes of codes of 64 columns at
    once. sm_90a stores 16 bytes at most: there two lanes share two rows, each has half of the 64
    columns of both, and they write every sector together.
    """

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.tile = TileGeometry(config.dtype)
        #: Lanes that share as many rows.
        self.sharing = 2 if config.arch == "sm_90a" else 1

    def rows(self, part: Int32) -> list[Int32]:
        """The rows of a lane in warp ``part`` of its team: of eight in each quarter of the tile.

        Rows of one lane are four apart. At a time, eight lanes then read one 16-byte chunk of eight
        rows, or two chunks of four rows, which is all banks either way.
        """
        lane = cute.arch.lane_idx()
        first = part * 8 + lane // 8 * 32 + lane % 8 // self.sharing
        return [first + i * (8 // self.sharing) for i in range(self.sharing)]

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
        """A lane's part of a row, 64 columns of it and of its neighbours' at a time."""
        live = row < what.count
        # What the lane has of 64 columns.
        width = 64 // self.sharing
        own = cute.arch.lane_idx() % self.sharing * width
        pitch = codes.stride[len(codes.stride) - 2]
        tiles_along_k = (cols + (4 * BLOCK - 1)) // (4 * BLOCK)
        row_at = tile_at + row * BOX_BYTES + row % 8 * 16
        if cutlass.const_expr(width < self.tile.box_cols):
            row_at ^= own * DTYPE_BYTES[self.dtype]
        else:
            row_at += own // self.tile.box_cols * BOX_SIZE
        codes_at = codes.iterator.toint() + Int64(what.first + row) * pitch
        scales_at = scales.iterator.toint() + Int64(what.tile) * tiles_along_k * SF_TILE_BYTES
        scales_at += row % 32 * 16 + row // 32 * SF_TILE_COLS + own // BLOCK
        tabled = self.config.tables_factors and not self.config.row_scaled
        # The first row of the warp's is the lowest: without it there are only scales to clear.
        idle = row % 32 // 8 * 8 >= what.count
        for u in cutlass.range_constexpr(TILE_COLS // 64):
            col = what.col_tile * TILE_COLS + u * 64
            if col < cols and idle:
                self.store_scales(scales_at + (col // 64) * SF_TILE_BYTES, Uint32(0))
            elif col < cols:
                words = []
                for chunk in cutlass.range_constexpr(width * DTYPE_BYTES[self.dtype] // 16):
                    box = u * (64 // self.tile.box_cols) + chunk // 8
                    words += load_shared((row_at + box * BOX_SIZE) ^ (chunk % 8 * 16), 4)
                per_block = len(words) * BLOCK // width
                blocks = [words[i : i + per_block] for i in range(0, len(words), per_block)]
                if cutlass.const_expr(self.config.square_blocks):
                    at = squares_at + (row // BLOCK * COL_BLOCKS + u * 4 + own // BLOCK) * 4
                    a = [bits_as_f32(word) for word in load_shared(at, len(blocks))]
                else:
                    a = [absmax_words(block, self.dtype, self.arch) for block in blocks]
                pairs, factors = [], []
                for i in cutlass.range_constexpr(0, len(blocks), 2):
                    pair, *encs = scale_blocks(a[i], a[i + 1], level, tabled)
                    pairs.append(pair)
                    factors += encs
                scale_word = select(live, join_scales(pairs), Uint32(0))
                self.store_scales(scales_at + (col // 64) * SF_TILE_BYTES, scale_word)
                out = []
                for block, factor in zip(blocks, factors, strict=True):
                    out += encode_row_block(block, factor, self.dtype, self.arch)
                if live:
                    first = col + own
                    self.store_codes(codes_at + first // 2, out, cols - first, pitch)

    @cute.jit
    def store_scales(self, target: Int64, scale_word: Uint32) -> None:
        """Scale bytes of a lane's blocks: four, or two if lanes share rows."""
        if cutlass.const_expr(self.sharing == 1):
            store_global(target, [scale_word])
        else:
            store_global_half(target, scale_word)

    @cute.jit
    def store_codes(self, target: Int64, words: list, left: Int32, pitch: Int64) -> None:
        """Codes of a lane's columns, of which ``left`` exist; K is a multiple of 16."""
        blocks = len(words) // 2
        whole = left >= blocks * BLOCK
        if cutlass.const_expr(blocks == 4):
            whole = whole and pitch % 32 == 0
        if whole:
            store_global(target, words)
        else:
            # The pitch is a multiple of 16 bytes, the codes of two blocks.
            for i in cutlass.range_constexpr(0, blocks, 2):
                if left >= (i + 2) * BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 4])
                elif left > i * BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 2])
