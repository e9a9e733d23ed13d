"""Rows of tokens to rows of experts by an index, and back as weighted sums.

A warp takes a strip of a row at a time. Every lane has its loads under way before it uses any.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, Uint32, cute

from cute_kernels.device.constants import DTYPE_BYTES, WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.launch import DSL_TYPES, GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, store_global, store_global_half
from cute_kernels.device.ptx import add_rn, mul_rn

from .config import CombineConfig, GatherConfig

_WARPS = 8
_THREADS = _WARPS * WARP_SIZE
#: Loads of a lane at a time.
_LOADS = 4


class GatherKernel(GridKernel):
    """``out[r] = x[index[r]]``, zeros where the index is none of x's rows."""

    ctas_per_sm, num_threads = 8, _THREADS

    def __init__(self, config: GatherConfig):
        self.width = config.width
        self.strip = WARP_SIZE * _LOADS * config.width

    @staticmethod
    def fake_args(config: GatherConfig) -> tuple[Any, ...]:
        """Stand-ins for (x, index, out, num_sms, stream)."""
        element, width = (Int16 if config.width == 2 else Int32), config.width
        rows = cute.sym_int()
        cols = cute.sym_int(divisibility=max(1, width // 4))
        x = compact(element, cute.sym_int(), cols, align=width)
        index = compact(Int32, rows, align=4)
        return (x, index, compact(element, rows, cols, align=width), Int32(1), env_stream())

    @cute.kernel
    def kernel(self, x: cute.Tensor, index: cute.Tensor, out: cute.Tensor) -> None:
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
        row_bytes = x.shape[1] * (x.element_type.width // 8)
        strips = (row_bytes + self.strip - 1) // self.strip
        items = Int64(out.shape[0]) * strips
        item, step = Int64(warp), cute.arch.grid_dim()[0] * _WARPS
        while item < items:
            r = Int32(item // strips)
            at = Int32(item - Int64(r) * strips) * self.strip + lane * self.width
            source = index[r]
            end = row_bytes
            if source < 0 or source >= x.shape[0]:
                source, end = Int32(0), Int32(0)
            self.store(out, r, at, self.load(x, source, at, end))
            item += step

    def load(self, x: cute.Tensor, row: Int32, at: Int32, end: Int32) -> list[list[Uint32]]:
        """A lane's part of a strip of a row from byte ``at`` on; zeros from ``end`` on."""
        from_ = x.iterator.toint() + Int64(row) * (x.shape[1] * (x.element_type.width // 8))
        ats = [at + i * (WARP_SIZE * self.width) for i in range(_LOADS)]
        return [load_global_if(from_ + a, self.width, a, end) for a in ats]

    @cute.jit
    def store(self, out: cute.Tensor, row: Int32, at: Int32, strip: list[list[Uint32]]) -> None:
        """Write that to a row of the output."""
        row_bytes = out.shape[1] * (out.element_type.width // 8)
        to = out.iterator.toint() + Int64(row) * row_bytes + at
        for i in cutlass.range_constexpr(_LOADS):
            after = i * (WARP_SIZE * self.width)
            if at + after < row_bytes:
                if cutlass.const_expr(self.width == 2):
                    store_global_half(to + after, strip[i][0])
                else:
                    store_global(to + after, strip[i])


class SpreadKernel(GatherKernel):
    """The same token by token: ``out[row[t, k]] = x[t]``, where the index names a row of x."""

    @classmethod
    def fake_args(cls, config: GatherConfig) -> tuple[Any, ...]:
        """Stand-ins for (x, index, row, out, num_sms, stream)."""
        x, index, *rest = super().fake_args(config)
        return (x, index, compact(Int32, x.shape[0], cute.sym_int(), align=4), *rest)

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, index: cute.Tensor, row: cute.Tensor, out: cute.Tensor
    ) -> None:
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp, step = (
            cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE,
            cute.arch.grid_dim()[0] * _WARPS,
        )
        row_bytes = x.shape[1] * (x.element_type.width // 8)
        strips = (row_bytes + self.strip - 1) // self.strip
        items, item, top_k = Int64(x.shape[0]) * strips, Int64(warp), row.shape[1]
        while item < items:
            t = Int32(item // strips)
            at = Int32(item - Int64(t) * strips) * self.strip + lane * self.width
            strip, k = self.load(x, t, at, row_bytes), Int32(0)
            while k < top_k:
                # All before the first store, which could be to them as far as a compiler knows.
                rows = []
                for i in cutlass.range_constexpr(_LOADS):
                    r = Int32(-1)
                    if k + i < top_k:
                        r = row[t, k + i]
                    rows.append(r)
                for i in cutlass.range_constexpr(_LOADS):
                    if rows[i] >= 0 and rows[i] < out.shape[0]:
                        self.store(out, rows[i], at, strip)
                k += _LOADS
            item += step
        # Rows of no token: which of 32 they are.
        first, zeros = Int32(warp) * WARP_SIZE, [[Uint32(0)] * max(1, self.width // 4)] * _LOADS
        while first < out.shape[0]:
            is_none = False
            if first + lane < out.shape[0]:
                token = index[first + lane]
                is_none = token < 0 or token >= x.shape[0]
            left = Uint32(cute.arch.vote_ballot_sync(is_none))
            while left != 0:
                r = first + (31 - cute.arch.clz(left & (~left + 1)))
                for at in cutlass.range(lane * self.width, row_bytes, self.strip, unroll=1):
                    self.store(out, r, at, zeros)
                left = left & (left - 1)
            first += step * WARP_SIZE


class CombineKernel(GridKernel):
    """``y[t] = sum over k of weight[t, k] * h[row[t, k]]``, in fp32 and in the order of k."""

    ctas_per_sm, num_threads = 8, _THREADS

    def __init__(self, config: CombineConfig):
        self.config = config
        self.width = 16 // DTYPE_BYTES[config.dtype] if config.vectorized else 1

    @staticmethod
    def fake_args(config: CombineConfig) -> tuple[Any, ...]:
        """Stand-ins for (h, row, weight, y, num_sms, stream)."""
        tokens, top_k = cute.sym_int(), cute.sym_int()
        width = 16 // DTYPE_BYTES[config.dtype] if config.vectorized else 1
        cols = cute.sym_int(divisibility=width)
        sizes = [width * DTYPE_BYTES[dtype] for dtype in (config.dtype, config.out)]
        weight = compact(Float32, tokens, top_k, align=4) if config.weighted else None
        return (
            compact(DSL_TYPES[config.dtype], cute.sym_int(), cols, align=sizes[0]),
            compact(Int32, tokens, top_k, align=4),
            weight,
            compact(DSL_TYPES[config.out], tokens, cols, align=min(sizes[1], 32)),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self, h: cute.Tensor, row: cute.Tensor, weight: cute.Tensor | None, y: cute.Tensor
    ) -> None:
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
        cols, top_k = h.shape[1], row.shape[1]
        strip = WARP_SIZE * self.width
        strips = (cols + strip - 1) // strip
        items = Int64(y.shape[0]) * strips
        item, step = Int64(warp), cute.arch.grid_dim()[0] * _WARPS
        while item < items:
            t = Int32(item // strips)
            column = Int32(item - Int64(t) * strips) * strip + lane * self.width
            sums = cute.make_rmem_tensor(self.width, Float32)
            sums.fill(0.0)
            k = Int32(0)
            while k < top_k:
                self.add(h, row, weight, sums, t, k, column)
                k += _LOADS
            if column < cols:
                self.store(y, sums, t, column)
            item += step

    @cute.jit
    def add(
        self,
        h: cute.Tensor,
        row: cute.Tensor,
        weight: cute.Tensor | None,
        sums: cute.Tensor,
        t: Int32,
        k: Int32,
        column: Int32,
    ) -> None:
        """Add the rows of some of a token's experts; those that are not there add zeros."""
        cols, num_bytes = h.shape[1], self.width * DTYPE_BYTES[self.config.dtype]
        loaded, weights = [], []
        for i in cutlass.range_constexpr(_LOADS):
            source, end, w = Int32(0), Int32(0), Float32(0.0)
            if k + i < row.shape[1]:
                source = row[t, k + i]
                end = cols
                if source < 0 or source >= h.shape[0]:
                    source, end = Int32(0), Int32(0)
                if cutlass.const_expr(self.config.weighted):
                    if end > 0:
                        w = weight[t, k + i]
            place = Int64(source) * cols + column
            address = h.iterator.toint() + place * DTYPE_BYTES[self.config.dtype]
            loaded.append(load_global_if(address, num_bytes, column, end))
            weights.append(w)
        for i in cutlass.range_constexpr(_LOADS):
            numbers = unpack_words(loaded[i], self.config.dtype)
            for c in cutlass.range_constexpr(self.width):
                number = numbers[c]
                if cutlass.const_expr(self.config.weighted):
                    number = mul_rn(number, weights[i])
                sums[c] = add_rn(sums[c], number)

    @cute.jit
    def store(self, y: cute.Tensor, sums: cute.Tensor, t: Int32, column: Int32) -> None:
        if cutlass.const_expr(self.width == 1):
            y[t, column] = sums[0].to(y.element_type)
        else:
            words = pack_words([sums[c] for c in range(self.width)], self.config.out)
            size = DTYPE_BYTES[self.config.out]
            address = y.iterator.toint() + (Int64(t) * y.shape[1] + column) * size
            for i in cutlass.range_constexpr(0, len(words), 4):
                store_global(address + 4 * i, words[i : i + 4])
