"""``tensor_core_gemm`` against rational arithmetic, an H200's answers (sm_90a) and the emulator."""

import dataclasses
import hashlib
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ptx_emulator as emulator
from cute_kernels.reference import tensor_core
from cute_kernels.reference.tensor_core import tensor_core_gemm
from tests.helpers import BF16, E4M3, E5M2, F16, F32, U8, assert_same_bytes, e2m1_values

E2M1 = U8
E8M0 = torch.float8_e8m0fnu
NAN = {F32: 0x7FFFFFFF, F16: 0x7FFF}


@dataclasses.dataclass(frozen=True)
class Kind:
    """An MMA instruction: operand types, K, and the precision of its sums."""

    arch: str
    a: torch.dtype
    b: torch.dtype
    acc: torch.dtype
    k: int
    fraction_bits: int
    accumulator_bits: int = 23
    scale: torch.dtype | None = None
    block: int = 0

    def __str__(self):
        return "-".join(
            [
                self.arch,
                *[
                    str(d).removeprefix("torch.")
                    for d in (self.a, self.b, self.acc, self.scale)
                    if d
                ],
            ]
        )


PLAIN = [(F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32), (F32, F32, F32)]
FP8 = [(E4M3, E4M3, F32), (E5M2, E4M3, F32), (E5M2, E5M2, F32), (E4M3, E4M3, F16)]
KINDS = [
    *(Kind(arch, *t, 32 // t[0].itemsize, 25) for arch in ("sm_90a", "sm_100a") for t in PLAIN),
    *(Kind("sm_90a", *t, 32, 13, accumulator_bits=13) for t in FP8),
    *(Kind("sm_100a", *t, 32, 25) for t in FP8),
    *(Kind("sm_100a", *t, 32, 25, scale=E8M0, block=32) for t in FP8[:3]),
    Kind("sm_100a", E2M1, E2M1, F32, 64, 35, scale=E8M0, block=32),
    Kind("sm_100a", E2M1, E2M1, F32, 64, 35, scale=E4M3, block=16),
]
SORTS = ("near", "wide", "tiny", "underflow", "cancelling", "zeros", "zero_times_huge", "special")
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
every_sort = pytest.mark.parametrize("sort", SORTS)

#: Mantissa bits and exponent bias.
LAYOUT = {F16: (10, 15), BF16: (7, 127), F32: (23, 127), E4M3: (3, 7), E5M2: (2, 15), E2M1: (1, 1)}


def width(dtype):
    return 4 if dtype == E2M1 else 8 * dtype.itemsize


def random_bits(dtype, rows, cols, sort):
    """Return bit patterns of one sort, int64; they are finite unless the sort is "special"."""
    mantissa_bits, bias = LAYOUT[dtype]
    sign = 1 << width(dtype) - 1
    top = (sign >> mantissa_bits) - 1  # the exponent of Inf and NaN
    shape = (rows, cols)
    low, high = {
        "wide": (0, top),
        "tiny": (0, 3),
        "underflow": (max(0, bias - 77), max(1, bias - 72)),
    }.get(sort, (max(0, bias - 3), bias + 3))
    bits = torch.randint(low, high, shape) << mantissa_bits
    bits |= torch.randint(0, 1 << mantissa_bits, shape)
    if sort == "zeros":
        bits[torch.rand(shape) < 0.7] = 0
    if sort == "special":
        chosen = torch.rand(shape) < 0.03
        bits[chosen] |= top << mantissa_bits
        bits[chosen & (torch.rand(shape) < 0.6)] &= top << mantissa_bits
    return bits | torch.randint(0, 2, shape) * sign


def from_bits(bits, dtype):
    if dtype == E2M1:
        return (bits[:, ::2] | bits[:, 1::2] << 4).to(U8)
    return bits.view(U8).unflatten(1, (-1, 8))[..., : dtype.itemsize].flatten(1).view(dtype)


def random_scales(dtype, rows, blocks, sort):
    """Return codes of block scales of one sort."""
    low, high = {
        ("wide", E8M0): (0, 255),
        ("tiny", E8M0): (0, 40),
        ("special", E8M0): (118, 256),
        ("wide", E4M3): (0, 127),
        ("tiny", E4M3): (0, 12),
        ("special", E4M3): (100, 256),  # the sign bit is ignored
    }.get((sort, dtype), (120, 135) if dtype == E8M0 else (40, 72))
    codes = torch.randint(low, high, (rows, blocks), dtype=U8)
    if sort == "zeros":
        codes[torch.rand(codes.shape) < 0.3] = 0
    return codes.view(dtype)


def arguments(kind, m, n, k, sort):
    """Return A, B and the options of ``tensor_core_gemm``: accumulator and scales."""
    a, b = random_bits(kind.a, m, k, sort), random_bits(kind.b, n, k, sort)
    if sort == "cancelling":  # neighbors cancel, except for the last bit of some
        a[:, 1::2] = a[:, : k - 1 : 2] ^ (torch.rand(m, k // 2) < 0.3) ^ 1 << width(kind.a) - 1
        b[:, 1::2] = b[:, : k - 1 : 2]
    if sort == "zero_times_huge":
        a, b = (random_bits(t, rows, k, "underflow") for t, rows in ((kind.a, m), (kind.b, n)))
        a[:, ::5] &= 1 << width(kind.a) - 1
        b[:, ::5] = random_bits(kind.b, n, len(range(0, k, 5)), "wide")
    acc_sort = {"underflow": "tiny", "zero_times_huge": "underflow"}.get(sort, sort)
    options = {"acc": from_bits(random_bits(kind.acc, m, n, acc_sort), kind.acc)}
    if kind.scale is not None:
        blocks = -(-k // kind.block)
        options["a_scales"] = random_scales(kind.scale, m, blocks, sort)
        options["b_scales"] = random_scales(kind.scale, n, blocks, sort)
    return from_bits(a, kind.a), from_bits(b, kind.b), options


#: Smallest exponent of a normal number.
LOWEST = {F16: -14, E5M2: -14, E4M3: -6, E2M1: 0, BF16: -126, F32: -126}


def floor_log2(v):
    v = abs(v)
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if v >= Fraction(2) ** e else e - 1


def values(x):
    return (e2m1_values(x) if x.dtype == E2M1 else x.double()).tolist()


def tf32(x):
    """Truncate fp32 values to tf32."""
    return torch.from_numpy((x.numpy().view(np.uint32) & 0xFFFFE000).view(np.float32))


def scale_values(x):
    if x.dtype == E8M0:
        return [
            [math.nan if c == 255 else 2.0 ** (c - 127) for c in row] for row in x.view(U8).tolist()
        ]
    return (x.view(U8) & 0x7F).view(E4M3).double().tolist()


class Oracle:
    """A tensor core in rational arithmetic."""

    def __init__(self, kind):
        self.kind = kind

    def exponent(self, v, dtype):
        if v == 0:
            return None if self.kind.arch == "sm_90a" else -126
        return max(floor_log2(Fraction(v)), LOWEST[dtype])

    def product(self, x, y, sx, sy):
        """Return the exact product of two scaled numbers and the exponent it is aligned by."""
        kind = self.kind
        exponents = [self.exponent(x, kind.a), self.exponent(y, kind.b)]
        if None in exponents:
            return Fraction(0), None
        value, exponent = Fraction(x) * Fraction(y), sum(exponents)
        if kind.scale is not None:
            value *= Fraction(sx) * Fraction(sy)
            exponent += floor_log2(Fraction(sx)) + floor_log2(Fraction(sy))
        return value, exponent

    def sixteen(self, x, y, sx, sy):
        """Return the exact sum of 16 products of E2M1 codes and its exponent."""
        scale = [Fraction(s) for s in (sx, sy)]
        exponents = [-126 if s == 0 else max(floor_log2(s), -6) for s in scale]
        if self.kind.scale == E8M0:
            exponents = [floor_log2(s) for s in scale]
        return sum(Fraction(p) * Fraction(q) for p, q in zip(x, y, strict=True)) * scale[0] * scale[
            1
        ], sum(exponents)

    def terms(self, x, y, sx, sy):
        block = 16 if self.kind.a == E2M1 else 1
        for i in range(0, len(x), block):
            scales = [s[i // self.kind.block] if s else 1.0 for s in (sx, sy)]
            if block == 16:
                yield self.sixteen(x[i : i + block], y[i : i + block], *scales)
            else:
                yield self.product(x[i], y[i], *scales)

    def step(self, c, x, y, sx, sy):
        """Return the accumulator after one instruction."""
        kind = self.kind
        if not all(map(math.isfinite, (c, *x, *y, *sx, *sy))):
            return c + sum((p * q for p, q in zip(x, y, strict=True)), 0.0 * sum(sx + sy))
        terms = [(Fraction(c), self.exponent(c, kind.acc)), *self.terms(x, y, sx, sy)]
        top = max([-133, *(e for _, e in terms if e is not None)])
        unit = Fraction(2) ** (top - kind.fraction_bits)
        return self.round(sum(math.trunc(v / unit) for v, _ in terms) * unit)

    def round(self, total):
        """Round a sum to the accumulator's precision."""
        if total == 0:
            return 0.0
        half = self.kind.acc == F16
        exponent = max(floor_log2(total), -14 if half else -126)
        ulp = Fraction(2) ** (exponent - (10 if half else self.kind.accumulator_bits))
        rounded = (round(total / ulp) if half else math.trunc(total / ulp)) * ulp
        if abs(rounded) >= (65520 if half else 2**128):
            return math.copysign(math.inf, total)
        if rounded == 0 and total < 0:
            return 0.0 if self.kind.arch == "sm_90a" else -0.0
        return float(rounded)

    def gemm(self, a, b, acc, a_scales=None, b_scales=None):
        """Return the product, instruction by instruction."""
        kind, k = self.kind, self.kind.k
        if kind.a == F32:
            a, b = tf32(a), tf32(b)
        rows, cols = values(a), values(b)
        row_scales = [[]] * len(a) if a_scales is None else scale_values(a_scales)
        col_scales = [[]] * len(b) if b_scales is None else scale_values(b_scales)
        out = torch.empty(len(rows), len(cols), dtype=torch.float64)
        for i, (x, sx) in enumerate(zip(rows, row_scales, strict=True)):
            for j, (y, sy) in enumerate(zip(cols, col_scales, strict=True)):
                c = acc[i, j].double().item()
                for s in range(0, len(x), k):
                    blocks = (
                        slice(s // kind.block, (s + k) // kind.block) if kind.block else slice(0)
                    )
                    c = self.step(c, x[s : s + k], y[s : s + k], sx[blocks], sy[blocks])
                out[i, j] = c
        result = out.to(kind.acc)  # exact
        result.view(torch.int16 if kind.acc == F16 else torch.int32)[out.isnan()] = NAN[kind.acc]
        return result


@every_sort
@every_kind
def test_bits_of_rational_arithmetic(kind, sort):
    # Two instructions and a tail.
    a, b, options = arguments(kind, 5, 4, 2 * kind.k + 16, sort)
    assert_same_bytes(
        tensor_core_gemm(kind.arch, a, b, **options), Oracle(kind).gemm(a, b, **options)
    )


#: Digests of an H200's results for ``arguments`` (64 x 8, four instructions), 2026-11-22, with the
#: kernels of tensor_core_kernels.py: one line per kind, in the order of SORTS. Full results of 44
#: other cases are in the git history, as h200_wgmma.npz in this folder.
_LINES = (Path(__file__).parent / "h200_wgmma.txt").read_text().splitlines()
H200 = {kind: dict(zip(SORTS, digests, strict=True)) for kind, *digests in map(str.split, _LINES)}
HOPPER = [k for k in KINDS if k.arch == "sm_90a"]
HOPPER.append(Kind("sm_90a", E5M2, E5M2, F16, 32, 13, accumulator_bits=13))


@every_sort
@pytest.mark.parametrize("kind", HOPPER, ids=str)
def test_bits_of_an_h200(kind, sort):
    a, b, options = arguments(kind, 64, 8, 4 * kind.k, sort)
    got = tensor_core_gemm(kind.arch, a, b, **options).numpy().tobytes()
    assert hashlib.blake2b(got, digest_size=8).hexdigest()[:8] == H200[str(kind)][sort]


def emulated(kind, a, b, options):
    from tests.reference import tensor_core_kernels

    run = {"sm_90a": tensor_core_kernels.wgmma, "sm_100a": tensor_core_kernels.tcgen05}[kind.arch]
    return run(a, b, **options)


@pytest.mark.emulated
@every_sort
@every_kind
def test_bits_of_the_emulator(kind, sort):
    """Compare the model of the tensor core with the emulator."""
    rows, cols = (64, 8) if kind.arch == "sm_90a" else (128, 16)
    a, b, options = arguments(kind, rows, cols, 3 * kind.k, sort)
    got = tensor_core_gemm(kind.arch, a, b, **options)
    for mode in ({}, {"mode": "chaos", "seed": 2, "races": True}):
        with emulator.options(**mode):
            assert_same_bytes(got, emulated(kind, a, b, options))


def test_signs_of_zero_sums():
    """Check the signs of sums that are zero."""

    def sign(arch, a, acc):
        rows, accumulator = (torch.tensor([[v]], dtype=F16) for v in (a, acc))
        return math.copysign(
            1.0,
            tensor_core_gemm(
                arch, rows, torch.tensor([[2.0**-14]], dtype=F16), acc=accumulator
            ).item(),
        )

    for arch in ("sm_90a", "sm_100a"):
        assert sign(arch, -0.0, -0.0) == 1
    assert sign("sm_90a", -(2.0**-14), 0.0) == 1
    assert sign("sm_100a", -(2.0**-14), 0.0) == -1


@given(st.data())
@settings(max_examples=40)
def test_bits_do_not_depend_on_shapes_tiles_or_steps(data):
    """Check that the bits do not depend on shapes, tiles or steps."""
    kind = data.draw(st.sampled_from(KINDS))
    sort = data.draw(st.sampled_from(SORTS))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    m, n = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    i, j = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - 1))
    steps = data.draw(st.integers(1, 4))
    a, b, options = arguments(kind, m, n, steps * kind.k, sort)
    product = tensor_core_gemm(kind.arch, a, b, **options)

    # Fewer rows and columns.
    cut_options = {
        name: (x[i:, j:] if name == "acc" else x[i:] if name[0] == "a" else x[j:])
        for name, x in options.items()
    }
    assert_same_bytes(tensor_core_gemm(kind.arch, a[i:], b[j:], **cut_options), product[i:, j:])

    # Smaller tiles.
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_TILE_M", 4), ("_TILE_N", 3), ("_TILE_K", 64)):
            patch.setattr(tensor_core, name, size)
        assert_same_bytes(tensor_core_gemm(kind.arch, a, b, **options), product)

    # Instruction by instruction.
    acc = options["acc"]
    for s in range(steps):
        operands = [x.chunk(steps, dim=1)[s] for x in (a, b)]
        scales = {name: x.chunk(steps, dim=1)[s] for name, x in options.items() if name != "acc"}
        acc = tensor_core_gemm(kind.arch, *operands, acc=acc, **scales)
    assert_same_bytes(acc, product)


def test_the_accumulator_argument_is_unchanged():
    """Check that the accumulator argument is unchanged."""
    acc = torch.zeros(2, 2)
    a = torch.randn(2, 16, dtype=F16)
    tensor_core_gemm("sm_90a", a, a, acc=acc)
    assert not acc.any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 16), (3, 0, 16), (3, 2, 0)])
def test_empty_dimensions_return_the_accumulator(m, n, k):
    acc = torch.randn(m, n)
    got = tensor_core_gemm(
        "sm_100a", torch.zeros(m, k, dtype=F16), torch.zeros(n, k, dtype=F16), acc=acc
    )
    assert_same_bytes(got, acc)


def zeros(rows, cols, dtype):
    return torch.zeros(rows, cols, dtype=U8).view(dtype)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("sm_80", F16, F16), {}, "arch must be one of sm_90a, sm_100a, got 'sm_80'"),
        (("sm_90a", F16, BF16), {}, "one dtype"),
        (("sm_90a", E4M3, E4M3), {"a_scales": E8M0, "b_scales": E8M0}, "with block scales"),
        (("sm_100a", E2M1, E2M1), {"a_scales": E4M3}, "both be None"),
        (("sm_100a", E2M1, E2M1), {"a_scales": E4M3, "b_scales": E8M0}, "of one dtype"),
        (("sm_100a", BF16, BF16), {"acc_dtype": F16}, "no torch.float16 accumulator"),
        (("sm_100a", F16, F16), {"acc": torch.zeros(2, 2)}, r"shape \(2, 3\), got \(2, 2\)"),
    ],
)
def test_invalid_arguments_raise(arguments, options, message):
    """Check that invalid arguments raise."""
    arch, *dtypes = arguments
    operands = [
        torch.zeros(r, 64 * t.itemsize, dtype=U8).view(t)
        for r, t in zip((2, 3), dtypes, strict=True)
    ]
    blocks = {E8M0: 4 if E2M1 in dtypes else 2, E4M3: 8}
    rows = {"a_scales": 2, "b_scales": 3}
    options = {k: zeros(rows[k], blocks[v], v) if k in rows else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        tensor_core_gemm(arch, *operands, **options)
