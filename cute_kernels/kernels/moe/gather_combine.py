"""Gather of token rows to expert rows, and combination of expert rows to weighted sums per token.

A warp takes a strip of a row at a time. Every lane has its loads in flight before it uses any.
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
#: Loads that a lane has in flight.
_LOADS = 4


class GatherKernel(GridKernel):
    """``out[r] = x[index[r]]``, or zeros if the index is out of range."""

    ctas_per_sm, num_threads = 8, _THREADS

    def __init__(self, config: GatherConfig):
        self.width = config.width
        self.strip = WARP_SIZE * _LOADS * config.width

    @staticmethod
    def fake_args(config: GatherConfig) -> tuple[Any, ...]:
        """Return stand-ins for (x, index, out, num_sms, stream)."""
        element, width = (Int16 if config.width == 2 else Int32), config.width
        rows = cute.sym_int()
        cols = cute.sym_int(divisibility=max(1, width // 4))
        x = compact(element, cute.sym_int(), cols, align=width)
        index = compact(Int32, rows, align=4)
        return (x, index, compact(element, rows, cols, align=width), Int32(1), env_stream())

    @cute.kernel
    def kernel(self, x: cute.Tensor, index: cute.Tensor, out: cute.Tensor) -> None:
        """Copy rows, strip by strip.

        Args:
            x: (T, W) integers.
            index: (R,) int32.
            out: (R, W) integers.
        """
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
        row_bytes = x.shape[1] * (x.element_type.width // 8)
        strips = (row_bytes + self.strip - 1) // self.strip
        items = Int64(out.shape[0]) * strips
        item, step = Int64(warp), cute.arch.grid_dim()[0] * _WARPS
        while item < items:
            r = Int32(item // strips)
            byte = Int32(item - Int64(r) * strips) * self.strip + lane * self.width
            source = index[r]
            end = row_bytes
            if source < 0 or source >= x.shape[0]:
                source, end = Int32(0), Int32(0)
            self.store(out, r, byte, self.load(x, source, byte, end))
            item += step

    def load(self, x: cute.Tensor, row: Int32, byte: Int32, end: Int32) -> list[list[Uint32]]:
        """Load a lane's share of a strip from ``byte`` of a row on; zeros from byte ``end`` on."""
        row_address = x.iterator.toint() + Int64(row) * (x.shape[1] * (x.element_type.width // 8))
        bytes_in_row = [byte + i * (WARP_SIZE * self.width) for i in range(_LOADS)]
        return [
            load_global_if(row_address + offset, self.width, offset, end) for offset in bytes_in_row
        ]

    @cute.jit
    def store(self, out: cute.Tensor, row: Int32, byte: Int32, strip: list[list[Uint32]]) -> None:
        """Store a lane's share of a strip to a row of the output."""
        row_bytes = out.shape[1] * (out.element_type.width // 8)
        target = out.iterator.toint() + Int64(row) * row_bytes + byte
        for i in cutlass.range_constexpr(_LOADS):
            offset = i * (WARP_SIZE * self.width)
            if byte + offset < row_bytes:
                if cutlass.const_expr(self.width == 2):
                    store_global_half(target + offset, strip[i][0])
                else:
                    store_global(target + offset, strip[i])


class ScatterKernel(GatherKernel):
    """``out[row[t, k]] = x[t]``: the same as ``GatherKernel``, token by token."""

    @classmethod
    def fake_args(cls, config: GatherConfig) -> tuple[Any, ...]:
        """Return stand-ins for (x, index, row, out, num_sms, stream)."""
        x, index, *remaining = super().fake_args(config)
        return (x, index, compact(Int32, x.shape[0], cute.sym_int(), align=4), *remaining)

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, index: cute.Tensor, row: cute.Tensor, out: cute.Tensor
    ) -> None:
        """Copy each token to its rows, then write zeros to rows without a token.

        Args:
            x: (T, W) integers.
            index: (R,) int32.
            row: (T, top_k) int32, the inverse of the index.
            out: (R, W) integers.
        """
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
            byte = Int32(item - Int64(t) * strips) * self.strip + lane * self.width
            strip, k = self.load(x, t, byte, row_bytes), Int32(0)
            while k < top_k:
                # Read all rows before the first store, which the compiler must assume to alias.
                rows = []
                for i in cutlass.range_constexpr(_LOADS):
                    r = Int32(-1)
                    if k + i < top_k:
                        r = row[t, k + i]
                    rows.append(r)
                for i in cutlass.range_constexpr(_LOADS):
                    if rows[i] >= 0 and rows[i] < out.shape[0]:
                        self.store(out, rows[i], byte, strip)
                k += _LOADS
            item += step
        # Rows without a token: each bit of a ballot is one of 32 rows.
        first_row, zeros = Int32(warp) * WARP_SIZE, [[Uint32(0)] * max(1, self.width // 4)] * _LOADS
        while first_row < out.shape[0]:
            is_none = False
            if first_row + lane < out.shape[0]:
                token = index[first_row + lane]
                is_none = token < 0 or token >= x.shape[0]
            unused_rows = Uint32(cute.arch.vote_ballot_sync(is_none))
            while unused_rows != 0:
                r = first_row + (31 - cute.arch.clz(unused_rows & (~unused_rows + 1)))
                for byte in cutlass.range(lane * self.width, row_bytes, self.strip, unroll=1):
                    self.store(out, r, byte, zeros)
                unused_rows = unused_rows & (unused_rows - 1)
            first_row += step * WARP_SIZE


class CombineKernel(GridKernel):
    """Weighted sums of the rows of each token.

    ``y[t] = sum over k of weight[t, k] * expert_output[row[t, k]]``, in fp32 and in the order of k.
    """

    ctas_per_sm, num_threads = 8, _THREADS

    def __init__(self, config: CombineConfig):
        self.config = config
        self.width = 16 // DTYPE_BYTES[config.dtype] if config.vectorized else 1

    @staticmethod
    def fake_args(config: CombineConfig) -> tuple[Any, ...]:
        """Return stand-ins for (expert_output, row, weight, y, num_sms, stream)."""
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
        self,
        expert_output: cute.Tensor,
        row: cute.Tensor,
        weight: cute.Tensor | None,
        y: cute.Tensor,
    ) -> None:
        """Compute the sums, strip by strip.

        Args:
            expert_output: (R, H).
            row: (T, top_k) int32; a negative row contributes nothing.
            weight: (T, top_k) fp32, or None.
            y: (T, H) output.
        """
        tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
        cols, top_k = expert_output.shape[1], row.shape[1]
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
                self.add(expert_output, row, weight, sums, t, k, column)
                k += _LOADS
            if column < cols:
                self.store(y, sums, t, column)
            item += step

    @cute.jit
    def add(
        self,
        expert_output: cute.Tensor,
        row: cute.Tensor,
        weight: cute.Tensor | None,
        sums: cute.Tensor,
        t: Int32,
        k: Int32,
        column: Int32,
    ) -> None:
        """Add the rows of ``_LOADS`` of a token's experts; missing rows add zeros."""
        cols, num_bytes = expert_output.shape[1], self.width * DTYPE_BYTES[self.config.dtype]
        loaded, weights = [], []
        for i in cutlass.range_constexpr(_LOADS):
            source, end, row_weight = Int32(0), Int32(0), Float32(0.0)
            if k + i < row.shape[1]:
                source = row[t, k + i]
                end = cols
                if source < 0 or source >= expert_output.shape[0]:
                    source, end = Int32(0), Int32(0)
                if cutlass.const_expr(self.config.weighted):
                    if end > 0:
                        row_weight = weight[t, k + i]
            element = Int64(source) * cols + column
            address = expert_output.iterator.toint() + element * DTYPE_BYTES[self.config.dtype]
            loaded.append(load_global_if(address, num_bytes, column, end))
            weights.append(row_weight)
        for i in cutlass.range_constexpr(_LOADS):
            numbers = unpack_words(loaded[i], self.config.dtype)
            for c in cutlass.range_constexpr(self.width):
                number = numbers[c]
                if cutlass.const_expr(self.config.weighted):
                    number = mul_rn(number, weights[i])
                sums[c] = add_rn(sums[c], number)

    @cute.jit
    def store(self, y: cute.Tensor, sums: cute.Tensor, t: Int32, column: Int32) -> None:
        """Store a lane's sums."""
        if cutlass.const_expr(self.width == 1):
            y[t, column] = sums[0].to(y.element_type)
        else:
            words = pack_words([sums[c] for c in range(self.width)], self.config.out)
            size = DTYPE_BYTES[self.config.out]
            address = y.iterator.toint() + (Int64(t) * y.shape[1] + column) * size
            for i in cutlass.range_constexpr(0, len(words), 4):
                store_global(address + 4 * i, words[i : i + 4])
