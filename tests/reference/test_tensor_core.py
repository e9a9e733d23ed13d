"""``tensor_core_gemm`` gives the bits of the hardware.

Three oracles: exact rational arithmetic, written from the rules (every kind); an H200's answers
(sm_90a); the emulator (every kind).
"""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels.reference.tensor_core import tensor_core_gemm
from tests.helpers import assert_same_bytes

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8
E8M0 = torch.float8_e8m0fnu
NAN = {F32: 0x7FFFFFFF, F16: 0x7FFF}


@dataclasses.dataclass(frozen=True)
class Kind:
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
        names = [str(d).removeprefix("torch.") for d in (self.a, self.b, self.acc, self.scale) if d]
        return "-".join([self.arch, *names])


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

# ------------------------------------------------------------------------------------- inputs
#: Mantissa bits and exponent bias.
LAYOUT = {F16: (10, 15), BF16: (7, 127), F32: (23, 127), E4M3: (3, 7), E5M2: (2, 15), E2M1: (1, 1)}


def width(dtype):
    return 4 if dtype == E2M1 else 8 * dtype.itemsize


def random_bits(dtype, rows, cols, sort):
    """Bit patterns of one sort, int64; finite unless "special"."""
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
        return (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8)
    return (
        bits.view(torch.uint8).unflatten(1, (-1, 8))[..., : dtype.itemsize].flatten(1).view(dtype)
    )


def random_scales(dtype, rows, blocks, sort):
    low, high = {
        ("wide", E8M0): (0, 255),
        ("tiny", E8M0): (0, 40),
        ("special", E8M0): (118, 256),
        ("wide", E4M3): (0, 127),
        ("tiny", E4M3): (0, 12),
        ("special", E4M3): (100, 256),  # the sign bit means nothing
    }.get((sort, dtype), (120, 135) if dtype == E8M0 else (40, 72))
    codes = torch.randint(low, high, (rows, blocks), dtype=torch.uint8)
    if sort == "zeros":
        codes[torch.rand(codes.shape) < 0.3] = 0
    return codes.view(dtype)


def arguments(kind, m, n, k, sort):
    """A, B and keyword arguments of ``tensor_core_gemm``."""
    a, b = random_bits(kind.a, m, k, sort), random_bits(kind.b, n, k, sort)
    if sort == "cancelling":  # neighbours are opposite, but for the last bit of a few
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


# ------------------------------------------------------------------------- the rational oracle
LOWEST = {F16: -14, E5M2: -14, E4M3: -6, E2M1: 0, BF16: -126, F32: -126}


def floor_log2(v):
    v = abs(v)
    e = v.numerator.bit_length() - v.denominator.bit_length()
    return e if v >= Fraction(2) ** e else e - 1


def values(x):
    """Rows of Python floats."""
    if x.dtype == E2M1:
        magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        nibbles = [[code >> s & 15 for code in row for s in (0, 4)] for row in x.tolist()]
        return [[math.copysign(magnitudes[c & 7], 7.5 - c) for c in row] for row in nibbles]
    return x.double().tolist()


def tf32(x):
    """fp32 values without the bits that tf32 has not."""
    return torch.from_numpy((x.numpy().view(np.uint32) & 0xFFFFE000).view(np.float32))


def scale_values(x):
    """Rows of floats, powers of two for E8M0."""
    if x.dtype == E8M0:
        codes = x.view(torch.uint8).tolist()
        return [[math.nan if c == 255 else 2.0 ** (c - 127) for c in row] for row in codes]
    return (x.view(torch.uint8) & 0x7F).view(E4M3).double().tolist()


class Oracle:
    """One result of one kind, by rational arithmetic."""

    def __init__(self, kind):
        self.kind = kind

    def exponent(self, v, dtype):
        """Of a finite value; None if it has none."""
        if v == 0:
            return None if self.kind.arch == "sm_90a" else -126
        return max(floor_log2(Fraction(v)), LOWEST[dtype])

    def product(self, x, y, sx, sy):
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
        """The term of sixteen FP4 products."""
        scale = [Fraction(s) for s in (sx, sy)]
        value = sum(Fraction(p) * Fraction(q) for p, q in zip(x, y, strict=True))
        exponents = [-126 if s == 0 else max(floor_log2(s), -6) for s in scale]
        if self.kind.scale == E8M0:
            exponents = [floor_log2(s) for s in scale]
        return value * scale[0] * scale[1], sum(exponents)

    def terms(self, x, y, sx, sy):
        """(value, exponent) of one instruction's terms."""
        each = 16 if self.kind.a == E2M1 else 1
        for i in range(0, len(x), each):
            scales = [s[i // self.kind.block] if s else 1.0 for s in (sx, sy)]
            if each == 16:
                yield self.sixteen(x[i : i + each], y[i : i + each], *scales)
            else:
                yield self.product(x[i], y[i], *scales)

    def step(self, c, x, y, sx, sy):
        """One instruction: the float that it leaves in the accumulator."""
        kind = self.kind
        if not all(map(math.isfinite, (c, *x, *y, *sx, *sy))):
            return c + sum((p * q for p, q in zip(x, y, strict=True)), 0.0 * sum(sx + sy))
        terms = [(Fraction(c), self.exponent(c, kind.acc)), *self.terms(x, y, sx, sy)]
        top = max([-133, *(e for _, e in terms if e is not None)])
        unit = Fraction(2) ** (top - kind.fraction_bits)
        return self.round(sum(math.trunc(v / unit) for v, _ in terms) * unit)

    def round(self, total):
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
                    part = slice(s // kind.block, (s + k) // kind.block) if kind.block else slice(0)
                    c = self.step(c, x[s : s + k], y[s : s + k], sx[part], sy[part])
                out[i, j] = c
        result = out.to(kind.acc)  # exact
        bits = result.view(torch.int16 if kind.acc == F16 else torch.int32)
        bits[out.isnan()] = NAN[kind.acc]
        return result


@every_sort
@every_kind
def test_equals_rational_arithmetic(kind, sort):
    # Two instructions and a tail.
    a, b, options = arguments(kind, 5, 4, 2 * kind.k + 16, sort)
    assert_same_bytes(
        tensor_core_gemm(kind.arch, a, b, **options), Oracle(kind).gemm(a, b, **options)
    )


# --------------------------------------------------------------------------- silicon, emulator
#: By kind and sort of input: rows of A (8, K), of B (8, K), the accumulator (8, 8) and what an H200
#: made of them, byte for byte. K is four instructions.
H200 = np.load(Path(__file__).parent / "h200_wgmma.npz")


@pytest.mark.parametrize("case", H200.files)
def test_equals_an_h200(case):
    a_type, b_type, acc_type, _ = case.split("-")
    operands, acc_type = [getattr(torch, t) for t in (a_type, b_type)], getattr(torch, acc_type)
    size = 64 * acc_type.itemsize
    parts = torch.from_numpy(H200[case]).split([1024, 1024, size, size])
    a, b = (p.clone().view(t).view(8, -1) for p, t in zip(parts, operands, strict=False))
    acc, want = (p.clone().view(acc_type).view(8, 8) for p in parts[2:])
    assert_same_bytes(tensor_core_gemm("sm_90a", a, b, acc=acc), want)


def emulated(kind, a, b, options):
    from tests.reference import tensor_core_kernels

    run = {"sm_90a": tensor_core_kernels.wgmma, "sm_100a": tensor_core_kernels.tcgen05}[kind.arch]
    return run(a, b, **options)


@every_sort
@every_kind
def test_equals_the_emulator(kind, sort):
    rows, cols = (64, 8) if kind.arch == "sm_90a" else (128, 16)
    a, b, options = arguments(kind, rows, cols, 3 * kind.k, sort)
    got, want = tensor_core_gemm(kind.arch, a, b, **options), emulated(kind, a, b, options)
    assert_same_bytes(got, want)
