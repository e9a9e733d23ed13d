"""The columnwise half of the tile quantizer: a tile's columns to transposed codes and scales."""

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import absmax_pairs, absmax_words, fmax, split_absmax
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.groups import Grouping
from cute_kernels.device.hadamard import transform_words
from cute_kernels.device.memory import (
    load_shared,
    store_global,
    store_shared,
    store_shared_byte,
    store_shared_half,
)
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits, select
from cute_kernels.layout.shapes import SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, Descriptor, Encoding, TileGeometry, TilePlaces
from .random_numbers import ColumnDraws
from .scales import join_scales, scale_blocks


class LanePlace(NamedTuple):
    """What a lane has of a tile: its first row and box, and which word of a box's rows.

    It reads row r ^ ``twist`` of eight where others read row r.
    """

    first_row: Int32
    first_box: Int32
    word: Int32
    twist: Int32 | int


class ColumnConverter:
    """Converts the columns of tiles in shared memory, a quarter of a tile a warp.

    On sm_100a a lane has columns of half the tile's rows and stores their codes, 32 bytes of NVFP4,
    at once. sm_90a stores 16 bytes at most: there four lanes share their columns (two, if fp32),
    each has 32 rows at a time, and they write 64 bytes together (or 32).

    Lanes that share read rows 32 apart, which the swizzle treats alike, and not of all chunks. To
    touch all banks, each reads the rows of an eight in an order of its own, see ``twist``; the
    order of the code bytes is put right when they are packed.
    """

    def __init__(self, config: TileConfig, codec: NibbleCodec, tile: TileGeometry):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.tile = tile
        #: Lanes that share their columns, so that a warp has 16 columns of a box, or all.
        self.sharing = 2 * self.tile.cols_per_word if config.arch == "sm_90a" else 1
        #: Whether a warp has half of the tile's rows and nothing to convert if they do not exist.
        self.skips_rows = self.sharing == 1
        #: Rows that a lane has at a time, and how often; boxes with columns that it has.
        self.num_rows = 64 if self.skips_rows else 32
        self.steps = 1 if self.skips_rows else 4 // self.sharing
        self.num_blocks = self.num_rows // codec.block
        self.num_boxes = self.tile.num_boxes * max(2, self.sharing) // 4
        self.is_transformed = codec.fmt.is_transformed
        #: Whether words are used in the order of their rows.
        self.in_order = self.is_transformed or codec.searches_scale

    def place(self, part: Int32) -> LanePlace:
        lane = cute.arch.lane_idx()
        if self.skips_rows:
            return LanePlace(part // 2 * self.num_rows, part % 2 * self.num_boxes, lane, 0)
        mate = lane % self.sharing
        return LanePlace(
            first_row=mate * self.num_rows,
            first_box=part // self.sharing * self.num_boxes,
            word=part % self.sharing * (32 // self.sharing) + lane // self.sharing,
            twist=mate * (8 // self.sharing),
        )

    @cute.jit
    def convert(
        self,
        groups: Grouping,
        cols: Int32,
        by: Encoding,
        codes_t: cute.Tensor | None,
        what: Descriptor,
        part: Int32,
        places: TilePlaces,
    ) -> None:
        """A warp's quarter of the tile; a lane takes one word of its rows in each of its boxes."""
        mine = self.place(part)
        # Rows r and r + 8 have the same swizzle.
        rows = []
        for r in range_constexpr(8):
            row = r ^ mine.twist
            rows.append(row * BOX_BYTES + ((mine.word * 4) ^ (row * 16)))
        for step in range_constexpr(self.num_boxes * self.steps):
            box = mine.first_box + step // self.steps
            first_row = mine.first_row + step % self.steps * (TILE_ROWS // 2)
            base = places.tile + box * BOX_SIZE + first_row * BOX_BYTES
            lanes_at = [base + row for row in rows]
            col = box * self.tile.box_cols + mine.word * self.tile.cols_per_word
            draw = None
            if const_expr(by.seed is not None and self.config.columnwise):
                per_word, is_2d = self.tile.cols_per_word, self.config.fmt.is_2d
                place = (first_row, col, self.order(mine))
                draw = ColumnDraws.of(by.seed, is_2d, cols, what, place, per_word)
            codes_of, pairs_of = self.convert_columns(
                lanes_at, mine, first_row, col, by, draw, places
            )
            if const_expr(self.config.columnwise):
                scale_words = [join_scales(pairs) for pairs in pairs_of]
                self.store(
                    groups, cols, codes_t, what, first_row, col, codes_of, scale_words, places
                )

    @cute.jit
    def convert_columns(
        self,
        lanes_at: list[Int32],
        mine: LanePlace,
        first_row: Int32,
        col: Int32,
        by: Encoding,
        draw: ColumnDraws | None,
        places: TilePlaces,
    ) -> tuple[list[list[Uint32]], list[list[Uint16]]]:
        """Codes, and scale bytes two by two, of a lane's columns in its rows from ``first_row`` on.

        Amaxes of square blocks go to shared memory, too.
        """
        codes_of: list[list] = [[] for _ in range(self.tile.cols_per_word)]
        pairs_of: list[list] = [[] for _ in range(self.tile.cols_per_word)]
        for first in range_constexpr(0, self.num_blocks, 2):
            at_once = min(2, self.num_blocks)
            blocks = [self.load_block(lanes_at, first + i, mine.twist) for i in range(at_once)]
            row_block = first_row // self.codec.block + first
            if const_expr(self.config.fmt.is_2d and self.codec.searches_scale):
                amaxes = self.load_squares(row_block, col, places)
            else:
                amaxes = [self.amaxes(words) for words in blocks]
            if const_expr(self.config.fmt.is_2d and not self.codec.searches_scale):
                self.store_squares(amaxes, mine, row_block, col, places)
            elif const_expr(self.codec.searches_scale and not self.config.fmt.is_2d):
                amaxes = [
                    self.codec.choose_columns(words, a, by.level)
                    for words, a in zip(blocks, amaxes, strict=True)
                ]
            if const_expr(self.config.columnwise):
                factors: tuple[list, list] = ([], [])
                for c in range_constexpr(self.tile.cols_per_word):
                    pair, *encs = scale_blocks(
                        self.codec, amaxes[0][c], amaxes[-1][c], by.level, by.table
                    )
                    pairs_of[c].append(pair)
                    for of_block, enc in zip(factors, encs, strict=True):
                        of_block.append(enc)
                for i, (words, encs) in enumerate(zip(blocks, factors[: len(blocks)], strict=True)):
                    if const_expr(draw is None):
                        codes = self.codec.encode_columns(words, encs, self.order(mine))
                    else:
                        draws = draw.block(first + i)
                        codes = self.codec.round_columns(words, encs, draws, self.order(mine))
                    for c in range_constexpr(self.tile.cols_per_word):
                        codes_of[c] += codes[c]
        return codes_of, pairs_of

    def order(self, mine: LanePlace) -> Int32 | int:
        return 0 if self.in_order else mine.twist

    def load_block(self, lanes_at: list[Int32], block: int, twist: Int32 | int) -> list[Uint32]:
        """A lane's word in each row of one of its blocks of rows, or what these become."""
        first = block * self.codec.block
        words = [
            load_shared(lanes_at[r % 8] + (first + r // 8 * 8) * BOX_BYTES, 1)[0]
            for r in range(self.codec.block)
        ]
        if self.in_order and not isinstance(twist, int):
            for distance in (2, 4):
                swapped = (twist & distance) != 0
                words = [select(swapped, words[i ^ distance], w) for i, w in enumerate(words)]
        return transform_words(words, self.arch) if self.is_transformed else words

    def load_squares(self, row_block: Int32, col: Int32, places: TilePlaces) -> list[list[Float32]]:
        at = self.square_at(row_block, col, places)
        loaded = [
            bits_as_f32(load_shared(at + i * (4 * self.tile.col_blocks), 1)[0]) for i in range(2)
        ]
        return [[scale] * self.tile.cols_per_word for scale in loaded]

    def square_at(self, row_block: Int32, col: Int32, places: TilePlaces) -> Int32:
        return places.squares + (row_block * self.tile.col_blocks + col // self.codec.block) * 4

    @cute.jit
    def store_squares(
        self,
        amaxes: list[list[Float32]],
        mine: LanePlace,
        row_block: Int32,
        col: Int32,
        places: TilePlaces,
    ) -> None:
        """The amaxes of two square blocks, one below the other, by a lane that has them."""
        if mine.word % (self.codec.block // self.tile.cols_per_word) == 0:
            at = self.square_at(row_block, col, places)
            for i in range_constexpr(2):
                store_shared(at + i * (4 * self.tile.col_blocks), [f32_as_bits(amaxes[i][0])])

    @cute.jit
    def clear(
        self,
        groups: Grouping,
        cols: Int32,
        codes_t: cute.Tensor,
        what: Descriptor,
        part: Int32,
        places: TilePlaces,
    ) -> None:
        """What ``convert`` writes for rows that do not exist: zeros."""
        mine = self.place(part)
        for u in range_constexpr(self.num_boxes):
            col = (mine.first_box + u) * self.tile.box_cols + mine.word * self.tile.cols_per_word
            words = self.codec.code_bytes(self.num_rows) // 4
            codes_of = [[Uint32(0)] * words] * self.tile.cols_per_word
            scale_words = [Uint32(0)] * self.tile.cols_per_word
            first_row = mine.first_row
            self.store(groups, cols, codes_t, what, first_row, col, codes_of, scale_words, places)

    @cute.jit
    def store(
        self,
        groups: Grouping,
        cols: Int32,
        codes_t: cute.Tensor,
        what: Descriptor,
        first_row: Int32,
        col: Int32,
        codes_of: list,
        scale_words: list,
        places: TilePlaces,
    ) -> None:
        self.store_scales(scale_words, first_row, col, places)
        k = what.col_tile * TILE_COLS + col
        # K is a multiple of 16, so lanes that share columns agree.
        if k < cols:
            pitch = codes_t.stride[len(codes_t.stride) - 2]
            tile = groups.local_tile(what.tile, what.group)
            row_bytes = self.codec.code_bytes(TILE_ROWS)
            slot = tile * row_bytes + self.codec.code_bytes(first_row)
            target = codes_t.iterator.toint() + slot
            if const_expr(groups.offs is None):
                target += what.group * codes_t.stride[0]
            target += Int64(k) * pitch
            for c in range_constexpr(self.tile.cols_per_word):
                for i in range_constexpr(0, len(codes_of[c]), 8):
                    store_global(target + c * pitch + i * 4, codes_of[c][i : i + 8])

    @cute.jit
    def store_scales(
        self, scale_words: list, first_row: Int32, col: Int32, places: TilePlaces
    ) -> None:
        along = SF_TILE_COLS * self.codec.block
        at = places.scales_t + (first_row // along * TILE_COLS + col) * 4
        if const_expr(self.num_blocks == SF_TILE_COLS):
            store_shared(at, scale_words)
        else:
            at += first_row % along // self.codec.block
            store = store_shared_half if self.num_blocks > 1 else store_shared_byte
            for c in range_constexpr(self.tile.cols_per_word):
                store(at + 4 * c, scale_words[c])

    def amaxes(self, words: list[Uint32]) -> list[Float32]:
        """Amax of each of a lane's columns over a block of rows, or of the square block."""
        nan = self.config.fmt.amaxes_keep_nan
        if self.dtype == "float32":
            amaxes = [absmax_words(words, self.dtype, self.arch, nan)]
        else:
            pair = absmax_pairs(words, self.dtype, nan)
            amaxes = list(split_absmax(pair, self.dtype, self.arch, nan))
        if self.config.fmt.is_2d:
            a = amaxes[0] if len(amaxes) == 1 else fmax(*amaxes, nan)
            offset = self.sharing
            while offset < self.sharing * (self.codec.block // self.tile.cols_per_word):
                a = fmax(a, cute.arch.shuffle_sync_bfly(a, offset=offset), nan)
                offset *= 2
            amaxes = [a] * len(amaxes)
        return amaxes
