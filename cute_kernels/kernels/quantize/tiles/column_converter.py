"""Columnwise half of the tile quantizer for 4-bit codes."""

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import absmax_pairs, absmax_words, fmax, split_absmax
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.groups import GroupCursor
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
from .geometry import (
    BOX_BYTES,
    BOX_SIZE,
    TILE_COLS,
    TileAddresses,
    TileDescriptor,
    TileEncoding,
    TileGeometry,
)
from .random_numbers import ColumnRandomNumbers
from .scales import join_scales, scale_blocks


class LanePosition(NamedTuple):
    """Share of a tile that a lane has.

    Attributes:
        first_row: First row of the lane.
        first_box: First box of the lane.
        word: 32-bit word of the box's rows that the lane reads.
        swizzle_xor: The lane reads row r ^ swizzle_xor of eight where other lanes read row r.
    """

    first_row: Int32
    first_box: Int32
    word: Int32
    swizzle_xor: Int32 | int


class ColumnConverter:
    """Converter of the columns of tiles in shared memory, a quarter of a tile per warp.

    On sm_100a a lane has columns of half the tile's rows and stores their codes, 32 bytes of NVFP4,
    at once. sm_90a stores at most 16 bytes. There four lanes share their columns (two lanes if
    fp32), each has 32 rows at a time, and together they write 64 bytes (or 32).

    Lanes that share columns read rows 32 apart, which the swizzle treats alike, and not of all
    chunks. To touch all banks, each lane reads the rows of an eight in its own order, see
    ``LanePosition.swizzle_xor``. Packing the codes restores the order of their bytes.
    """

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        #: Lanes that share their columns, so that a warp has 16 columns of a box, or all.
        self.sharing = (
            1 if get_arch(config.arch).has_fp4_convert else 2 * self.geometry.cols_per_word
        )
        #: True if a warp has half of the tile's rows, and skips them if they do not exist.
        self.skips_rows = self.sharing == 1
        #: Rows that a lane has at a time, and how often; boxes with columns that it has.
        self.num_rows = 64 if self.skips_rows else 32
        self.steps = 1 if self.skips_rows else 4 // self.sharing
        self.num_blocks = self.num_rows // codec.block
        self.num_boxes = self.geometry.num_boxes * max(2, self.sharing) // 4
        self.is_transformed = codec.fmt.is_transformed
        #: True if the codec needs words in the order of their rows.
        self.in_order = self.is_transformed or codec.searches_scale

    def lane_position(self, warp_in_team: Int32) -> LanePosition:
        """Return the share of the tile that the calling lane has."""
        lane = cute.arch.lane_idx()
        if self.skips_rows:
            return LanePosition(
                warp_in_team // 2 * self.num_rows, warp_in_team % 2 * self.num_boxes, lane, 0
            )
        mate = lane % self.sharing
        return LanePosition(
            first_row=mate * self.num_rows,
            first_box=warp_in_team // self.sharing * self.num_boxes,
            word=warp_in_team % self.sharing * (32 // self.sharing) + lane // self.sharing,
            swizzle_xor=mate * (8 // self.sharing),
        )

    @cute.jit
    def convert(
        self,
        groups: GroupCursor,
        cols: Int32,
        encoding: TileEncoding,
        codes_t: cute.Tensor | None,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
    ) -> None:
        """Convert a warp's quarter of the tile.

        A lane takes one word of its rows in each of its boxes.

        Args:
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            encoding: Parameters of the columnwise copy.
            codes_t: (K, P) or (G, K, P). Codes, or None to compute only amaxes of square blocks.
            tile: Descriptor of the tile.
            warp_in_team: Warp in the team.
            addresses: Shared-memory addresses of the tile.
        """
        lane_position = self.lane_position(warp_in_team)
        # Rows r and r + 8 have the same swizzle.
        rows = []
        for r in range_constexpr(8):
            row = r ^ lane_position.swizzle_xor
            rows.append(row * BOX_BYTES + ((lane_position.word * 4) ^ (row * 16)))
        for step in range_constexpr(self.num_boxes * self.steps):
            box = lane_position.first_box + step // self.steps
            first_row = lane_position.first_row + step % self.steps * (TILE_ROWS // 2)
            base = addresses.tile + box * BOX_SIZE + first_row * BOX_BYTES
            row_addresses = [base + row for row in rows]
            col = box * self.geometry.box_cols + lane_position.word * self.geometry.cols_per_word
            random_numbers = None
            if const_expr(encoding.seed is not None and self.config.columnwise):
                per_word, is_2d = self.geometry.cols_per_word, self.config.fmt.is_2d
                position = (first_row, col, self.order(lane_position))
                random_numbers = ColumnRandomNumbers.create(
                    encoding.seed, is_2d, cols, tile, position, per_word
                )
            codes_per_column, scale_pairs_per_column = self.convert_columns(
                row_addresses, lane_position, first_row, col, encoding, random_numbers, addresses
            )
            if const_expr(self.config.columnwise):
                scale_words = [join_scales(pairs) for pairs in scale_pairs_per_column]
                self.store(
                    groups,
                    cols,
                    codes_t,
                    tile,
                    first_row,
                    col,
                    codes_per_column,
                    scale_words,
                    addresses,
                )

    @cute.jit
    def convert_columns(
        self,
        row_addresses: list[Int32],
        lane_position: LanePosition,
        first_row: Int32,
        col: Int32,
        encoding: TileEncoding,
        random_numbers: ColumnRandomNumbers | None,
        addresses: TileAddresses,
    ) -> tuple[list[list[Uint32]], list[list[Uint16]]]:
        """Encode a lane's columns in its rows from ``first_row`` on.

        Amaxes of square blocks also go to shared memory.

        Returns:
            Words of codes, and pairs of scale bytes, for each column.
        """
        codes_per_column: list[list] = [[] for _ in range(self.geometry.cols_per_word)]
        scale_pairs_per_column: list[list] = [[] for _ in range(self.geometry.cols_per_word)]
        for first_block in range_constexpr(0, self.num_blocks, 2):
            blocks_at_once = min(2, self.num_blocks)
            blocks = [
                self.load_block(row_addresses, first_block + i, lane_position.swizzle_xor)
                for i in range(blocks_at_once)
            ]
            row_block = first_row // self.codec.block + first_block
            if const_expr(self.config.fmt.is_2d and self.codec.searches_scale):
                amaxes = self.load_squares(row_block, col, addresses)
            else:
                amaxes = [self.amaxes(words) for words in blocks]
            if const_expr(self.config.fmt.is_2d and not self.codec.searches_scale):
                self.store_squares(amaxes, lane_position, row_block, col, addresses)
            elif const_expr(self.codec.searches_scale and not self.config.fmt.is_2d):
                amaxes = [
                    self.codec.choose_columns(words, block_amaxes, encoding.global_scale)
                    for words, block_amaxes in zip(blocks, amaxes, strict=True)
                ]
            if const_expr(self.config.columnwise):
                factors: tuple[list, list] = ([], [])
                for c in range_constexpr(self.geometry.cols_per_word):
                    pair, *encode_factors = scale_blocks(
                        self.codec,
                        amaxes[0][c],
                        amaxes[-1][c],
                        encoding.global_scale,
                        encoding.table,
                    )
                    scale_pairs_per_column[c].append(pair)
                    for block_factors, factor in zip(factors, encode_factors, strict=True):
                        block_factors.append(factor)
                for i, (words, encode_factors) in enumerate(
                    zip(blocks, factors[: len(blocks)], strict=True)
                ):
                    if const_expr(random_numbers is None):
                        codes = self.codec.encode_columns(
                            words, encode_factors, self.order(lane_position)
                        )
                    else:
                        random_words = random_numbers.block(first_block + i)
                        codes = self.codec.round_columns(
                            words, encode_factors, random_words, self.order(lane_position)
                        )
                    for c in range_constexpr(self.geometry.cols_per_word):
                        codes_per_column[c] += codes[c]
        return codes_per_column, scale_pairs_per_column

    def order(self, lane_position: LanePosition) -> Int32 | int:
        """Return the order in which the words of a block are passed to the codec."""
        return 0 if self.in_order else lane_position.swizzle_xor

    def load_block(
        self, row_addresses: list[Int32], block: int, swizzle_xor: Int32 | int
    ) -> list[Uint32]:
        """Return a lane's word in each row of one of its blocks.

        The words are transformed if the format asks for it.
        """
        block_row = block * self.codec.block
        words = [
            load_shared(row_addresses[r % 8] + (block_row + r // 8 * 8) * BOX_BYTES, 1)[0]
            for r in range(self.codec.block)
        ]
        if self.in_order and not isinstance(swizzle_xor, int):
            for distance in (2, 4):
                swapped = (swizzle_xor & distance) != 0
                words = [select(swapped, words[i ^ distance], w) for i, w in enumerate(words)]
        return transform_words(words, self.arch) if self.is_transformed else words

    def load_squares(
        self, row_block: Int32, col: Int32, addresses: TileAddresses
    ) -> list[list[Float32]]:
        """Load the chosen scales of two square blocks, one below the other."""
        address = self.square_at(row_block, col, addresses)
        loaded = [
            bits_as_f32(load_shared(address + i * (4 * self.geometry.col_blocks), 1)[0])
            for i in range(2)
        ]
        return [[scale] * self.geometry.cols_per_word for scale in loaded]

    def square_at(self, row_block: Int32, col: Int32, addresses: TileAddresses) -> Int32:
        """Return the shared-memory address of the number of a square block."""
        return (
            addresses.squares + (row_block * self.geometry.col_blocks + col // self.codec.block) * 4
        )

    @cute.jit
    def store_squares(
        self,
        amaxes: list[list[Float32]],
        lane_position: LanePosition,
        row_block: Int32,
        col: Int32,
        addresses: TileAddresses,
    ) -> None:
        """Store the amaxes of two square blocks, one below the other, by a lane that has them."""
        if lane_position.word % (self.codec.block // self.geometry.cols_per_word) == 0:
            address = self.square_at(row_block, col, addresses)
            for i in range_constexpr(2):
                store_shared(
                    address + i * (4 * self.geometry.col_blocks), [f32_as_bits(amaxes[i][0])]
                )

    @cute.jit
    def clear(
        self,
        groups: GroupCursor,
        cols: Int32,
        codes_t: cute.Tensor,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
    ) -> None:
        """Write zeros where ``convert`` would write rows that do not exist."""
        lane_position = self.lane_position(warp_in_team)
        for u in range_constexpr(self.num_boxes):
            col = (
                lane_position.first_box + u
            ) * self.geometry.box_cols + lane_position.word * self.geometry.cols_per_word
            words = self.codec.code_bytes(self.num_rows) // 4
            codes_per_column = [[Uint32(0)] * words] * self.geometry.cols_per_word
            scale_words = [Uint32(0)] * self.geometry.cols_per_word
            first_row = lane_position.first_row
            self.store(
                groups,
                cols,
                codes_t,
                tile,
                first_row,
                col,
                codes_per_column,
                scale_words,
                addresses,
            )

    @cute.jit
    def store(
        self,
        groups: GroupCursor,
        cols: Int32,
        codes_t: cute.Tensor,
        tile: TileDescriptor,
        first_row: Int32,
        col: Int32,
        codes_per_column: list,
        scale_words: list,
        addresses: TileAddresses,
    ) -> None:
        """Store the codes and scales of a lane's columns."""
        self.store_scales(scale_words, first_row, col, addresses)
        k = tile.col_tile * TILE_COLS + col
        # K is a multiple of 16, so lanes that share columns agree.
        if k < cols:
            pitch = codes_t.stride[len(codes_t.stride) - 2]
            local_tile = groups.local_tile(tile.slot_tile, tile.group)
            row_bytes = self.codec.code_bytes(TILE_ROWS)
            slot = local_tile * row_bytes + self.codec.code_bytes(first_row)
            target = codes_t.iterator.toint() + slot
            if const_expr(groups.offs is None):
                target += tile.group * codes_t.stride[0]
            target += Int64(k) * pitch
            for c in range_constexpr(self.geometry.cols_per_word):
                for i in range_constexpr(0, len(codes_per_column[c]), 8):
                    store_global(target + c * pitch + i * 4, codes_per_column[c][i : i + 8])

    @cute.jit
    def store_scales(
        self, scale_words: list, first_row: Int32, col: Int32, addresses: TileAddresses
    ) -> None:
        """Store scale bytes of a lane's columns in shared memory."""
        rows_per_word = SF_TILE_COLS * self.codec.block
        address = addresses.scales_t + (first_row // rows_per_word * TILE_COLS + col) * 4
        if const_expr(self.num_blocks == SF_TILE_COLS):
            store_shared(address, scale_words)
        else:
            address += first_row % rows_per_word // self.codec.block
            store = store_shared_half if self.num_blocks > 1 else store_shared_byte
            for c in range_constexpr(self.geometry.cols_per_word):
                store(address + 4 * c, scale_words[c])

    def amaxes(self, words: list[Uint32]) -> list[Float32]:
        """Return the amax of each column over a block of rows, or of the square block."""
        nan = self.config.fmt.amaxes_keep_nan
        if self.dtype == "float32":
            amaxes = [absmax_words(words, self.dtype, self.arch, nan)]
        else:
            pair = absmax_pairs(words, self.dtype, nan)
            amaxes = list(split_absmax(pair, self.dtype, self.arch, nan))
        if self.config.fmt.is_2d:
            amax = amaxes[0] if len(amaxes) == 1 else fmax(*amaxes, nan)
            offset = self.sharing
            while offset < self.sharing * (self.codec.block // self.geometry.cols_per_word):
                amax = fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=offset), nan)
                offset *= 2
            amaxes = [amax] * len(amaxes)
        return amaxes
