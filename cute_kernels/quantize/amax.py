"""max |x| of rows and groups, from one read of the rows that exist.

Every warp takes a run of consecutive rows, so a group's amax costs a warp one atomic maximum per
group that its run touches. The maximum of non-negative numbers is that of their bits, and it does
not depend on the order, so the result is deterministic.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.groups import Grouping
from cute_kernels.device.memory import load_global
from cute_kernels.device.nvfp4 import absmax_packed, fmax, unpack_absmax, warp_max
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.quantize.config import DTYPE_BYTES, AmaxConfig
from cute_kernels.quantize.fakes import FakeBuffers, env_stream

__all__ = ["AmaxKernels", "AmaxReducer"]

_WARP = 32
_LOAD_BYTES = 32
_UNROLL = 4
_THREADS = 512
_CTAS_PER_SM = 2


class AmaxKernels:
    """The amax kernels, for the classes that launch them.

    The runtime names kernels after the variant that launches them, so kernels that several entries
    share are methods that they inherit.
    """

    dtype: str

    @cute.jit
    def launch_amax(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Write the amaxes whose buffers are given."""
        grid, block = [num_sms * _CTAS_PER_SM, 1, 1], [_THREADS, 1, 1]
        if cutlass.const_expr(group_amax is not None):
            self.clear(group_amax).launch(grid=[num_sms, 1, 1], block=block, stream=stream)
        self.reduce(x, offs, row_amax, group_amax).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def clear(self, group_amax: cute.Tensor) -> None:
        tid = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * _THREADS
        step = cute.arch.grid_dim()[0] * _THREADS
        for g in cutlass.range(tid, group_amax.shape[0], step, unroll=1):
            group_amax[g] = Float32(0.0)

    @cute.kernel
    def reduce(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
    ) -> None:
        cols = x.shape[len(x.shape) - 1]
        groups = Grouping.of(x, offs)
        lane = cute.arch.lane_idx()
        warps = cute.arch.grid_dim()[0] * (_THREADS // _WARP)
        warp = cute.arch.block_idx()[0] * (_THREADS // _WARP) + cute.arch.warp_idx()
        last = groups.last_row()
        run = (last + warps - 1) // warps
        row = cutlass.min(warp * run, last)
        stop = cutlass.min(row + run, last)
        row_bytes = cols * DTYPE_BYTES[self.dtype]
        group, group_stop, best = Int32(0), Int32(0), Float32(0.0)
        while row < stop:
            if cutlass.const_expr(group_amax is not None):
                if row >= group_stop:
                    self.merge(group_amax, group, best)
                    group, group_stop = groups.holding(row, group)
                    best = Float32(0.0)
            a = self.row_part(x.iterator.toint() + Int64(row) * row_bytes, row_bytes, lane)
            best = fmax(best, a)
            if cutlass.const_expr(row_amax is not None):
                a = warp_max(a)
                if lane == 0:
                    row_amax[row] = a
            row += 1
        if cutlass.const_expr(group_amax is not None):
            self.merge(group_amax, group, best)

    @cute.jit
    def row_part(self, source: Int64, row_bytes: Int32, lane: Int32) -> Float32:
        """Absmax of a lane's share of a row."""
        packed = Uint32(0)
        at = lane * _LOAD_BYTES
        while at + (_UNROLL - 1) * _WARP * _LOAD_BYTES < row_bytes:
            words = [packed]
            for i in cutlass.range_constexpr(_UNROLL):
                words.extend(load_global(source + (at + i * (_WARP * _LOAD_BYTES)), 8))
            packed = absmax_packed(words, self.dtype)
            at += _UNROLL * _WARP * _LOAD_BYTES
        while at < row_bytes:
            packed = absmax_packed([packed, *load_global(source + at, 8)], self.dtype)
            at += _WARP * _LOAD_BYTES
        return unpack_absmax(packed, self.dtype)

    @cute.jit
    def merge(self, group_amax: cute.Tensor, group: Int32, best: Float32) -> None:
        """Fold a warp's maximum into its group's."""
        best = warp_max(best)
        if best > 0.0:
            if cute.arch.lane_idx() == 0:
                bits = cute.recast_ptr(group_amax.iterator + group, dtype=Uint32)
                cute.arch.atomic_max(bits, f32_as_bits(best), sem="relaxed", scope="gpu")


class AmaxReducer(AmaxKernels):
    """Row and group amax, see the module."""

    def __init__(self, config: AmaxConfig):
        self.dtype = config.dtype

    @staticmethod
    def fake_args(config: AmaxConfig) -> tuple[Any, ...]:
        """Stand-ins for the arguments of ``__call__``."""
        fake = FakeBuffers(config.dtype, config.grouping == "uniform")
        return (
            fake.x(),
            fake.offs(),
            fake.amax(per_row=True) if config.per_row else None,
            fake.amax() if config.per_group else None,
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        self.launch_amax(x, offs, row_amax, group_amax, num_sms, stream)
