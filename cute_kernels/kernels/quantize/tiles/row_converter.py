"""The rowwise half of the tile quantizer: a tile's rows to codes and scales."""

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import absmax_words
from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.memory import load_shared, store_global, store_global_half
from cute_kernels.device.philox import RNG_BLOCK, random_block
from cute_kernels.device.ptx import bits_as_f32, select
from cute_kernels.layout.shapes import PITCH_ALIGNMENT, SF_TILE_BYTES, SF_TILE_COLS, row_in_tile

from ..config import DTYPE_BYTES, TileConfig
from .geometry import (
    BOX_BYTES,
    BOX_SIZE,
    TILE_COLS,
    TileAddresses,
    TileDescriptor,
    TileEncoding,
    TileGeometry,
)
from .scales import join_scales, scale_blocks

#: Words of the widest store.
_SECTOR_WORDS = 8


class RowConverter:
    """Converts the rows of tiles in shared memory, ``tile.unit`` columns at a time.

    On sm_100a a lane has a row of the warp's and stores the codes of a unit's columns, 32 bytes of
    NVFP4, at once. sm_90a stores 16 bytes at most: there two lanes share two rows, each has half of
    the unit's columns of both, and they write every sector together.
    """

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        #: Lanes that share as many rows.
        self.sharing = 1 if get_arch(config.arch).has_fp4_convert else 2
        #: What a lane has of a unit's columns.
        self.width = geometry.unit // self.sharing
        self.blocks = self.width // codec.block

    def rows(self, warp_in_team: Int32) -> list[Int32]:
        """The rows of a lane in warp ``warp_in_team`` of its team: of eight in each quarter of the tile.

        GatheredRows of one lane are four apart. At a time, eight lanes then read one 16-byte chunk of eight
        rows, or two chunks of four rows, which is all banks either way.
        """
        lane = cute.arch.lane_idx()
        first = warp_in_team * 8 + lane // 8 * 32 + lane % 8 // self.sharing
        return [first + i * (8 // self.sharing) for i in range(self.sharing)]

    @cute.jit
    def level(
        self, row_amax: cute.Tensor, tile: TileDescriptor, row: Int32
    ) -> GlobalScaleRegisters:
        """The second level of a row; of a row that does not exist, that of a zero row."""
        g = Float32(0.0)
        if row < tile.num_rows:
            g = row_amax[tile.first_row + row]
        return self.codec.global_scale(g)

    @cute.jit
    def convert(
        self,
        cols: Int32,
        encoding: TileEncoding,
        codes: cute.Tensor,
        scales: cute.Tensor,
        tile: TileDescriptor,
        row: Int32,
        addresses: TileAddresses,
    ) -> None:
        live = row < tile.num_rows
        own = cute.arch.lane_idx() % self.sharing * self.width
        pitch = codes.stride[len(codes.stride) - 2]
        tiles_along_k = (cols + (self.geometry.unit - 1)) // self.geometry.unit
        row_at = self.row_in_tile(addresses.tile, row, own)
        codes_at = codes.iterator.toint() + Int64(tile.first_row + row) * pitch
        scales_at = scales.iterator.toint() + Int64(tile.slot_tile) * tiles_along_k * SF_TILE_BYTES
        scales_at += row_in_tile(row) + own // self.codec.block
        # The first row of the warp's is the lowest: without it there are only scales to clear.
        idle = row % 32 // 8 * 8 >= tile.num_rows
        for u in range_constexpr(TILE_COLS // self.geometry.unit):
            col = tile.col_tile * TILE_COLS + u * self.geometry.unit
            if col < cols and idle:
                self.store_scales(scales_at, col, Uint32(0))
            elif col < cols:
                blocks = self.load_blocks(row_at, u)
                a = self.amaxes(blocks, addresses.squares, row, u, own)
                if const_expr(self.codec.searches_scale and not self.config.fmt.is_2d):
                    a = [
                        self.codec.choose_row(words, x, encoding.level)
                        for words, x in zip(blocks, a, strict=True)
                    ]
                scale_word, factors = self.scale(a, encoding)
                self.store_scales(scales_at, col, select(live, scale_word, Uint32(0)))
                place = Int64(tile.first_row + row) * (cols // RNG_BLOCK) + (col + own) // RNG_BLOCK
                out = []
                for i, (block, factor) in enumerate(zip(blocks, factors, strict=True)):
                    if const_expr(encoding.seed is None):
                        out += self.codec.encode_row(block, factor)
                    else:
                        random_words = random_block(encoding.seed, place + i)
                        out += self.codec.round_row(block, factor, random_words)
                if live:
                    first = col + own
                    place = codes_at + self.codec.code_bytes(first)
                    self.store_codes(place, out, cols - first, pitch)

    @cute.jit
    def row_in_tile(self, tile_at: Int32, row: Int32, own: Int32) -> Int32:
        """Where the first of a lane's columns of a row is."""
        row_at = tile_at + row * BOX_BYTES + row % 8 * 16
        if const_expr(self.width < self.geometry.box_cols):
            row_at ^= own * DTYPE_BYTES[self.dtype]
        else:
            row_at += own // self.geometry.box_cols * BOX_SIZE
        return row_at

    def load_blocks(self, row_at: Int32, u: int) -> list[list[Uint32]]:
        words = []
        for chunk in range(self.width * DTYPE_BYTES[self.dtype] // 16):
            box = u * (self.geometry.unit // self.geometry.box_cols) + chunk // 8
            words += load_shared((row_at + box * BOX_SIZE) ^ (chunk % 8 * 16), 4)
        per_block = len(words) // self.blocks
        return [words[i : i + per_block] for i in range(0, len(words), per_block)]

    def amaxes(
        self, blocks: list[list[Uint32]], squares_at: Int32, row: Int32, u: int, own: Int32
    ) -> list[Float32]:
        block = self.codec.block
        if self.config.fmt.is_2d:
            place = row // block * self.geometry.col_blocks + u * SF_TILE_COLS + own // block
            words = load_shared(squares_at + place * 4, len(blocks))
            return [bits_as_f32(word) for word in words]
        return [
            absmax_words(words, self.dtype, self.arch, self.config.fmt.amaxes_keep_nan)
            for words in blocks
        ]

    def scale(self, a: list[Float32], encoding: TileEncoding) -> tuple[Uint32, list[Float32]]:
        """The scale bytes of blocks with these amaxes, as one word, and their encode factors."""
        pairs, factors = [], []
        for i in range(0, self.blocks, 2):
            pair, *encs = scale_blocks(self.codec, a[i], a[i + 1], encoding.level, encoding.table)
            pairs.append(pair)
            factors += encs
        return join_scales(pairs), factors

    @cute.jit
    def store_scales(self, scales_at: Int64, col: Int32, scale_word: Uint32) -> None:
        """Scale bytes of a lane's blocks from ``col`` on: four, or two if lanes share rows."""
        target = scales_at + (col // self.geometry.unit) * SF_TILE_BYTES
        if const_expr(self.sharing == 1):
            store_global(target, [scale_word])
        else:
            store_global_half(target, scale_word)

    @cute.jit
    def store_codes(self, target: Int64, words: list, left: Int32, pitch: Int64) -> None:
        block, per_block = self.codec.block, self.codec.code_words
        whole = left >= self.blocks * block
        if const_expr(len(words) >= _SECTOR_WORDS):
            whole = whole and pitch % (4 * _SECTOR_WORDS) == 0
        if whole:
            for i in range_constexpr(0, len(words), _SECTOR_WORDS):
                store_global(target + i * 4, words[i : i + _SECTOR_WORDS])
        else:
            # What the pitch is a multiple of.
            step = PITCH_ALIGNMENT // 4
            for i in range_constexpr(0, len(words), step):
                before = i // per_block * block
                if left >= before + step * block // per_block:
                    store_global(target + i * 4, words[i : i + step])
                elif left > before:
                    store_global(target + i * 4, words[i : i + per_block])
