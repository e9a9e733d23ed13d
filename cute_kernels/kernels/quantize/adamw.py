"""AdamW step on fp32 master weights, as ``reference.adamw`` defines it, and quantized copies.

Teams update the elements that they quantize. If groups have amaxes, which must be known before the
first code, the kernel here computes only the step and the amaxes; a quantizer then reads the master
weights again.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.absmax import absmax_packed, unpack_absmax
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.launch import DSL_TYPES, compact, env_stream
from cute_kernels.device.memory import load_global, store_global
from cute_kernels.device.ptx import asm, select

from .amax import AmaxKernels
from .config import DTYPE_BYTES, AdamWTileConfig
from .fakes import FakeBuffers
from .pass_config import AdamWConfig
from .tiles.fill import TileFiller
from .tiles.geometry import TileDescriptor
from .tiles.kernel import TileQuantizer

#: Elements of a warp's run: 16 KiB of each fp32 tensor, and one atomic maximum.
_RUN = 4096
#: Threads of a CTA, and CTAs per SM, for which the registers suffice.
_THREADS, _CTAS = 256, 3


#: Tensors and numbers of an update: exp_avg, exp_avg_sq, grad, numbers, beta1, beta2, eps,
#: weight_decay, as in the op.
Update = tuple[Any, ...]
_FIELDS = 8


def _fake(x: Any, gradient: str) -> Update:
    """Return stand-ins for ``Update``, for a fake master ``x``."""
    tensors = [
        compact(DSL_TYPES[dtype], *x.shape, align=32) for dtype in ("float32", "float32", gradient)
    ]
    return (*tensors, compact(Float32, 5, align=4), *[Float32(0.0)] * 4)


def _rn(name: str, *operands: Float32) -> Float32:
    """Emit an instruction that rounds to nearest even, once."""
    operand_list = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return asm(f"{name}.rn.f32 {operand_list};", [Float32], operands)  # type: ignore[no-any-return]


class Stepper:
    """Update of units of eight elements, which take up to eight loads. See ``ElementMaker``.

    Args:
        gradient: Data type of the gradients.
    """

    unit = words = loads = 8

    def __init__(self, gradient: str):
        self.dtypes = ("float32", "float32", "float32", gradient)

    def cols(self, x: cute.Tensor) -> Int32:
        """Return the columns of the master weights, (G, N, K)."""
        return x.shape[2]

    def factors(self, update: Update) -> tuple[Any, ...]:
        """Return the factors that all elements share."""
        numbers, beta1, beta2, eps, weight_decay = update[3:]
        lr, power1, power2, scale, found_inf = (numbers[i] for i in range(5))
        one_f32, has_decay = Float32(1.0), weight_decay != 0.0
        step_size, root = (
            _rn("div", lr, _rn("sub", one_f32, power1)),
            _rn("sqrt", _rn("sub", one_f32, power2)),
        )
        return (
            beta1,
            beta2,
            eps,
            has_decay,
            -_rn("mul", lr, weight_decay),
            step_size,
            root,
            scale,
            found_inf == 1.0,
        )

    def step(
        self, master: cute.Tensor, update: Update, factors: tuple[Any, ...], element: Int64
    ) -> list[Uint32]:
        """Update the unit that starts at ``element``, in memory.

        Args:
            master: (G, N, K) fp32.
            update: See ``Update``.
            factors: Result of ``factors``.
            element: Index of the first element.

        Returns:
            Words of the updated master weights.
        """
        addresses, numbers = [], []
        for tensor, dtype in zip((master, *update[:3]), self.dtypes, strict=True):
            size = DTYPE_BYTES[dtype]
            addresses.append(tensor.iterator.toint() + element * size)
            numbers.append(unpack_words(load_global(addresses[-1], self.unit * size // 4), dtype))
        updated = [self.updated_element(factors, *inputs) for inputs in zip(*numbers, strict=True)]
        words = [pack_words(values, "float32") for values in zip(*updated, strict=True)]
        for address, values in zip(addresses[:3], words, strict=True):
            store_global(address, values)
        return words[0]

    def updated_element(
        self, factors: tuple[Any, ...], p: Float32, m: Float32, v: Float32, g: Float32
    ) -> list[Float32]:
        """Return the updated master weight and moments of one element."""
        beta1, beta2, eps, has_decay, decay, step_size, root, scale, is_skipped = factors
        previous = (p, m, v)
        g = _rn("div", g, scale)
        # An infinity times a decay of 0 would be NaN.
        p = select(has_decay, _rn("fma", decay, p, p), p)
        square = _rn("mul", g, g)
        m = _rn("fma", beta1, m, _rn("fma", -beta1, g, g))
        v = _rn("fma", beta2, v, _rn("fma", -beta2, square, square))
        denominator = _rn("add", _rn("div", _rn("sqrt", v), root), eps)
        p = _rn("sub", p, _rn("div", _rn("mul", step_size, m), denominator))
        return [select(is_skipped, old, new) for old, new in zip(previous, (p, m, v), strict=True)]


class AdamWKernel(AmaxKernels):
    """An AdamW step, and the amaxes of groups."""

    dtype, maker = "float32", None

    def __init__(self, config: AdamWConfig):
        self.arch = config.arch
        self.stepper = Stepper(config.gradient)
        self.keeps_nan = config.keeps_nan

    @staticmethod
    def fake_args(config: AdamWConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``AdamWConfig.kernel``."""
        fake = FakeBuffers("float32", "uniform")
        x = fake.x()
        return (x, *_fake(x, config.gradient), fake.global_scale(), Int32(1), env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Clear the amaxes, then launch the step."""
        master, *update, amax, num_sms, stream = args
        self.launch_clear(amax, num_sms, stream)
        self.kernel(master, tuple(update), amax).launch(
            grid=[_CTAS * num_sms, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, master: cute.Tensor, update: Update, amax: cute.Tensor) -> None:
        """Update the master weights, run by run.

        Args:
            master: (G, N, K) fp32.
            update: See ``Update``.
            amax: (G,) fp32 output.
        """
        warps, size = _THREADS // WARP_SIZE, Int64(master.shape[1]) * master.shape[2]
        runs, factors = Int32((size + (_RUN - 1)) // _RUN), self.stepper.factors(update)
        # From the last run to the first, whose weights the quantizer then finds in L2.
        index = master.shape[0] * runs - 1 - cute.arch.block_idx()[0] * warps - cute.arch.warp_idx()
        while index >= 0:
            group, packed = index // runs, Uint32(0)
            start_in_group, elements_per_lane = Int64(index - group * runs) * _RUN, Stepper.unit
            start, count = (
                group * size + start_in_group,
                Int32(cutlass.min(size - start_in_group, Int64(_RUN))),
            )
            for offset in cutlass.range(
                cute.arch.lane_idx() * elements_per_lane,
                count,
                WARP_SIZE * elements_per_lane,
                unroll=1,
            ):
                words = self.stepper.step(master, update, factors, start + offset)
                packed = absmax_packed([packed, *words], self.dtype, self.arch, self.keeps_nan)
            self.merge(amax, group, unpack_absmax(packed, self.dtype, self.arch, self.keeps_nan))
            index -= cute.arch.grid_dim()[0] * warps


class UpdateFiller(TileFiller):
    """Loader that fills tiles with updated master weights, and writes the weights and moments."""

    @cute.jit
    def make_rows(  # type: ignore[override]
        self,
        x: cute.Tensor,
        update: Update,
        tile: TileDescriptor,
        position: tuple[Int32, ...],
        rounds: Int32,
        table: None,
    ) -> None:
        """Update a thread's units of all rounds, see ``TileFiller.make_rows``."""
        target, row, col, cols = position
        factors = self.maker.factors(update)
        for n in cutlass.range(rounds, unroll=1):
            lane_row = row + n * self.rows_at_once
            if lane_row < tile.num_rows:
                self.store(
                    target,
                    n,
                    0,
                    self.maker.step(
                        x, update, factors, Int64(tile.first_row + lane_row) * cols + col
                    ),
                )


class AdamWTileQuantizer(TileQuantizer):
    """Tile quantizer whose elements are updated first."""

    def __init__(self, config: AdamWTileConfig):
        super().__init__(config)
        self.filler = UpdateFiller(Stepper(config.gradient), self.team)

    @staticmethod
    def fake_args(config: AdamWTileConfig) -> tuple[Any, ...]:  # type: ignore[override]
        """Return stand-ins for the arguments, see ``AdamWTileConfig.kernel``."""
        x, _, *remaining = TileQuantizer.fake_args(config)
        return (x, *_fake(x, config.gradient), *remaining)

    @cute.jit
    def __call__(self, x: cute.Tensor, *args: Any) -> None:
        """Launch the quantizer, with the tensors of the update for the index."""
        TileQuantizer.__call__(self, x, args[:_FIELDS], *args[_FIELDS:])
