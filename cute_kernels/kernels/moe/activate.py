"""Activation of the rows of experts, and its gradient with that of the rows' routing weights.

A warp takes a row. A lane takes eight neighbouring columns of every 256. The sum that gives the
gradient of a row's weight stays in its warp; ``cute_kernels.reference.moe`` defines its order.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr

from cute_kernels.device.activation_curves import activated, weighted_gradient
from cute_kernels.device.constants import DTYPE_BYTES, WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.groups import group_end
from cute_kernels.device.launch import DSL_TYPES, GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, store_global, store_global_half
from cute_kernels.device.ptx import add_rn, f32_as_bits
from cute_kernels.formats.activations import parse_activation

from .config import ActivateConfig

_WARPS = 8
#: Columns of the result that a lane takes at a time.
_RUN = 8


class ActivateKernel(GridKernel):
    """Kernel that applies an activation to rows. See the module's docstring."""

    ctas_per_sm, num_threads = 8, _WARPS * WARP_SIZE

    def __init__(self, config: ActivateConfig):
        self.config = config
        self.act = parse_activation(config.activation)
        self.size = DTYPE_BYTES[config.dtype]

    @staticmethod
    def fake_args(config: ActivateConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``ActivateConfig.kernel``."""
        rows, pairs = cute.sym_int(), cute.sym_int()
        multiple = _RUN if config.vectorized else 1
        narrow = cute.sym_int(divisibility=multiple)
        wide = narrow
        if parse_activation(config.activation).is_gated:
            wide = cute.sym_int(divisibility=2 * multiple)

        def matrix(cols: Any) -> Any:
            align = min(16, multiple * DTYPE_BYTES[config.dtype])
            return compact(DSL_TYPES[config.dtype], rows, cols, align=align)

        weighted = config.weighted
        return (
            matrix(wide),
            matrix(narrow) if config.gradient else None,
            compact(Int32, cute.sym_int(), align=4) if config.ragged else None,
            compact(Float32, pairs, align=4) if weighted else None,
            compact(Int32, rows, align=4) if weighted else None,
            matrix(wide if config.gradient else narrow),
            matrix(narrow) if weighted else None,
            compact(Float32, pairs, align=4) if weighted else None,
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        grad: cute.Tensor | None,
        offs: cute.Tensor | None,
        weight: cute.Tensor | None,
        pair: cute.Tensor | None,
        out: cute.Tensor,
        scaled: cute.Tensor | None,
        dweight: cute.Tensor | None,
    ) -> None:
        """Compute the activation or its gradient, row by row.

        Args:
            x: (R, W). Input; W is 2 N if the activation is gated.
            grad: (R, N). Gradient of the weighted activation. Optional.
            offs: (E,) int32. End rows. Optional.
            weight: (T * top_k,) fp32. Routing weights. Optional.
            pair: (R,) int32. Index of each row's weight. Optional.
            out: (R, N). Activation, or (R, W) gradient of x.
            scaled: (R, N). Weighted activation. Optional.
            dweight: (T * top_k,) fp32. Gradient of the weights. Optional.
        """
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * _WARPS + cute.arch.thread_idx()[0] // WARP_SIZE
        rows, step = x.shape[0], cute.arch.grid_dim()[0] * _WARPS
        if const_expr(offs is not None):
            rows = group_end(offs, offs.shape[0] - 1, rows)
        cols = x.shape[1]
        if const_expr(self.act.is_gated):
            cols = cols // 2
        while row < rows:
            p, pair_index, total = Float32(1.0), Int32(-1), Float32(0.0)
            if const_expr(weight is not None):
                p = Float32(0.0)
                pair_index = pair[row]
                if pair_index >= 0 and pair_index < weight.shape[0]:
                    p = weight[pair_index]
            column = lane * _RUN
            # All lanes take the same number of iterations, because of the shuffles.
            for _ in cutlass.range((cols + WARP_SIZE * _RUN - 1) // (WARP_SIZE * _RUN), unroll=1):
                inputs = self.inputs(x, row, column, cols)
                if const_expr(not self.config.gradient):
                    numbers = activated(self.act, False, self.config.arch, inputs)[0]
                    self.store(out, row, column, numbers, column, cols)
                else:
                    g = self.load(grad, row, column, _RUN, column, cols)
                    if const_expr(weight is None):
                        gradients = activated(self.act, True, self.config.arch, [*inputs, g])
                    else:
                        gradients, weighted_activation, half_sum = weighted_gradient(
                            self.act, self.config, inputs, g, p
                        )
                        self.store(scaled, row, column, weighted_activation, column, cols)
                        # Half a warp has the sum of a tile.
                        second_half = cute.arch.shuffle_sync_bfly(half_sum, WARP_SIZE // 2)
                        total = add_rn(add_rn(total, half_sum), second_half)
                    self.store_gradient(out, row, column, gradients, cols)
                column += WARP_SIZE * _RUN
            if const_expr(weight is not None):
                if lane == 0:
                    if pair_index >= 0 and pair_index < weight.shape[0]:
                        dweight[pair_index] = total
            row += step

    def inputs(self, x: cute.Tensor, row: Int32, column: Int32, cols: Int32) -> list[list[Float32]]:
        """Load eight columns of x, or of both of its halves."""
        if not self.act.is_gated:
            return [self.load(x, row, column, _RUN, column, cols)]
        if self.config.interleaved:
            pairs = self.load(x, row, 2 * column, 2 * _RUN, 2 * column, 2 * cols)
            return [pairs[::2], pairs[1::2]]
        return [self.load(x, row, start + column, _RUN, column, cols) for start in (0, cols)]

    def store_gradient(
        self,
        out: cute.Tensor,
        row: Int32,
        column: Int32,
        gradients: list[list[Float32]],
        cols: Int32,
    ) -> None:
        """Store eight columns of the gradient of x, or of both of its halves."""
        if not self.act.is_gated:
            self.store(out, row, column, gradients[0], column, cols)
        elif self.config.interleaved:
            pairs = [number for pair in zip(*gradients, strict=True) for number in pair]
            self.store(out, row, 2 * column, pairs, 2 * column, 2 * cols)
        else:
            for start, numbers in zip((0, cols), gradients, strict=True):
                self.store(out, row, start + column, numbers, column, cols)

    def load(
        self, x: cute.Tensor, row: Int32, column: Int32, count: int, index: Int32, end: Int32
    ) -> list[Float32]:
        """Load ``count`` numbers of a row from ``column`` on.

        Number i is zero unless ``index + i < end``.
        """
        start = x.iterator.toint() + (Int64(row) * x.shape[1] + column) * self.size
        step = 16 // self.size if self.config.vectorized else 1
        numbers: list[Float32] = []
        for i in range(0, count, step):
            words = load_global_if(start + i * self.size, step * self.size, index + i, end)
            numbers.extend(unpack_words(words, self.config.dtype)[:step])
        return numbers

    @cute.jit
    def store(
        self,
        x: cute.Tensor,
        row: Int32,
        column: Int32,
        numbers: list[Float32],
        index: Int32,
        end: Int32,
    ) -> None:
        """Store the numbers of a row for which ``index + i < end``."""
        start = x.iterator.toint() + (Int64(row) * x.shape[1] + column) * self.size
        if const_expr(self.config.vectorized):
            if index < end:
                words = pack_words(numbers, self.config.dtype)
                for i in range_constexpr(0, len(words), 4):
                    store_global(start + 4 * i, words[i : i + 4])
        else:
            for i in range_constexpr(len(numbers)):
                if index + i < end:
                    if const_expr(self.size == 2):
                        word = pack_words([numbers[i], numbers[i]], self.config.dtype)[0]
                        store_global_half(start + i * self.size, word)
                    else:
                        store_global(start + i * self.size, [f32_as_bits(numbers[i])])
