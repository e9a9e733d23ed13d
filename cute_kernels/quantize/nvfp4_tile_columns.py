"""The columnwise half of the tile quantizer: a tile's columns to codes_t and scales_t."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.encode import encode_column_blocks
from cute_kernels.device.groups import Grouping
from cute_kernels.device.memory import exchange_halves, load_shared, store_global, store_shared
from cute_kernels.device.nvfp4 import (
    absmax_pairs,
    absmax_words,
    fmax,
    split_absmax,
)
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.quantize.tile import (
    BLOCK,
    BOX_BYTES,
    BOX_SIZE,
    COL_BLOCKS,
    ROW_BLOCKS,
    TILE_COLS,
    Descriptor,
    Level,
    TileGeometry,
    pack_halves,
    scale_blocks,
)
from cute_kernels.shapes import SF_TILE_BYTES, TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.quantize.config import TileConfig

__all__ = ["ColumnConverter"]


class ColumnConverter:
    """Converts the columns of tiles in shared memory, a quarter of a tile a warp."""

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.tile = TileGeometry(config.dtype)

    @cute.jit
    def convert(
        self,
        groups: Grouping,
        cols: Int32,
        level: Level,
        codes_t: cute.Tensor | None,
        what: Descriptor,
        part: Int32,
        tile_at: Int32,
        scales_at: Int32,
        squares_at: Int32,
    ) -> None:
        """A warp's 64 rows of half the tile's columns; a lane takes one word of every row."""
        config = self.config
        lane = cute.arch.lane_idx()
        half = part // 2
        # Rows r and r + 8 have the same swizzle.
        places = [r * BOX_BYTES + ((lane * 4) ^ (r * 16)) for r in range(8)]
        for u in cutlass.range_constexpr(self.tile.num_boxes // 2):
            box = (part % 2) * (self.tile.num_boxes // 2) + u
            base = tile_at + box * BOX_SIZE + half * (BOX_SIZE // 2)
            lanes_at = [base + place for place in places]
            col = box * self.tile.box_cols + lane * self.tile.cols_per_word
            codes_of = [[] for _ in range(self.tile.cols_per_word)]
            scales_of = [[] for _ in range(self.tile.cols_per_word)]
            for rb in cutlass.range_constexpr(0, ROW_BLOCKS // 2, 2):
                blocks = [
                    [
                        load_shared(
                            lanes_at[r % 8] + ((rb + i) * BLOCK + r // 8 * 8) * BOX_BYTES, 1
                        )[0]
                        for r in range(BLOCK)
                    ]
                    for i in range(2)
                ]
                amaxes = [self.amaxes(words) for words in blocks]
                if cutlass.const_expr(config.square_blocks):
                    if lane % (BLOCK // self.tile.cols_per_word) == 0:
                        row_block = half * (ROW_BLOCKS // 2) + rb
                        at = squares_at + (row_block * COL_BLOCKS + col // BLOCK) * 4
                        store_shared(at, [f32_as_bits(amaxes[0][0])])
                        store_shared(at + 4 * COL_BLOCKS, [f32_as_bits(amaxes[1][0])])
                if cutlass.const_expr(config.columnwise):
                    factors = ([], [])
                    for c in cutlass.range_constexpr(self.tile.cols_per_word):
                        bytes_, enc0, enc1 = scale_blocks(
                            amaxes[0][c], amaxes[1][c], level, config.tables_factors
                        )
                        scales_of[c].append(bytes_)
                        factors[0].append(enc0)
                        factors[1].append(enc1)
                    for words, enc in zip(blocks, factors, strict=True):
                        codes = encode_column_blocks(words, enc, self.dtype, self.arch)
                        for c in cutlass.range_constexpr(self.tile.cols_per_word):
                            codes_of[c] += codes[c]
            if cutlass.const_expr(config.columnwise):
                scale_words = [pack_halves(*pair) for pair in scales_of]
                self.store(groups, cols, codes_t, what, half, col, codes_of, scale_words, scales_at)

    @cute.jit
    def clear(
        self,
        groups: Grouping,
        cols: Int32,
        codes_t: cute.Tensor,
        what: Descriptor,
        part: Int32,
        scales_at: Int32,
    ) -> None:
        """What ``convert`` writes for 64 rows that do not exist: zeros."""
        for u in cutlass.range_constexpr(self.tile.num_boxes // 2):
            box = (part % 2) * (self.tile.num_boxes // 2) + u
            col = box * self.tile.box_cols + cute.arch.lane_idx() * self.tile.cols_per_word
            codes_of = [[Uint32(0)] * 8] * self.tile.cols_per_word
            scale_words = [Uint32(0)] * self.tile.cols_per_word
            self.store(
                groups, cols, codes_t, what, part // 2, col, codes_of, scale_words, scales_at
            )

    @cute.jit
    def store(
        self,
        groups: Grouping,
        cols: Int32,
        codes_t: cute.Tensor,
        what: Descriptor,
        half: Int32,
        col: Int32,
        codes_of: list,
        scale_words: list,
        scales_at: Int32,
    ) -> None:
        """A lane's columns of half a tile: 32 bytes of codes each, and scales to shared memory."""
        store_shared(scales_at + (half * TILE_COLS + col) * 4, scale_words)
        k = what.col_tile * TILE_COLS + col
        pairs = []
        if cutlass.const_expr(self.arch == "sm_90a"):
            pairs = [exchange_halves(words) for words in codes_of]
        # K is a multiple of 16, so neighbouring lanes agree.
        if k < cols:
            pitch = codes_t.stride[len(codes_t.stride) - 2]
            tile = groups.local_tile(what.tile, what.group)
            target = codes_t.iterator.toint() + (tile * (TILE_ROWS // 2) + half * 32)
            if cutlass.const_expr(groups.offs is None):
                target += what.group * codes_t.stride[0]
            target += Int64(k) * pitch
            if cutlass.const_expr(self.arch == "sm_90a"):
                step = self.tile.cols_per_word * pitch
                target -= cute.arch.lane_idx() % 2 * (step - 16)
                for c in cutlass.range_constexpr(self.tile.cols_per_word):
                    store_global(target + c * pitch, pairs[c][0])
                    store_global(target + c * pitch + step, pairs[c][1])
            else:
                for c in cutlass.range_constexpr(self.tile.cols_per_word):
                    store_global(target + c * pitch, codes_of[c])

    def amaxes(self, words: list[Uint32]) -> list[Float32]:
        """Amax of each of a lane's columns over a block of rows; of the 16x16 block if square."""
        if self.dtype == "float32":
            amaxes = [absmax_words(words, self.dtype, self.arch)]
        else:
            pair = absmax_pairs(words, self.dtype)
            amaxes = list(split_absmax(pair, self.dtype, self.arch))
        if self.config.square_blocks:
            a = amaxes[0] if len(amaxes) == 1 else fmax(*amaxes)
            offset = 1
            while offset < BLOCK // self.tile.cols_per_word:
                a = fmax(a, cute.arch.shuffle_sync_bfly(a, offset=offset))
                offset *= 2
            amaxes = [a] * len(amaxes)
        return amaxes

    @cute.jit
    def write_scales(
        self,
        groups: Grouping,
        cols: Int32,
        scales_t: cute.Tensor,
        what: Descriptor,
        half: Int32,
        scales_at: Int32,
    ) -> None:
        """A warp writes one 512-byte tile: 128 columns by the 4 row blocks of half a slot tile."""
        lane = cute.arch.lane_idx()
        at = scales_at + (half * TILE_COLS + lane) * 4
        words = [load_shared(at + q * (32 * 4), 1)[0] for q in range(4)]
        rank = len(scales_t.shape)
        block_tiles = scales_t.shape[rank - 2]
        tile = groups.local_tile(what.tile, what.group)
        index = Int64(what.col_tile) * block_tiles + (2 * tile + half)
        if cutlass.const_expr(groups.offs is None):
            index += Int64(what.group) * (scales_t.shape[1] * block_tiles)
        target = scales_t.iterator.toint() + index * SF_TILE_BYTES + lane * 16
        store_global(target, words)
