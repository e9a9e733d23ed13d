"""Columnwise half of the dequantizer: 64 columns of a slot tile per warp.

A lane has 8 columns and 32 rows: for NVFP4 two blocks and 16 bytes of codes per column. If columns
are transposed, a row consists of one number of each column, so decoding is the transposition.
"""

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.codecs import Codec
from cute_kernels.device.convert import pack_words
from cute_kernels.device.hadamard import CHUNK, undo
from cute_kernels.device.memory import load_global, load_global_if, store_global
from cute_kernels.device.ptx import bits_as_f32
from cute_kernels.device.scales import row_scales_at
from cute_kernels.layout.shapes import SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .config import DTYPE_BYTES, DequantizeConfig

#: Columns of a lane, which are also the rows that it writes at a time or half of them; rows of a
#: lane; columns of a warp.
LANE_COLS, QUARTER_ROWS, COLUMN_STRIP = 8, 32, 64


class QuantizedCopyBuffers(NamedTuple):
    """Buffers of the copy that is read, or None for each one that the format does not have.

    Attributes:
        codes: Codes.
        scales: Block scales.
        global_scale: (T,) or (G,) fp32.
    """

    codes: cute.Tensor
    scales: cute.Tensor | None
    global_scale: cute.Tensor | None


class SlotTile(NamedTuple):
    """Slot tile, as ``GroupCursor.seek`` finds it.

    Attributes:
        tile: Slot tile.
        group: Group.
        first_row: Matrix row of the first row.
        num_rows: Rows that exist.
    """

    tile: Int32
    group: Int32
    first_row: Int32
    num_rows: Int32


def store_row(address: Int64, numbers: list[Float32], dtype: str) -> None:
    """Round the numbers of a row to ``dtype`` and store them."""
    words = pack_words(numbers, dtype)
    for i in range(0, len(words), 4):
        store_global(address + 4 * i, words[i : i + 4])


class ColumnDecoder:
    """Decoder of parts of columnwise slot tiles. ``SlotTile.tile`` counts within its matrix."""

    def __init__(self, config: DequantizeConfig, codec: Codec):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.element = DTYPE_BYTES[config.dtype]
        self.is_tiled = codec.fmt.has_scale_tiles
        self.is_transposed = codec.fmt.columnwise == "transposed"
        #: Rows that are converted at a time.
        self.step = CHUNK if codec.fmt.is_transformed else LANE_COLS
        #: Scale tiles of a slot tile.
        self.scale_tiles = scale_tiles(TILE_ROWS, codec.block) if self.is_tiled else 0

    @cute.jit
    def decode(
        self, copy: QuantizedCopyBuffers, cols: Int32, target: Int64, slot: SlotTile, strip: Int32
    ) -> None:
        """Decode 64 columns of a slot tile.

        ``target`` is the global address of the tile's first row in the output.
        """
        lane = cute.arch.lane_idx()
        column = strip * COLUMN_STRIP + lane // 4 * LANE_COLS
        quarter = lane % 4  # of the tile's rows
        if column < cols:
            codes_address, pitch = self.codes_address(copy.codes, cols, column, quarter, slot)
            packed = []
            if const_expr(self.is_transposed):
                words = self.codec.code_bytes(QUARTER_ROWS) // 4
                packed = [load_global(codes_address + pitch * c, words) for c in range(LANE_COLS)]
            factors = self.factors(copy, cols, column, quarter, slot)
            row = quarter * QUARTER_ROWS
            out_at = target + Int64(row) * cols * self.element + column * self.element
            for first_row in range_constexpr(0, QUARTER_ROWS, self.step):
                if row < slot.num_rows:
                    if const_expr(self.is_transposed):
                        numbers = [
                            self.decode_column(packed[c], factors[c], first_row)
                            for c in range(LANE_COLS)
                        ]
                        rows = [
                            list(numbers_of_row) for numbers_of_row in zip(*numbers, strict=True)
                        ]
                    else:
                        rows = self.eight_rows(codes_address + pitch * first_row, pitch, factors)
                    for i in range_constexpr(self.step):
                        if row + i < slot.num_rows:
                            address = out_at + Int64(cols) * (i * self.element)
                            store_row(address, rows[i], self.dtype)
                row += self.step
                out_at += Int64(cols) * (self.step * self.element)

    def codes_address(
        self, codes: cute.Tensor, cols: Int32, column: Int32, quarter: Int32, slot: SlotTile
    ) -> tuple[Int64, Int64]:
        """Return the address of a lane's first code, and the bytes to the next column, or row.

        Args:
            codes: Codes; uniform groups have a matrix each.
            cols: Columns of the output, K.
            column: First column of the lane.
            quarter: Quarter of the tile's rows.
            slot: Slot tile.
        """
        rank = len(codes.shape)
        pitch, matrix = Int64(codes.shape[rank - 1]), Int64(0)
        if not self.is_transposed:
            pitch = Int64(codes.stride[rank - 2])
            first_slot = slot.tile * TILE_ROWS + quarter * QUARTER_ROWS
            if self.config.grouping == "uniform":
                matrix = Int64(slot.group) * codes.stride[0]
            return codes.iterator.toint() + matrix + first_slot * pitch + column, pitch
        if self.config.grouping == "uniform":
            matrix = Int64(slot.group) * cols * pitch
        address = codes.iterator.toint() + matrix + column * pitch
        in_tile = quarter * self.codec.code_bytes(QUARTER_ROWS)
        return address + slot.tile * self.codec.code_bytes(TILE_ROWS) + in_tile, pitch

    # ---- factors

    def factors(
        self, copy: QuantizedCopyBuffers, cols: Int32, column: Int32, quarter: Int32, slot: SlotTile
    ) -> list[list[Float32]]:
        """Return the factors of the codes of each of a lane's columns, block by block."""
        global_scale = None if copy.global_scale is None else copy.global_scale[slot.group]
        if not self.codec.has_scales:
            return [[self.codec.decode_factor(None, global_scale)]] * LANE_COLS
        if self.is_tiled:
            scales = self.tiled_scales(copy.scales, cols, column, quarter, slot)
        else:
            scales = self.mn_major_scales(copy.scales, column, slot)
        return [
            [self.codec.decode_factor(s, global_scale) for s in column_scales]
            for column_scales in scales
        ]

    def mn_major_scales(
        self, scales: cute.Tensor, column: Int32, slot: SlotTile
    ) -> list[tuple[Float32]]:
        """Return the scale of each of a lane's columns; one for all of a square block."""
        tiles, width = (Int64(extent) for extent in scales.shape[len(scales.shape) - 2 :])
        tile = Int64(slot.tile)
        if self.config.grouping == "uniform":
            tile += slot.group * tiles
        if self.codec.fmt.is_2d:
            address = scales.iterator.toint() + (tile * width + column // self.codec.block) * 4
            return [(bits_as_f32(load_global(address, 1)[0]),)] * LANE_COLS
        words = load_global(scales.iterator.toint() + (tile * width + column) * 4, LANE_COLS)
        return [(bits_as_f32(word),) for word in words]

    def tiled_scales(
        self, scales: cute.Tensor, cols: Int32, column: Int32, quarter: Int32, slot: SlotTile
    ) -> list[tuple[Float32, ...]]:
        """Return the scales of a lane's rows of each of its columns: one or two."""
        rank = len(scales.shape)
        block_tiles = scales.shape[rank - 2]
        # Blocks of a quarter: two bytes hold it, or it is one of two.
        per_quarter = QUARTER_ROWS // self.codec.block
        byte = quarter * per_quarter
        scale_tile = Int64(self.scale_tiles * slot.tile + byte // 4)
        if self.config.grouping == "uniform":
            scale_tile += Int64(slot.group) * scales.shape[rank - 3] * block_tiles
        address = row_scales_at(scales, column) + scale_tile * SF_TILE_BYTES + byte % 4 // 2 * 2
        pairs = [load_global_if(address + c * 16, 2, column, cols)[0] for c in range(LANE_COLS)]
        if per_quarter > 1:
            return [self.codec.decode_scales(pair) for pair in pairs]
        shift = Uint32(byte % 2 * 8)
        return [self.codec.decode_scales(pair >> shift)[:1] for pair in pairs]

    # ---- numbers

    def decode_column(
        self, packed: list[Uint32], factors: list[Float32], first_row: int
    ) -> list[Float32]:
        """Return the numbers of one column in the lane's rows from ``first_row`` on."""
        words = self.codec.code_bytes(self.step) // 4
        start = first_row // self.step * words
        factor = factors[first_row * len(factors) // QUARTER_ROWS]
        numbers = [code * factor for code in self.codec.decode(packed[start : start + words])]
        return undo(numbers) if self.codec.fmt.is_transformed else numbers

    def eight_rows(
        self, address: Int64, pitch: Int64, factors: list[list[Float32]]
    ) -> list[list[Float32]]:
        """Return the numbers of eight untransposed rows. Each column has one factor."""
        words = self.codec.code_bytes(LANE_COLS) // 4
        packed = [load_global(address + pitch * i, words) for i in range(LANE_COLS)]
        return [
            [code * f[0] for code, f in zip(self.codec.decode(row), factors, strict=True)]
            for row in packed
        ]
