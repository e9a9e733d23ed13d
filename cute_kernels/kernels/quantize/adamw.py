"""A step of AdamW on fp32 masters, as ``reference.adamw`` states it, and all copies: teams update
tile they quantize.

Where groups have amaxes, which come before the first code, only these: the quantizer behind it
reads the master again.
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
from .config import DTYPE_BYTES, AdamWConfig, AdamWTileConfig
from .fakes import FakeBuffers
from .tiles.fill import TileFiller
from .tiles.geometry import TileDescriptor
from .tiles.kernel import TileQuantizer

#: Elements of a warp's run: 16 KiB of each fp32 tensor, one atomic maximum.
_RUN = 4096
#: Three CTAs an SM have the registers.
_THREADS, _CTAS = 256, 3


#: What a master is updated by: exp_avg, exp_avg_sq, grad, numbers, beta1, beta2, eps, weight_decay,
#: as of the op.
Update = tuple[Any, ...]
_FIELDS = 8


def _fake(x: Any, gradient: str) -> Update:
    """Stands for tile a fake master ``x`` is updated by."""
    like = [
        compact(DSL_TYPES[dtype], *x.shape, align=32) for dtype in ("float32", "float32", gradient)
    ]
    return (*like, compact(Float32, 5, align=4), *[Float32(0.0)] * 4)


def _rn(name: str, *operands: Float32) -> Float32:
    """An instruction that rounds to nearest even, once."""
    addresses = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return asm(f"{name}.rn.f32 {addresses};", [Float32], operands)  # type: ignore[no-any-return]


class Stepper:
    """Updates units of elements, which take up to eight loads, by gradients of one dtype; see
    ``ElementMaker``.
    """

    unit = words = loads = 8

    def __init__(self, gradient: str):
        self.dtypes = ("float32", "float32", "float32", gradient)

    def cols(self, x: cute.Tensor) -> Int32:
        return x.shape[2]

    def factors(self, by: Update) -> tuple[Any, ...]:
        """What all elements have in common."""
        numbers, beta1, beta2, eps, weight_decay = by[3:]
        lr, power1, power2, scale, found_inf = (numbers[i] for i in range(5))
        one, has_decay = Float32(1.0), weight_decay != 0.0
        step_size, root = (
            _rn("div", lr, _rn("sub", one, power1)),
            _rn("sqrt", _rn("sub", one, power2)),
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
        self, master: cute.Tensor, by: Update, factors: tuple[Any, ...], element: Int64
    ) -> list[Uint32]:
        """Update the unit from ``element`` on in memory; words of its new master."""
        addresses, numbers = [], []
        for tensor, dtype in zip((master, *by[:3]), self.dtypes, strict=True):
            size = DTYPE_BYTES[dtype]
            addresses.append(tensor.iterator.toint() + element * size)
            numbers.append(unpack_words(load_global(addresses[-1], self.unit * size // 4), dtype))
        made = [self.made(factors, *of_one) for of_one in zip(*numbers, strict=True)]
        words = [pack_words(column, "float32") for column in zip(*made, strict=True)]
        for place, column in zip(addresses[:3], words, strict=True):
            store_global(place, column)
        return words[0]

    def made(
        self, factors: tuple[Any, ...], p: Float32, m: Float32, v: Float32, g: Float32
    ) -> list[Float32]:
        beta1, beta2, eps, has_decay, decay, step_size, root, scale, is_skipped = factors
        before = (p, m, v)
        g = _rn("div", g, scale)
        # An infinity times a decay of 0 would be NaN.
        p = select(has_decay, _rn("fma", decay, p, p), p)
        square = _rn("mul", g, g)
        m = _rn("fma", beta1, m, _rn("fma", -beta1, g, g))
        v = _rn("fma", beta2, v, _rn("fma", -beta2, square, square))
        denominator = _rn("add", _rn("div", _rn("sqrt", v), root), eps)
        p = _rn("sub", p, _rn("div", _rn("mul", step_size, m), denominator))
        return [select(is_skipped, old, new) for old, new in zip(before, (p, m, v), strict=True)]


class AdamWKernel(AmaxKernels):
    """A step, and amaxes of groups."""

    dtype, maker = "float32", None

    def __init__(self, config: AdamWConfig):
        self.arch = config.arch
        self.stepper = Stepper(config.gradient)
        self.keeps_nan = config.keeps_nan

    @staticmethod
    def fake_args(config: AdamWConfig) -> tuple[Any, ...]:
        fake = FakeBuffers("float32", "uniform")
        x = fake.x()
        return (x, *_fake(x, config.gradient), fake.global_scale(), Int32(1), env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        master, *by, amax, num_sms, stream = args
        self.launch_clear(amax, num_sms, stream)
        self.kernel(master, tuple(by), amax).launch(
            grid=[_CTAS * num_sms, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, master: cute.Tensor, by: Update, amax: cute.Tensor) -> None:
        warps, size = _THREADS // WARP_SIZE, Int64(master.shape[1]) * master.shape[2]
        runs, factors = Int32((size + (_RUN - 1)) // _RUN), self.stepper.factors(by)
        # From the last to the first, which the quantizer then finds in L2.
        index = master.shape[0] * runs - 1 - cute.arch.block_idx()[0] * warps - cute.arch.warp_idx()
        while index >= 0:
            group, packed = index // runs, Uint32(0)
            first, at_once = Int64(index - group * runs) * _RUN, Stepper.unit
            start, count = group * size + first, Int32(cutlass.min(size - first, Int64(_RUN)))
            for at in cutlass.range(
                cute.arch.lane_idx() * at_once, count, WARP_SIZE * at_once, unroll=1
            ):
                words = self.stepper.step(master, by, factors, start + at)
                packed = absmax_packed([packed, *words], self.dtype, self.arch, self.keeps_nan)
            self.merge(amax, group, unpack_absmax(packed, self.dtype, self.arch, self.keeps_nan))
            index -= cute.arch.grid_dim()[0] * warps


class UpdateFiller(TileFiller):
    """Makes tiles of the new master, and writes it and its moments."""

    @cute.jit
    def make_rows(  # type: ignore[override]
        self,
        x: cute.Tensor,
        by: Update,
        tile: TileDescriptor,
        position: tuple[Int32, ...],
        rounds: Int32,
        table: None,
    ) -> None:
        to, row, col, cols = position
        factors = self.maker.factors(by)
        for n in cutlass.range(rounds, unroll=1):
            own = row + n * self.rows_at_once
            if own < tile.num_rows:
                self.store(
                    to,
                    n,
                    0,
                    self.maker.step(x, by, factors, Int64(tile.first_row + own) * cols + col),
                )


class AdamWTileQuantizer(TileQuantizer):
    """Quantizer by tiles that are updated first."""

    def __init__(self, config: AdamWTileConfig):
        super().__init__(config)
        self.filler = UpdateFiller(Stepper(config.gradient), self.team)

    @staticmethod
    def fake_args(config: AdamWTileConfig) -> tuple[Any, ...]:  # type: ignore[override]
        x, _, *rest = TileQuantizer.fake_args(config)
        return (x, *_fake(x, config.gradient), *rest)

    @cute.jit
    def __call__(self, x: cute.Tensor, *args: Any) -> None:
        TileQuantizer.__call__(self, x, args[:_FIELDS], *args[_FIELDS:])
