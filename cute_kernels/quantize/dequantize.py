"""NVFP4 back to plain numbers, one direction of a copy at a time.

A warp is on its own: it takes items of 8192 elements of a slot tile, holds the codes in registers
and writes rows, 16 bytes a lane and row. Nothing goes through shared memory.

Rowwise:     256 columns of the rows j, j + 32, j + 64 and j + 96 for eight j. The scales of four
             such rows are 16 bytes of a scale tile, one load for the eight lanes that share it.
             A lane has 8 columns of a row.
Columnwise:  64 columns of all 128 rows. A lane has 8 columns and 32 rows, two blocks each, 16 bytes
             of codes a column. Rows come out by taking one number of each column's: decoding is the
             transposition.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.convert import decode_e2m1, decode_e4m3_pair, pack_words
from cute_kernels.device.groups import Grouping, next_item
from cute_kernels.device.memory import load_global, load_global_if, store_global
from cute_kernels.device.ptx import asm, bits_as_f32
from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS, SF_TILE_ROWS, TILE_ROWS
from cute_kernels.quantize.config import DTYPE_BYTES, DequantizeConfig
from cute_kernels.quantize.fakes import FakeBuffers, env_stream

__all__ = ["Dequantizer"]

_BLOCK = NVFP4.sf_vec_size
_WARP = 32
_WARPS = 8
#: As many as an SM holds for certain: the kernels take 66 to 128 registers.
_CTAS_PER_SM = 2
#: Columns of a lane.
_LANE_COLS = 8
_ROW_STRIP = _WARP * _LANE_COLS
#: 16-byte rows of a scale tile: each has the scales of this many rows, so many rows apart.
_QUARTERS, _QUARTER_ROWS = 4, 32
#: Such rows of an item, and how many are under way at the same time.
_ITEM_ROWS, _UNROLL = 8, 2
_COLUMN_STRIP = 64
_RCP_TENSOR_MAX_BITS = 0x39C30C31  # fl(1/2688)


class Dequantizer:
    """One direction of an NVFP4 tensor, see the module."""

    def __init__(self, config: DequantizeConfig):
        self.config = config
        self.dtype = config.dtype
        self.element = DTYPE_BYTES[config.dtype]

    @staticmethod
    def fake_args(config: DequantizeConfig) -> tuple[Any, ...]:
        """Stand-ins for (codes, scales, amax, offs, out, fresh, num_sms, stream)."""
        fake = FakeBuffers(config.dtype, config.grouping == "uniform")
        copy = (fake.codes_t(), fake.scales_t()) if config.columnwise else None
        codes, scales = copy or (fake.codes(), fake.scales())
        amax = fake.amax(per_row=config.row_scaled)
        return (codes, scales, amax, fake.offs(), fake.x(), Int32(0), Int32(1), env_stream())

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        amax: cute.Tensor,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        fresh: Int32,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        self.kernel(codes, scales, amax, offs, out, fresh).launch(
            grid=[num_sms * _CTAS_PER_SM, 1, 1],
            block=[_WARPS * _WARP, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        amax: cute.Tensor,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        fresh: Int32,
    ) -> None:
        groups = Grouping.of(out, offs)
        cols = out.shape[len(out.shape) - 1]
        if cutlass.const_expr(self.config.columnwise):
            parts = (cols + _COLUMN_STRIP - 1) // _COLUMN_STRIP
        else:
            parts = (cols + _ROW_STRIP - 1) // _ROW_STRIP * (_QUARTER_ROWS // _ITEM_ROWS)
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // _WARP)
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
                target = out.iterator.toint() + Int64(first) * cols * self.element
                if cutlass.const_expr(self.config.columnwise):
                    local = groups.local_tile(tile, group)
                    self.columns(codes, scales, amax, cols, target, group, local, count, part)
                else:
                    place = (tile, group, first, count)
                    self.rows(codes, scales, amax, cols, target, place, part)
                item += step
        if cutlass.const_expr(offs is not None):
            if fresh != 0:
                self.clear_tail(out, groups.last_row())

    @cute.jit
    def clear_tail(self, out: cute.Tensor, first: Int32) -> None:
        """Write zeros to the rows from ``first`` on."""
        row_bytes = Int64(out.shape[1]) * self.element
        stop = out.iterator.toint() + out.shape[0] * row_bytes
        thread = cute.arch.block_idx()[0] * (_WARPS * _WARP) + cute.arch.thread_idx()[0]
        at = out.iterator.toint() + first * row_bytes + thread * 16
        while at < stop:
            store_global(at, [Uint32(0)] * 4)
            at += cute.arch.grid_dim()[0] * (_WARPS * _WARP * 16)

    @cute.jit
    def rows(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        amax: cute.Tensor,
        cols: Int32,
        target: Int64,
        place: tuple[Int32, Int32, Int32, Int32],
        part: Int32,
    ) -> None:
        """Part ``part`` of a rowwise slot tile; ``place`` is what ``Grouping.seek`` says of it."""
        tile, group, first, count = place
        strips = (cols + _ROW_STRIP - 1) // _ROW_STRIP
        j = part // strips * _ITEM_ROWS
        stop = cutlass.min(j + _ITEM_ROWS, count)
        column = part % strips * _ROW_STRIP + cute.arch.lane_idx() * _LANE_COLS
        if column < cols:
            tiles_along_k = (cols + _BLOCK * SF_TILE_COLS - 1) // (_BLOCK * SF_TILE_COLS)
            scale_tile = Int64(tile) * tiles_along_k + column // (_BLOCK * SF_TILE_COLS)
            scales_at = scales.iterator.toint() + scale_tile * SF_TILE_BYTES
            # Of the words of two rows, the byte of this lane's block each.
            byte = column // _BLOCK % SF_TILE_COLS
            selector = Uint32(byte * 0x11 + 0x40)
            pitch = Int64(codes.stride[len(codes.stride) - 2])
            codes_at = codes.iterator.toint() + first * pitch + column // 2
            out_at = target + column * self.element
            if cutlass.const_expr(self.config.row_scaled):
                amax_at = amax.iterator.toint() + Int64(first) * 4
            else:
                g = amax[group]
            while j < stop:
                rows = [
                    j + (u + _QUARTER_ROWS * q) for u in range(_UNROLL) for q in range(_QUARTERS)
                ]
                words = [
                    word
                    for u in range(_UNROLL)
                    for word in load_global(scales_at + (j + u) * (_QUARTERS * SF_TILE_COLS), 4)
                ]
                packed = [load_global_if(codes_at + r * pitch, 4, r, count)[0] for r in rows]
                if cutlass.const_expr(self.config.row_scaled):
                    levels = [
                        bits_as_f32(load_global_if(amax_at + r * 4, 4, r, count)[0]) for r in rows
                    ]
                else:
                    levels = [g] * len(rows)
                for i in cutlass.range_constexpr(0, len(rows), 2):
                    operands = [words[i], words[i + 1], selector]
                    pair = asm("prmt.b32 $0, $1, $2, $3;", [Uint32], operands)
                    for s, n in zip(decode_e4m3_pair(pair), (i, i + 1), strict=True):
                        if rows[n] < count:
                            factor = _factor(s, levels[n])
                            numbers = [code * factor for code in decode_e2m1(packed[n])]
                            at = out_at + Int64(rows[n]) * cols * self.element
                            self.store(at, numbers)
                j += _UNROLL

    @cute.jit
    def columns(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        amax: cute.Tensor,
        cols: Int32,
        target: Int64,
        group: Int32,
        tile: Int32,
        count: Int32,
        part: Int32,
    ) -> None:
        """Part ``part`` of a columnwise slot tile, the tile-th of its matrix."""
        lane = cute.arch.lane_idx()
        column = part * _COLUMN_STRIP + lane // 4 * _LANE_COLS
        quarter = lane % 4  # of the tile's rows
        if column < cols:
            pitch = Int64(codes.shape[len(codes.shape) - 1])
            block_tiles = scales.shape[len(scales.shape) - 2]
            matrix = Int64(0)  # of uniform groups, each has its own
            scale_tile = Int64(column // SF_TILE_ROWS) * block_tiles + 2 * tile + quarter // 2
            if cutlass.const_expr(self.config.grouping == "uniform"):
                matrix = Int64(group) * cols * pitch
                column_tiles = scales.shape[len(scales.shape) - 3]
                scale_tile += Int64(group) * column_tiles * block_tiles
            codes_at = codes.iterator.toint() + matrix + column * pitch
            codes_at += tile * (TILE_ROWS // 2) + quarter * 16
            scales_at = scales.iterator.toint() + scale_tile * SF_TILE_BYTES
            scales_at += column % 32 * 16 + column % SF_TILE_ROWS // 32 * 4 + quarter % 2 * 2
            packed = [load_global(codes_at + pitch * c, 4) for c in range(_LANE_COLS)]
            pairs = [
                load_global_if(scales_at + c * 16, 2, column, cols)[0] for c in range(_LANE_COLS)
            ]
            g = amax[group]
            factors = [[_factor(s, g) for s in decode_e4m3_pair(pair)] for pair in pairs]
            row = quarter * _QUARTER_ROWS
            out_at = target + Int64(row) * cols * self.element + column * self.element
            for w in cutlass.range_constexpr(4):  # eight rows each
                if row < count:
                    numbers = [
                        [code * factors[c][w // 2] for code in decode_e2m1(packed[c][w])]
                        for c in range(_LANE_COLS)
                    ]
                    for i in cutlass.range_constexpr(8):
                        if row + i < count:
                            self.store(
                                out_at + Int64(cols) * (i * self.element),
                                [numbers[c][i] for c in range(_LANE_COLS)],
                            )
                row += 8
                out_at += Int64(cols) * (8 * self.element)

    def store(self, address: Int64, numbers: list[Float32]) -> None:
        """Round and store a lane's columns of one row."""
        words = pack_words(numbers, self.dtype)
        for i in range(0, len(words), 4):
            store_global(address + 4 * i, words[i : i + 4])


def _factor(s: Float32, g: Float32) -> Float32:
    """What a code of scale ``s`` under second level ``g`` is multiplied by."""
    return (s * g) * bits_as_f32(Uint32(_RCP_TENSOR_MAX_BITS))
