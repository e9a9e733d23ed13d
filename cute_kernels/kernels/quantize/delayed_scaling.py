"""The update of delayed scaling: each slot's history rolls by a row, and its next scale follows.

One CTA a slot goes through the slot's column of the history, as many rows at a time as it has
threads: it reads the rows after them before it writes.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import fmax, warp_max
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.ptx import asm

from .config import DelayedConfig

_THREADS = 256
_WARPS = _THREADS // WARP_SIZE
#: The scale that follows from a basis that is positive and finite, else the one before.
_NEXT_SCALE = """{
	.reg .pred is_more, is_finite;
	.reg .f32 s;
	div.rn.f32 s, $2, $1;
	min.f32 s, s, 0f7F7FFFFF;
	setp.gt.f32 is_more, $1, 0f00000000;
	setp.lt.and.f32 is_finite, $1, 0f7F800000, is_more;
	selp.f32 $0, s, $3, is_finite;
}"""
#: The amax that is given, unless it is 0.
_LAST = """{
	.reg .pred is_zero;
	.reg .f32 a;
	abs.f32 a, $1;
	setp.eq.f32 is_zero, $1, 0f00000000;
	selp.f32 $0, $2, a, is_zero;
}"""
#: The number, or 0 if it is infinite or NaN.
_FINITE = """{
	.reg .pred is_finite;
	.reg .f32 a;
	abs.f32 a, $1;
	setp.lt.f32 is_finite, a, 0f7F800000;
	selp.f32 $0, $1, 0f00000000, is_finite;
}"""


class DelayedKernel:
    """Rolls histories and makes scales, see the module."""

    def __init__(self, config: DelayedConfig):
        self.config = config

    @staticmethod
    def fake_args(config: DelayedConfig) -> tuple[Any, ...]:
        slots = cute.sym_int()
        history = compact(Float32, cute.sym_int(), slots)
        vectors = [compact(Float32, slots, align=4) for _ in range(2)]
        amax = vectors[1] if config.takes_amax else None
        return (history, vectors[0], amax, Float32(1.0), env_stream())

    @cute.jit
    def __call__(
        self,
        history: cute.Tensor,
        scale: cute.Tensor,
        amax: cute.Tensor | None,
        largest: Float32,
        stream: Any,
    ) -> None:
        self.kernel(history, scale, amax, largest).launch(
            grid=[scale.shape[0], 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, history: cute.Tensor, scale: cute.Tensor, amax: cute.Tensor | None, largest: Float32
    ) -> None:
        smem = cutlass.memory.SmemAllocator()
        maxima = smem.allocate_tensor(Float32, cute.make_layout(_WARPS), byte_alignment=16)
        slot, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        last = history[0, slot]
        if const_expr(amax is not None):
            last = asm(_LAST, [Float32], [amax[slot], last])
        if const_expr(self.config.skip_nonfinite):
            last = asm(_FINITE, [Float32], [last])
        # All have read row 0.
        cute.arch.sync_threads()
        if const_expr(self.config.skip_nonfinite):
            if tid == 0:
                history[0, slot] = last
        if last != 0.0:
            best = self.roll(history, slot, last, tid)
            best = warp_max(fmax(best, Float32(0.0)))
            if tid % WARP_SIZE == 0:
                maxima[tid // WARP_SIZE] = best
            cute.arch.sync_threads()
            if tid == 0:
                basis = last
                if const_expr(self.config.is_max):
                    basis = maxima[0]
                    for w in range_constexpr(1, _WARPS):
                        basis = fmax(basis, maxima[w])
                scale[slot] = asm(_NEXT_SCALE, [Float32], [basis, largest, scale[slot]])

    @cute.jit
    def roll(self, history: cute.Tensor, slot: Int32, last: Float32, tid: Int32) -> Float32:
        """Move a slot's rows up by one; gives the largest of those that a thread has moved."""
        length = history.shape[0]
        best, base = Float32(0.0), Int32(0)
        while base < length:
            row = base + tid
            value = last
            if row + 1 < length:
                value = history[row + 1, slot]
            if row < length:
                best = fmax(best, value)
            cute.arch.sync_threads()
            if row == 0:
                value = Float32(0.0)
            if row < length:
                history[row, slot] = value
            cute.arch.sync_threads()
            base += _THREADS
        return best
