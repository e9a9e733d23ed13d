"""The rowwise copy as what the GEMM of sm_90a multiplies: fp16 values, not codes and scales.

The numbers are those that the GEMM's expansion makes of the codes, in its order, without codes
being written and read again. The same rows are read in the same way as by the quantizer.
"""

from typing import Any

from cutlass import Boolean, Int32, Int64, Uint32, cute, range_constexpr

from cute_kernels.device.codecs.base import Level
from cute_kernels.device.codecs.e2m1_fp16 import fp16_values, scales_as_fp16
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import transpose_four
from cute_kernels.device.ptx import select
from cute_kernels.layout.shapes import PIECE_K

from .config import ValuesConfig
from .fakes import FakeBuffers
from .row_quantizer import Lane, RowsQuantizer


class RowValuesQuantizer(RowsQuantizer):
    """Persistent quantizer to values, see the module."""

    def __init__(self, config: ValuesConfig):
        super().__init__(config)
        self.writes_scales = False
        self.piece_blocks = PIECE_K // self.codec.block

    @staticmethod
    def fake_args(config: ValuesConfig) -> tuple[Any, ...]:
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        inputs = (
            fake.x(config.prologue),
            fake.index(config.prologue),
            fake.offs(),
            fake.level(config.computes_amax),
        )
        return (*inputs, fake.values(), *(None,) * 3, Int32(1), env_stream())

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        level: Level,
        target: Int64,
        live: Boolean,
        scales_at: Int32,
        lane: Lane,
    ) -> None:
        """A lane's blocks as values; eight lanes put those of eight neighbouring blocks in order.

        So all lanes take part, with zeros in the place of blocks past K. Of the blocks 2 j + p of a
        piece lane 2 q + p writes elements q and q + 4 of both words, 16 bytes each.
        """
        twist = self.twist(lane.lane)
        place = lane.lane % 2 * 128 + lane.lane % self.piece_blocks // 2 * 16
        for i in range_constexpr(0, self.pieces_per_lane, 2):
            last = min(i + 1, self.pieces_per_lane - 1)
            scale_bytes, *factors = self.codec.block_scales(a[i], a[last], level)
            scales = scales_as_fp16(scale_bytes.to(Uint32))
            for j in range_constexpr(i, last + 1):
                block = lane.of_row + j * self.lanes_per_row
                pair = self.codec.encode_row(self.block(words, j), factors[j - i])
                first = block // self.piece_blocks * self.piece_blocks
                at = target + first * (PIECE_K // self.piece_blocks * 2) + place
                for w, codes in enumerate(self.untwist(pair, twist)):
                    codes = select(block < lane.num_pieces, codes, Uint32(0))
                    values = transpose_four(fp16_values(codes, scales, j - i), 2)
                    if live and first < lane.num_pieces:
                        self.put(at + w * 64, values, lane)
