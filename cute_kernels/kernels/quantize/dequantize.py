"""Quantized copies back to plain numbers, one direction at a time.

Each warp works alone. It takes items of 8192 elements of a slot tile, holds the codes in registers
and writes rows, 16 bytes per lane and row. Nothing goes through shared memory.

Rowwise:     256 columns of the rows j, j + 32, j + 64 and j + 96 for eight j. The scales of four
             such rows are 16 bytes of a scale tile, one load for the eight lanes that share it.
             A lane has 8 columns of a row.
Columnwise:  64 columns of all 128 rows, see ``dequantize_columns``.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.codecs import codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor, next_item
from cute_kernels.device.launch import GridKernel, env_stream
from cute_kernels.device.memory import load_global, load_global_if, store_global
from cute_kernels.device.ptx import asm, bits_as_f32
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from .config import DTYPE_BYTES, DequantizeConfig
from .dequantize_columns import (
    COLUMN_STRIP,
    LANE_COLS,
    QUARTER_ROWS,
    ColumnDecoder,
    QuantizedCopyBuffers,
    SlotTile,
    store_row,
)
from .fakes import FakeBuffers

_WARPS = 8
_ROW_STRIP = WARP_SIZE * LANE_COLS
#: 16-byte rows of a scale tile: each has the scales of this many rows.
_QUARTERS = 4
#: 16-byte rows of an item, and how many of them are in flight at the same time.
_ITEM_ROWS, _UNROLL = 8, 2


class RowAddresses(NamedTuple):
    """Addresses of a lane's columns in the first row of a rowwise slot tile.

    Attributes:
        codes: Global address of the codes.
        pitch: Bytes from one row of codes to the next.
        scales: Address of the scale tile, or of the scale of the row's block. None without block
            scales.
        scale_step: Bytes to the scale of the next row, if scales are not in tiles.
        selector: ``prmt`` selector that takes the byte of the lane's block from the words of two
            rows.
        row_scales: Address of the row's global scale. None if the scale belongs to a group.
        global_scale: Global scale of the group. None if each row has one, or if the format has
            none.
        out: Address in the output.
        out_pitch: Elements from one output row to the next.
        num_rows: Rows that exist.
    """

    codes: Int64
    pitch: Int64
    scales: Int64 | None
    scale_step: int
    selector: Uint32 | None
    row_scales: Int64 | None
    global_scale: Float32 | None
    out: Int64
    out_pitch: Int32
    num_rows: Int32


class Dequantizer(GridKernel):
    """Kernel that decodes one direction of a quantized tensor. See the module's docstring."""

    #: An SM always has room for two: the kernels take 66 to 128 registers per thread.
    ctas_per_sm = 2
    num_threads = _WARPS * WARP_SIZE

    def __init__(self, config: DequantizeConfig):
        self.config = config
        self.dtype = config.dtype
        self.element = DTYPE_BYTES[config.dtype]
        self.codec = codec_of(config.format, config.dtype)
        self.is_tiled = self.codec.fmt.has_scale_tiles
        self.columns = ColumnDecoder(config, self.codec)

    @staticmethod
    def fake_args(config: DequantizeConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``DequantizeConfig.kernel``."""
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        copy = (fake.codes_t(), fake.scales_t()) if config.columnwise else None
        codes, scales = copy or (fake.codes(), fake.scales())
        global_scale = fake.global_scale(per_row=config.has_row_scale)
        return (
            codes,
            scales,
            global_scale,
            fake.offs(),
            fake.x(),
            Int32(0),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        global_scale: cute.Tensor | None,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        fresh: Int32,
    ) -> None:
        """Decode the slot tiles of the tensor.

        Args:
            codes: Codes of the copy.
            scales: Block scales of the copy. Optional.
            global_scale: (T,) or (G,) fp32. Optional.
            offs: (G,) int32, None if uniform.
            out: (T, K) or (G, N, K). Output.
            fresh: Not 0 to write zeros to the tail.
        """
        groups = GroupCursor.from_tensors(out, offs)
        cols = out.shape[len(out.shape) - 1]
        if const_expr(self.config.columnwise):
            parts_per_tile = (cols + COLUMN_STRIP - 1) // COLUMN_STRIP
        else:
            parts_per_tile = (cols + _ROW_STRIP - 1) // _ROW_STRIP * (QUARTER_ROWS // _ITEM_ROWS)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP_SIZE)
        item = cute.arch.block_idx()[0] * _WARPS + warp
        step = cute.arch.grid_dim()[0] * _WARPS
        num_items = groups.num_tiles() * parts_per_tile
        group = Int32(0)
        while item < num_items:
            slot_tile = item // parts_per_tile
            tile_part = item - slot_tile * parts_per_tile
            tile, group, first_row, num_rows = groups.seek(slot_tile, group)
            if tile != slot_tile:
                item = next_item(item, step, tile, parts_per_tile)
            else:
                copy = QuantizedCopyBuffers(codes, scales, global_scale)
                target = out.iterator.toint() + Int64(first_row) * cols * self.element
                if const_expr(self.config.columnwise):
                    local_tile = groups.local_tile(tile, group)
                    slot = SlotTile(local_tile, group, first_row, num_rows)
                    self.columns.decode(copy, cols, target, slot, tile_part)
                else:
                    slot = SlotTile(tile, group, first_row, num_rows)
                    self.decode_row_part(copy, cols, target, slot, tile_part)
                item += step
        if const_expr(offs is not None):
            if fresh != 0:
                self.clear_tail(out, groups.end_row())

    @cute.jit
    def clear_tail(self, out: cute.Tensor, first_row: Int32) -> None:
        """Write zeros to the rows from ``first_row`` on."""
        row_bytes = Int64(out.shape[1]) * self.element
        end = out.iterator.toint() + out.shape[0] * row_bytes
        thread = cute.arch.block_idx()[0] * self.num_threads + cute.arch.thread_idx()[0]
        address = out.iterator.toint() + first_row * row_bytes + thread * 16
        while address < end:
            store_global(address, [Uint32(0)] * 4)
            address += cute.arch.grid_dim()[0] * (self.num_threads * 16)

    # ---- rowwise

    @cute.jit
    def decode_row_part(
        self,
        copy: QuantizedCopyBuffers,
        cols: Int32,
        target: Int64,
        slot: SlotTile,
        tile_part: Int32,
    ) -> None:
        """Decode a part of a rowwise slot tile.

        ``target`` is the global address of the tile's first row in the output.
        """
        strips = (cols + _ROW_STRIP - 1) // _ROW_STRIP
        j = tile_part // strips * _ITEM_ROWS
        end_row = cutlass.min(j + _ITEM_ROWS, slot.num_rows)
        column = tile_part % strips * _ROW_STRIP + cute.arch.lane_idx() * LANE_COLS
        if column < cols:
            addresses = self.row_addresses(copy, cols, target, slot, column)
            while j < end_row:
                self.decode_rows(addresses, j)
                j += _UNROLL

    def row_addresses(
        self, copy: QuantizedCopyBuffers, cols: Int32, target: Int64, slot: SlotTile, column: Int32
    ) -> RowAddresses:
        """Return the addresses of a lane's columns, from ``column`` on."""
        scales, selector, row_scales, global_scale = None, None, None, None
        step = 0 if self.codec.fmt.is_2d else 4
        if self.is_tiled:
            strip = self.codec.block * SF_TILE_COLS  # columns of a scale tile
            tiles_along_k = (cols + strip - 1) // strip
            scale_tile = Int64(slot.tile) * tiles_along_k + column // strip
            scales = copy.scales.iterator.toint() + scale_tile * SF_TILE_BYTES
            byte = column // self.codec.block % SF_TILE_COLS
            selector = Uint32(byte * 0x11 + 0x40)
        elif self.codec.has_scales:
            scales = self.mn_major(copy.scales, slot, column // self.codec.block)
        pitch = Int64(copy.codes.stride[len(copy.codes.stride) - 2])
        codes = copy.codes.iterator.toint() + slot.first_row * pitch + self.codec.code_bytes(column)
        out = target + column * self.element
        if self.config.has_row_scale:
            row_scales = copy.global_scale.iterator.toint() + Int64(slot.first_row) * 4
        else:
            global_scale = None if copy.global_scale is None else copy.global_scale[slot.group]
        scale = (scales, step, selector)
        return RowAddresses(
            codes, pitch, *scale, row_scales, global_scale, out, cols, slot.num_rows
        )

    def mn_major(self, scales: cute.Tensor, slot: SlotTile, block: Int32) -> Int64:
        """Return the address of the scale of a slot tile's first row in a block along K."""
        blocks, width = (Int64(extent) for extent in scales.shape[len(scales.shape) - 2 :])
        if self.codec.fmt.is_2d:  # a row of blocks each
            return scales.iterator.toint() + (slot.tile * width + block) * 4
        row, first_slot = Int64(block), Int64(slot.tile) * TILE_ROWS
        if self.config.grouping == "uniform":
            row += slot.group * blocks
            first_slot -= slot.group * width
        return scales.iterator.toint() + (row * width + first_slot) * 4

    @cute.jit
    def decode_rows(self, addresses: RowAddresses, j: Int32) -> None:
        """Decode the rows from ``j`` on in each quarter, as many as are in flight at once."""
        rows = [j + (u + QUARTER_ROWS * q) for u in range(_UNROLL) for q in range(_QUARTERS)]
        scale_words = self.load_scales(addresses, j, rows)
        num_bytes = self.codec.code_bytes(LANE_COLS)
        packed = [
            load_global_if(addresses.codes + r * addresses.pitch, num_bytes, r, addresses.num_rows)
            for r in rows
        ]
        row_scales = self.load_global_scales(addresses, rows)
        for i in range_constexpr(0, len(rows), 2):
            scales = (None, None)
            if const_expr(self.codec.has_scales and not self.is_tiled):
                scales = tuple(bits_as_f32(word) for word in scale_words[i : i + 2])
            elif const_expr(self.codec.has_scales):
                operands = [scale_words[i], scale_words[i + 1], addresses.selector]
                pair = asm("prmt.b32 $0, $1, $2, $3;", [Uint32], operands)
                scales = self.codec.decode_scales(pair)
            for n in range_constexpr(i, i + 2):
                if rows[n] < addresses.num_rows:
                    factor = self.codec.decode_factor(scales[n - i], row_scales[n])
                    numbers = [code * factor for code in self.codec.decode(packed[n])]
                    target = addresses.out + Int64(rows[n]) * addresses.out_pitch * self.element
                    store_row(target, numbers, self.dtype)

    def load_scales(self, addresses: RowAddresses, j: Int32, rows: list[Int32]) -> list[Uint32]:
        """Return the words with the scales of ``rows``: of a scale tile, or one scale each."""
        if not self.codec.has_scales:
            return []
        if not self.is_tiled:
            step = addresses.scale_step
            return [
                load_global_if(addresses.scales + r * step, 4, r, addresses.num_rows)[0]
                for r in rows
            ]
        quarters = _QUARTERS * SF_TILE_COLS  # bytes
        lines = [load_global(addresses.scales + (j + u) * quarters, 4) for u in range(_UNROLL)]
        return [word for line in lines for word in line]

    def load_global_scales(
        self, addresses: RowAddresses, rows: list[Int32]
    ) -> list[Float32 | None]:
        """Return the global scale of each row."""
        if not self.config.has_row_scale:
            return [addresses.global_scale] * len(rows)
        return [
            bits_as_f32(load_global_if(addresses.row_scales + r * 4, 4, r, addresses.num_rows)[0])
            for r in rows
        ]
