"""Row-scaled NVFP4 as what the GEMM of sm_90a multiplies: fp16 values instead of codes and scales.

The numbers are those that ``gemm.hopper.expand`` makes of the codes, in its order, without codes
being written and read again. The same rows are read in the same way as by the quantizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.decode import fp16_values, scales_as_fp16
from cute_kernels.device.encode import encode_row_block
from cute_kernels.device.memory import store_global, transpose_four
from cute_kernels.device.nvfp4 import scale_pair, second_level
from cute_kernels.device.ptx import select
from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import PIECE_K
from cute_kernels.quantize.fakes import FakeBuffers, env_stream
from cute_kernels.quantize.nvfp4_rows import RowScaledQuantizer

if TYPE_CHECKING:
    from cute_kernels.quantize.config import RowScaledConfig

__all__ = ["RowValuesQuantizer"]

_PIECE_BLOCKS = PIECE_K // NVFP4.sf_vec_size


class RowValuesQuantizer(RowScaledQuantizer):
    """Persistent quantizer to values, see the module."""

    @staticmethod
    def fake_args(config: RowScaledConfig) -> tuple[Any, ...]:
        """Stand-ins for (x, offs, amax, values, None, num_sms, stream)."""
        fake = FakeBuffers(config.dtype, uniform=False)
        amax = fake.amax(per_row=not config.group_amax)
        return (fake.x(), fake.offs(), amax, fake.values(), None, Int32(1), env_stream())

    def clear_scale_padding(self, staged: Int32, num_blocks: Int32, lane: Int32) -> None:
        """There are no scales."""

    def clear_row_scales(self, scales_at: Int32, lane_of_row: Int32, num_blocks: Int32) -> None:
        """There are no scales."""

    def write_scales(
        self, scales: None, item: Int32, staged: Int32 | None, lane: Int32, num_blocks: Int32
    ) -> None:
        """There are no scales."""

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        g: Float32,
        target: Int64,
        live: Boolean,
        scales_at: Int32,
        lane: Int32,
        num_blocks: Int32,
    ) -> None:
        """A lane's blocks as values; eight lanes put those of eight neighbouring blocks in order.

        So all lanes take part, with zeros in the place of blocks past K. Of the blocks 2 j + p of a
        piece lane 2 q + p writes elements q and q + 4 of both words, 16 bytes each.
        """
        s_dec, mult = second_level(g)
        twist = self.twist(lane)
        lane_of_row = lane % self.lanes_per_row
        place = lane % 2 * 128 + lane % _PIECE_BLOCKS // 2 * 16
        for i in cutlass.range_constexpr(0, self.blocks_per_lane, 2):
            last = min(i + 1, self.blocks_per_lane - 1)
            scale_bytes, *factors = scale_pair(a[i], a[last], s_dec, mult)
            scales = scales_as_fp16(scale_bytes.to(Uint32))
            for j in cutlass.range_constexpr(i, last + 1):
                block = lane_of_row + j * self.lanes_per_row
                base = j * self.block_words
                inputs = [words[base + w] for w in range(self.block_words)]
                pair = encode_row_block(inputs, factors[j - i], self.dtype, self.arch)
                first = block // _PIECE_BLOCKS * _PIECE_BLOCKS
                at = target + first * (PIECE_K // _PIECE_BLOCKS * 2) + place
                for w, codes in enumerate(self.untwist(pair, twist)):
                    codes = select(block < num_blocks, codes, Uint32(0))
                    values = transpose_four(fp16_values(codes, scales, j - i), 2)
                    if live and first < num_blocks:
                        store_global(at + w * 64, values)
