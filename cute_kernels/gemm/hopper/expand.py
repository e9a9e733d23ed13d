"""NVFP4 codes and block scales to fp16 values in global memory, for operand N of the GEMM.

A CTA takes eight rows and some columns at a time, a warp one row of them. Two lanes share a block
of 16: one writes the elements with even numbers, the other those with odd ones, see ``decode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.device.groups import Grouping, group_start
from cute_kernels.device.memory import load_global, store_global
from cute_kernels.device.ptx import asm
from cute_kernels.gemm.hopper.decode import high_bytes, scales_as_fp16, times_scale
from cute_kernels.shapes import (
    PITCH_ALIGNMENT,
    SF_TILE_BYTES,
    SF_TILE_COLS,
    SF_TILE_ROWS,
    TILE_ROWS,
)

if TYPE_CHECKING:
    from cute_kernels.gemm.hopper.config import ExpandConfig

__all__ = ["ExpandKernel"]

_WARP = 32
_ROWS = 8
_BLOCK_BYTES = 8
#: Blocks of 16 that a warp takes at once, and how often before it goes on to other rows.
_BLOCKS = _WARP // 2
_UNROLL = 4
_CTAS_PER_SM = 8


class ExpandKernel:
    """The expand pass of one configuration, see the module."""

    def __init__(self, config: ExpandConfig):
        self.config = config

    @staticmethod
    def fake_args(config: ExpandConfig) -> tuple[Any, ...]:
        """Stand-ins for the arguments of ``__call__``."""
        rows, width, pitch = (cute.sym_int(divisibility=d) for d in (1, 8, PITCH_ALIGNMENT))
        wide = cute.sym_int(divisibility=16)
        tiles = (cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
        offs = None
        if config.is_ragged:
            offs = make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),), assumed_align=4)
        codes = make_fake_tensor(Uint8, (rows, width), (pitch, 1), assumed_align=16)
        order = {"stride_order": (1, 0), "assumed_align": 16}
        return (
            codes,
            make_fake_compact_tensor(Uint8, tiles, stride_order=(2, 1, 0), assumed_align=16),
            offs,
            make_fake_compact_tensor(cutlass.Float16, (rows, wide), **order),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            codes: (rows, K / 2) uint8.
            scales: (row tiles, K tiles, 512) uint8.
            offs: (G,) int32 end rows if ragged, else None.
            out: (rows, K) fp16; rows of the tail are not written.
            num_sms: SMs of the device.
            stream: where to launch.
        """
        self.kernel(codes, scales, offs, out).launch(
            grid=[num_sms * _CTAS_PER_SM, 1, 1], block=[_WARP * _ROWS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        offs: cute.Tensor | None,
        out: cute.Tensor,
    ) -> None:
        rows, width = codes.shape
        blocks = width // _BLOCK_BYTES
        chunks = (blocks + (_BLOCKS * _UNROLL - 1)) // (_BLOCKS * _UNROLL)
        last = rows
        if cutlass.const_expr(self.config.is_ragged):
            last = Grouping(offs, offs.shape[0], rows, Int32(0)).last_row()
        items = (last + (_ROWS - 1)) // _ROWS * chunks
        item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(item, items, step, unroll=1):
            row = index // chunks * _ROWS + cute.arch.warp_idx()
            if row < last:
                self.expand(codes, scales, offs, out, row, index % chunks, blocks)

    @cute.jit
    def slot_row(self, offs: cute.Tensor | None, rows: Int32, row: Int32) -> Int32:
        """A row's place among the block scales."""
        slot = row
        if cutlass.const_expr(self.config.is_ragged):
            groups = Grouping(offs, offs.shape[0], rows, Int32(0))
            group, _ = groups.holding(row, Int32(0))
            start = group_start(offs, group, rows)
            slot = (start // TILE_ROWS + group) * TILE_ROWS + (row - start)
        return slot

    @cute.jit
    def expand(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        offs: cute.Tensor | None,
        out: cute.Tensor,
        row: Int32,
        chunk: Int32,
        blocks: Int32,
    ) -> None:
        """Expand a chunk of a row."""
        slot = self.slot_row(offs, codes.shape[0], row)
        lane = cute.arch.lane_idx()
        in_tile = slot % 32 * 16 + slot % SF_TILE_ROWS // 32 * SF_TILE_COLS
        tiles = Int64(slot // SF_TILE_ROWS) * scales.shape[1]
        source = codes.iterator.toint() + Int64(row) * codes.stride[0]
        target = out.iterator.toint() + Int64(row) * (out.shape[1] * 2)
        odd = lane % 2
        for i in cutlass.range_constexpr(_UNROLL):
            block = (chunk * _UNROLL + i) * _BLOCKS + lane // 2
            if block < blocks:
                words = load_global(source + block * _BLOCK_BYTES, 2)
                tile = tiles + block // SF_TILE_COLS
                at = tile * SF_TILE_BYTES + in_tile + block % SF_TILE_COLS
                scale = scales_as_fp16(self.scale_at(scales, at))[0]
                values = []
                for word in words:
                    # This lane's code of each byte as its high nibble.
                    high = high_bytes(word << ((1 - odd) * 4).to(Uint32), True)
                    for selector in ("0x1404", "0x3424"):
                        halves = asm(f"prmt.b32 $0, $1, 0, {selector};", [Uint32], [high])
                        values.append(times_scale(halves, scale, 0))
                store_global(target + (block * 2 + odd) * 16, values)

    @cute.jit
    def scale_at(self, scales: cute.Tensor, offset: Int64) -> Uint32:
        pointer = cute.make_ptr(
            Uint8, scales.iterator.toint() + offset, cute.AddressSpace.gmem, assumed_align=1
        )
        return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Uint32)
