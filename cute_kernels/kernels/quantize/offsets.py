"""End offsets of groups: the inclusive sum of their sizes, in one launch of one CTA.

Offsets saturate at the limits of their type.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import warp_scan
from cute_kernels.device.launch import DSL_TYPES, compact, env_stream

from .pass_config import OffsetsConfig

_WARPS = 32
_THREADS = WARP_SIZE * _WARPS


class OffsetsKernel:
    """Inclusive scan, ``_THREADS`` groups at a time with a carry."""

    def __init__(self, config: OffsetsConfig):
        self.out = DSL_TYPES[config.out]

    @staticmethod
    def fake_args(config: OffsetsConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``OffsetsConfig.kernel``."""
        groups = cute.sym_int()
        splits, out = (compact(DSL_TYPES[name], groups) for name in (config.splits, config.out))
        return (splits, out, Int64(1), env_stream())

    @cute.jit
    def __call__(
        self, splits: cute.Tensor, out: cute.Tensor, multiplier: Int64, stream: Any
    ) -> None:
        """Launch the kernel on one CTA."""
        # Larger sums times the multiplier do not fit the type.
        limit = Int64(self.out.max) // multiplier
        self.kernel(splits, out, multiplier, limit).launch(
            grid=[1, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, splits: cute.Tensor, out: cute.Tensor, multiplier: Int64, limit: Int64
    ) -> None:
        """Write the offsets.

        Args:
            splits: (G,) int32 or int64 sizes.
            out: (G,) int32 or int64 offsets.
            multiplier: Factor of every offset.
            limit: Largest sum whose product with the multiplier fits the type of ``out``.
        """
        smem = cutlass.memory.SmemAllocator()
        totals = smem.allocate_tensor(Int64, cute.make_layout((_WARPS, 2)), byte_alignment=8)
        tid = cute.arch.thread_idx()[0]
        warp, lane = tid // WARP_SIZE, tid % WARP_SIZE
        count = splits.shape[0]
        carry, buffer, base = Int64(0), Int32(0), Int32(0)
        while base < count:
            value = Int64(0)
            if base + tid < count:
                value = splits[base + tid].to(Int64)
            value = warp_scan(value, lane)
            if lane == WARP_SIZE - 1:
                totals[warp, buffer] = value
            # Two buffers: a warp that is a chunk ahead writes the other one.
            cute.arch.sync_threads()
            warp_totals = warp_scan(totals[lane, buffer], lane)
            if warp > 0:
                value += cute.arch.shuffle_sync(warp_totals, warp - 1)
            value += carry
            carry += cute.arch.shuffle_sync(warp_totals, _WARPS - 1)
            if base + tid < count:
                end = (value * multiplier).to(self.out)
                if value > limit:
                    end = self.out(self.out.max)
                if value < -limit:
                    end = self.out(self.out.min)
                out[base + tid] = end
            buffer ^= 1
            base += _THREADS
