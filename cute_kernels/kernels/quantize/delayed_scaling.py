"""Update of delayed scaling: the history of each slot rolls by a row, and its next scale follows.

One CTA per slot goes through the slot's column of the history, as many rows at a time as it has
threads. It reads the following rows before it writes. The formula is that of
``reference/delayed_scaling.py``; ``device/codecs/fp8.py`` uses the scale.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import fmax, warp_max
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.ptx import asm

from .pass_config import DelayedConfig

_THREADS = 256
_WARPS = _THREADS // WARP_SIZE
#: The scale that follows from a positive, finite amax, else the previous scale.
_NEXT_SCALE = """{
	.reg .pred is_more, is_finite;
	.reg .f32 s;
	div.rn.f32 s, $2, $1;
	min.f32 s, s, 0f7F7FFFFF;
	setp.gt.f32 is_more, $1, 0f00000000;
	setp.lt.and.f32 is_finite, $1, 0f7F800000, is_more;
	selp.f32 $0, s, $3, is_finite;
}"""
#: The given amax, unless it is 0; then the one in the history.
_LATEST_AMAX = """{
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
    """Kernel that rolls histories and computes scales. See the module's docstring."""

    def __init__(self, config: DelayedConfig):
        self.config = config

    @staticmethod
    def fake_args(config: DelayedConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``DelayedConfig.kernel``."""
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
        """Launch one CTA per slot."""
        self.kernel(history, scale, amax, largest).launch(
            grid=[scale.shape[0], 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, history: cute.Tensor, scale: cute.Tensor, amax: cute.Tensor | None, largest: Float32
    ) -> None:
        """Update one slot.

        Args:
            history: (L, n) fp32, updated in place.
            scale: (n,) fp32, updated in place.
            amax: (n,) fp32 amaxes of the present step, or None.
            largest: Number that amaxes are scaled to.
        """
        smem = cutlass.memory.SmemAllocator()
        maxima = smem.allocate_tensor(Float32, cute.make_layout(_WARPS), byte_alignment=16)
        slot, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        latest = history[0, slot]
        if const_expr(amax is not None):
            latest = asm(_LATEST_AMAX, [Float32], [amax[slot], latest])
        if const_expr(self.config.skip_nonfinite):
            latest = asm(_FINITE, [Float32], [latest])
        # All threads have read row 0.
        cute.arch.sync_threads()
        if const_expr(self.config.skip_nonfinite):
            if tid == 0:
                history[0, slot] = latest
        if latest != 0.0:
            absmax = self.roll(history, slot, latest, tid)
            absmax = warp_max(fmax(absmax, Float32(0.0)))
            if tid % WARP_SIZE == 0:
                maxima[tid // WARP_SIZE] = absmax
            cute.arch.sync_threads()
            if tid == 0:
                basis = latest
                if const_expr(self.config.is_max):
                    basis = maxima[0]
                    for w in range_constexpr(1, _WARPS):
                        basis = fmax(basis, maxima[w])
                scale[slot] = asm(_NEXT_SCALE, [Float32], [basis, largest, scale[slot]])

    @cute.jit
    def roll(self, history: cute.Tensor, slot: Int32, latest: Float32, tid: Int32) -> Float32:
        """Move a slot's rows up by one, and return the largest number that the thread moved."""
        length = history.shape[0]
        absmax, base = Float32(0.0), Int32(0)
        while base < length:
            row = base + tid
            value = latest
            if row + 1 < length:
                value = history[row + 1, slot]
            if row < length:
                absmax = fmax(absmax, value)
            cute.arch.sync_threads()
            if row == 0:
                value = Float32(0.0)
            if row < length:
                history[row, slot] = value
            cute.arch.sync_threads()
            base += _THREADS
        return absmax
