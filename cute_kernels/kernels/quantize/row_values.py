"""Quantizer of rows to the fp16 values that the GEMM of sm_90a multiplies, instead of codes.

The values, and their order, are those that the GEMM's expansion would compute from the codes and
scales. This saves writing and reading the codes. Rows are read as in ``row_quantizer``.
"""

from typing import Any

from cutlass import Boolean, Int32, Int64, Uint32, cute, range_constexpr

from cute_kernels.device.codecs.base import GlobalScaleRegisters
from cute_kernels.device.codecs.e2m1_fp16 import fp16_values, scales_as_fp16
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import transpose_four
from cute_kernels.device.ptx import select
from cute_kernels.layout.shapes import DECODED_CHUNK_K

from .config import ValuesConfig
from .fakes import FakeBuffers
from .row_quantizer import RowsQuantizer
from .row_team import Lane


class RowValuesQuantizer(RowsQuantizer):
    """Persistent kernel that quantizes rows to values. See the module's docstring."""

    def __init__(self, config: ValuesConfig):
        super().__init__(config)
        self.writes_scales = False
        self.piece_blocks = DECODED_CHUNK_K // self.codec.block

    @staticmethod
    def fake_args(config: ValuesConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``ValuesConfig.kernel``."""
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        inputs = (
            fake.x(config.prologue),
            fake.index(config.prologue),
            fake.offs(),
            fake.global_scale(config.computes_amax),
        )
        return (*inputs, fake.values(), *(None,) * 3, Int32(1), env_stream())

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        amaxes: cute.Tensor,
        global_scale: GlobalScaleRegisters,
        target: Int64,
        live: Boolean,
        scales_address: Int32,
        lane: Lane,
    ) -> None:
        """Write a lane's blocks as values. Eight lanes reorder eight neighbouring blocks.

        All lanes take part, with zeros for blocks past K. The blocks of ``DECODED_CHUNK_K``
        elements are numbered 2 j + p. Lane 2 q + p writes their elements q and q + 4 of both words,
        16 bytes each.
        """
        swizzle_xor = self.swizzle_xor(lane.lane)
        lane_offset = lane.lane % 2 * 128 + lane.lane % self.piece_blocks // 2 * 16
        for i in range_constexpr(0, self.chunks_per_lane, 2):
            last_chunk = min(i + 1, self.chunks_per_lane - 1)
            scale_bytes, *factors = self.codec.block_scales(
                amaxes[i], amaxes[last_chunk], global_scale
            )
            scales = scales_as_fp16(scale_bytes.to(Uint32))
            for j in range_constexpr(i, last_chunk + 1):
                block = lane.lane_in_row + j * self.lanes_per_row
                pair = self.codec.encode_row(self.block(words, j), factors[j - i])
                first_block = block // self.piece_blocks * self.piece_blocks
                address = (
                    target + first_block * (DECODED_CHUNK_K // self.piece_blocks * 2) + lane_offset
                )
                for w, codes in enumerate(self.unswizzle(pair, swizzle_xor)):
                    codes = select(block < lane.num_chunks, codes, Uint32(0))
                    values = transpose_four(fp16_values(codes, scales, j - i), 2)
                    if live and first_block < lane.num_chunks:
                        self.put(address + w * 64, values, lane)
