"""A quantized copy back to plain numbers, one direction at a time.

A warp is on its own: it takes items of 8192 elements of a slot tile, holds the codes in registers
and writes rows, 16 bytes a lane and row. Nothing goes through shared memory.

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
    Copy,
    SlotTile,
    store_row,
)
from .fakes import FakeBuffers

_WARPS = 8
_ROW_STRIP = WARP_SIZE * LANE_COLS
#: 16-byte rows of a scale tile: each has the scales of this many rows.
_QUARTERS = 4
#: Such rows of an item, and how many are under way at the same time.
_ITEM_ROWS, _UNROLL = 8, 2


class RowPlaces(NamedTuple):
    """Where a lane reads and writes its columns of a rowwise slot tile, addresses of first rows and
    pitches.

    Attributes:
        scales: that of the scale tile, or of the scale of the first row's block; None where
            blocks have no scales.
        scale_step: bytes from there to that of the next row, where scales are not in tiles.
        selector: for ``prmt``: of the words of two rows, the byte of the lane's block each.
        levels: that of the first row's second level, where rows have one.
        level: the second level of the group, where there is one.
        out_pitch: elements, not bytes.
        count: rows that exist.
    """

    codes: Int64
    pitch: Int64
    scales: Int64 | None
    scale_step: int
    selector: Uint32 | None
    levels: Int64 | None
    level: Float32 | None
    out: Int64
    out_pitch: Int32
    count: Int32


class Dequantizer(GridKernel):
    """One direction of a quantized tensor, see the module."""

    #: As many as an SM holds for certain: the kernels take 66 to 128 registers.
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
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        copy = (fake.codes_t(), fake.scales_t()) if config.columnwise else None
        codes, scales = copy or (fake.codes(), fake.scales())
        level = fake.global_scale(per_row=config.has_row_scale)
        return (codes, scales, level, fake.offs(), fake.x(), Int32(0), Int32(1), env_stream())

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        level: cute.Tensor | None,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        fresh: Int32,
    ) -> None:
        groups = GroupCursor.from_tensors(out, offs)
        cols = out.shape[len(out.shape) - 1]
        if const_expr(self.config.columnwise):
            parts = (cols + COLUMN_STRIP - 1) // COLUMN_STRIP
        else:
            parts = (cols + _ROW_STRIP - 1) // _ROW_STRIP * (QUARTER_ROWS // _ITEM_ROWS)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP_SIZE)
        item = cute.arch.block_idx()[0] * _WARPS + warp
        step = cute.arch.grid_dim()[0] * _WARPS
        num_items = groups.num_tiles() * parts
        group = Int32(0)
        while item < num_items:
            wanted = item // parts
            part = item - wanted * parts
            tile, group, first, count = groups.seek(wanted, group)
            if tile != wanted:
                item = next_item(item, step, tile, parts)
            else:
                copy = Copy(codes, scales, level)
                target = out.iterator.toint() + Int64(first) * cols * self.element
                if const_expr(self.config.columnwise):
                    local = groups.local_tile(tile, group)
                    place = SlotTile(local, group, first, count)
                    self.columns.decode(copy, cols, target, place, part)
                else:
                    place = SlotTile(tile, group, first, count)
                    self.rows(copy, cols, target, place, part)
                item += step
        if const_expr(offs is not None):
            if fresh != 0:
                self.clear_tail(out, groups.end_row())

    @cute.jit
    def clear_tail(self, out: cute.Tensor, first: Int32) -> None:
        row_bytes = Int64(out.shape[1]) * self.element
        stop = out.iterator.toint() + out.shape[0] * row_bytes
        thread = cute.arch.block_idx()[0] * self.num_threads + cute.arch.thread_idx()[0]
        at = out.iterator.toint() + first * row_bytes + thread * 16
        while at < stop:
            store_global(at, [Uint32(0)] * 4)
            at += cute.arch.grid_dim()[0] * (self.num_threads * 16)

    # ---- rowwise

    @cute.jit
    def rows(self, copy: Copy, cols: Int32, target: Int64, place: SlotTile, part: Int32) -> None:
        """Part ``part`` of a rowwise slot tile, whose first row of the result is at ``target``."""
        strips = (cols + _ROW_STRIP - 1) // _ROW_STRIP
        j = part // strips * _ITEM_ROWS
        stop = cutlass.min(j + _ITEM_ROWS, place.count)
        column = part % strips * _ROW_STRIP + cute.arch.lane_idx() * LANE_COLS
        if column < cols:
            at = self.row_places(copy, cols, target, place, column)
            while j < stop:
                self.some_rows(at, j)
                j += _UNROLL

    def row_places(
        self, copy: Copy, cols: Int32, target: Int64, place: SlotTile, column: Int32
    ) -> RowPlaces:
        scales, selector, levels, level = None, None, None, None
        step = 0 if self.codec.fmt.is_2d else 4
        if self.is_tiled:
            strip = self.codec.block * SF_TILE_COLS  # columns of a scale tile
            tiles_along_k = (cols + strip - 1) // strip
            scale_tile = Int64(place.tile) * tiles_along_k + column // strip
            scales = copy.scales.iterator.toint() + scale_tile * SF_TILE_BYTES
            byte = column // self.codec.block % SF_TILE_COLS
            selector = Uint32(byte * 0x11 + 0x40)
        elif self.codec.has_scales:
            scales = self.mn_major(copy.scales, place, column // self.codec.block)
        pitch = Int64(copy.codes.stride[len(copy.codes.stride) - 2])
        codes = copy.codes.iterator.toint() + place.first * pitch + self.codec.code_bytes(column)
        out = target + column * self.element
        if self.config.has_row_scale:
            levels = copy.level.iterator.toint() + Int64(place.first) * 4
        else:
            level = None if copy.level is None else copy.level[place.group]
        scale = (scales, step, selector)
        return RowPlaces(codes, pitch, *scale, levels, level, out, cols, place.count)

    def mn_major(self, scales: cute.Tensor, place: SlotTile, block: Int32) -> Int64:
        """Address of the scale of a slot tile's first row in a block along K."""
        blocks, width = (Int64(extent) for extent in scales.shape[len(scales.shape) - 2 :])
        if self.codec.fmt.is_2d:  # a row of blocks each
            return scales.iterator.toint() + (place.tile * width + block) * 4
        row, slot = Int64(block), Int64(place.tile) * TILE_ROWS
        if self.config.grouping == "uniform":
            row += place.group * blocks
            slot -= place.group * width
        return scales.iterator.toint() + (row * width + slot) * 4

    @cute.jit
    def some_rows(self, at: RowPlaces, j: Int32) -> None:
        """The rows from ``j`` on, as many as are under way at once, of each quarter."""
        rows = [j + (u + QUARTER_ROWS * q) for u in range(_UNROLL) for q in range(_QUARTERS)]
        scale_words = self.load_scales(at, j, rows)
        num_bytes = self.codec.code_bytes(LANE_COLS)
        packed = [load_global_if(at.codes + r * at.pitch, num_bytes, r, at.count) for r in rows]
        levels = self.load_levels(at, rows)
        for i in range_constexpr(0, len(rows), 2):
            scales = (None, None)
            if const_expr(self.codec.has_scales and not self.is_tiled):
                scales = tuple(bits_as_f32(word) for word in scale_words[i : i + 2])
            elif const_expr(self.codec.has_scales):
                operands = [scale_words[i], scale_words[i + 1], at.selector]
                pair = asm("prmt.b32 $0, $1, $2, $3;", [Uint32], operands)
                scales = self.codec.decode_scales(pair)
            for n in range_constexpr(i, i + 2):
                if rows[n] < at.count:
                    factor = self.codec.decode_factor(scales[n - i], levels[n])
                    numbers = [code * factor for code in self.codec.decode(packed[n])]
                    place = at.out + Int64(rows[n]) * at.out_pitch * self.element
                    store_row(place, numbers, self.dtype)

    def load_scales(self, at: RowPlaces, j: Int32, rows: list[Int32]) -> list[Uint32]:
        """The words that hold the scales of ``some_rows``: of a scale tile, or a scale each."""
        if not self.codec.has_scales:
            return []
        if not self.is_tiled:
            step = at.scale_step
            return [load_global_if(at.scales + r * step, 4, r, at.count)[0] for r in rows]
        quarters = _QUARTERS * SF_TILE_COLS  # bytes
        lines = [load_global(at.scales + (j + u) * quarters, 4) for u in range(_UNROLL)]
        return [word for line in lines for word in line]

    def load_levels(self, at: RowPlaces, rows: list[Int32]) -> list[Float32 | None]:
        if not self.config.has_row_scale:
            return [at.level] * len(rows)
        return [bits_as_f32(load_global_if(at.levels + r * 4, 4, r, at.count)[0]) for r in rows]
