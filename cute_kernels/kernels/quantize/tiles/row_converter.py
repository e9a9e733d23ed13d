"""Rowwise half of the tile quantizer for 4-bit codes: a tile's rows to codes and scales."""

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
    """Converter of the rows of tiles in shared memory, ``geometry.unit`` columns at a time.

    On sm_100a a lane has a row of the warp's and stores the codes of a unit's columns, 32 bytes of
    NVFP4, at once. sm_90a stores at most 16 bytes. There two lanes share two rows, each has half of
    the unit's columns of both, and together they write every sector.
    """

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        #: Lanes that share rows, and rows that they share.
        self.sharing = 1 if get_arch(config.arch).has_fp4_convert else 2
        #: Columns of a unit that a lane has.
        self.width = geometry.unit // self.sharing
        self.blocks = self.width // codec.block

    def rows(self, warp_in_team: Int32) -> list[Int32]:
        """Return the rows of a lane in its warp, which has eight rows in each quarter of the tile.

        The rows of one lane are four apart. At a time, eight lanes then read one 16-byte chunk of
        eight rows, or two chunks of four rows, which is all banks either way.
        """
        lane = cute.arch.lane_idx()
        first_row = warp_in_team * 8 + lane // 8 * 32 + lane % 8 // self.sharing
        return [first_row + i * (8 // self.sharing) for i in range(self.sharing)]

    @cute.jit
    def row_global_scale(
        self, row_amax: cute.Tensor, tile: TileDescriptor, row: Int32
    ) -> GlobalScaleRegisters:
        """Return the global scale of a row. A row that does not exist has that of zeros."""
        amax = Float32(0.0)
        if row < tile.num_rows:
            amax = row_amax[tile.first_row + row]
        return self.codec.global_scale(amax)

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
        """Convert one row of a lane.

        Args:
            cols: Columns of the elements, K.
            encoding: Parameters of the rowwise copy.
            codes: (T, K) or (G, N, K). Codes.
            scales: Rowwise block scales.
            tile: Descriptor of the tile.
            row: Row of the tile.
            addresses: Shared-memory addresses of the tile.
        """
        is_live = row < tile.num_rows
        lane_column = cute.arch.lane_idx() % self.sharing * self.width
        pitch = codes.stride[len(codes.stride) - 2]
        tiles_along_k = (cols + (self.geometry.unit - 1)) // self.geometry.unit
        row_address = self.row_in_tile(addresses.tile, row, lane_column)
        codes_address = codes.iterator.toint() + Int64(tile.first_row + row) * pitch
        scales_address = (
            scales.iterator.toint() + Int64(tile.slot_tile) * tiles_along_k * SF_TILE_BYTES
        )
        scales_address += row_in_tile(row) + lane_column // self.codec.block
        # The first row of the warp is the lowest. If it does not exist, only scales are cleared.
        idle = row % 32 // 8 * 8 >= tile.num_rows
        for u in range_constexpr(TILE_COLS // self.geometry.unit):
            col = tile.col_tile * TILE_COLS + u * self.geometry.unit
            if col < cols and idle:
                self.store_scales(scales_address, col, Uint32(0))
            elif col < cols:
                blocks = self.load_blocks(row_address, u)
                amaxes = self.amaxes(blocks, addresses.squares, row, u, lane_column)
                if const_expr(self.codec.searches_scale and not self.config.fmt.is_2d):
                    amaxes = [
                        self.codec.choose_row(words, x, encoding.global_scale)
                        for words, x in zip(blocks, amaxes, strict=True)
                    ]
                scale_word, factors = self.scale(amaxes, encoding)
                self.store_scales(scales_address, col, select(is_live, scale_word, Uint32(0)))
                random_block_index = (
                    Int64(tile.first_row + row) * (cols // RNG_BLOCK)
                    + (col + lane_column) // RNG_BLOCK
                )
                out = []
                for i, (block, factor) in enumerate(zip(blocks, factors, strict=True)):
                    if const_expr(encoding.seed is None):
                        out += self.codec.encode_row(block, factor)
                    else:
                        random_words = random_block(encoding.seed, random_block_index + i)
                        out += self.codec.round_row(block, factor, random_words)
                if is_live:
                    column = col + lane_column
                    random_block_index = codes_address + self.codec.code_bytes(column)
                    self.store_codes(random_block_index, out, cols - column, pitch)

    @cute.jit
    def row_in_tile(self, tile_address: Int32, row: Int32, lane_column: Int32) -> Int32:
        """Return the shared-memory address of the first of a lane's columns of a row."""
        row_address = tile_address + row * BOX_BYTES + row % 8 * 16
        if const_expr(self.width < self.geometry.box_cols):
            row_address ^= lane_column * DTYPE_BYTES[self.dtype]
        else:
            row_address += lane_column // self.geometry.box_cols * BOX_SIZE
        return row_address

    def load_blocks(self, row_address: Int32, u: int) -> list[list[Uint32]]:
        """Load the words of a lane's blocks in unit ``u`` of a row."""
        words = []
        for chunk in range(self.width * DTYPE_BYTES[self.dtype] // 16):
            box = u * (self.geometry.unit // self.geometry.box_cols) + chunk // 8
            words += load_shared((row_address + box * BOX_SIZE) ^ (chunk % 8 * 16), 4)
        per_block = len(words) // self.blocks
        return [words[i : i + per_block] for i in range(0, len(words), per_block)]

    def amaxes(
        self, blocks: list[list[Uint32]], squares_at: Int32, row: Int32, u: int, lane_column: Int32
    ) -> list[Float32]:
        """Return the amax of each block; those of square blocks are in shared memory."""
        block = self.codec.block
        if self.config.fmt.is_2d:
            square = (
                row // block * self.geometry.col_blocks + u * SF_TILE_COLS + lane_column // block
            )
            words = load_shared(squares_at + square * 4, len(blocks))
            return [bits_as_f32(word) for word in words]
        return [
            absmax_words(words, self.dtype, self.arch, self.config.fmt.amaxes_keep_nan)
            for words in blocks
        ]

    def scale(self, amaxes: list[Float32], encoding: TileEncoding) -> tuple[Uint32, list[Float32]]:
        """Return the scale bytes of the blocks as one word, and their encode factors."""
        pairs, factors = [], []
        for i in range(0, self.blocks, 2):
            pair, *pair_factors = scale_blocks(
                self.codec, amaxes[i], amaxes[i + 1], encoding.global_scale, encoding.table
            )
            pairs.append(pair)
            factors += pair_factors
        return join_scales(pairs), factors

    @cute.jit
    def store_scales(self, scales_address: Int64, col: Int32, scale_word: Uint32) -> None:
        """Store a lane's scale bytes from ``col`` on: four, or two if lanes share rows."""
        target = scales_address + (col // self.geometry.unit) * SF_TILE_BYTES
        if const_expr(self.sharing == 1):
            store_global(target, [scale_word])
        else:
            store_global_half(target, scale_word)

    @cute.jit
    def store_codes(self, target: Int64, words: list, remaining: Int32, pitch: Int64) -> None:
        """Store the codes of a unit; ``remaining`` columns lie between them and K."""
        block, per_block = self.codec.block, self.codec.code_words
        is_whole = remaining >= self.blocks * block
        if const_expr(len(words) >= _SECTOR_WORDS):
            is_whole = is_whole and pitch % (4 * _SECTOR_WORDS) == 0
        if is_whole:
            for i in range_constexpr(0, len(words), _SECTOR_WORDS):
                store_global(target + i * 4, words[i : i + _SECTOR_WORDS])
        else:
            # The pitch is a multiple of this.
            step = PITCH_ALIGNMENT // 4
            for i in range_constexpr(0, len(words), step):
                column = i // per_block * block
                if remaining >= column + step * block // per_block:
                    store_global(target + i * 4, words[i : i + step])
                elif remaining > column:
                    store_global(target + i * 4, words[i : i + per_block])
