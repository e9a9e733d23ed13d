"""Floating-point instructions against NumPy, beside those that test_silicon.py has."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.ptx import elementwise

_EDGES32 = [0, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF,
            0x00800000, 0x7F7FFFFF, 0x33800000]  # fmt: skip


def _floats(count: int, dtype: type = np.float32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(count):
        v = rng.standard_normal(512) * np.exp2(rng.integers(-12, 12, 512))
        v = v.astype(dtype)
        if dtype is np.float32:
            v[:128] = rng.choice(np.array(_EDGES32, np.uint32).view(np.float32), 128)
        arrays.append(v)
    return arrays


def _equal(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, except for which NaN it is."""
    nan = np.isnan(got) & np.isnan(want)
    bits = f"u{got.dtype.itemsize}"
    assert ((got.view(bits) == want.view(bits)) | nan).all()


def test_fma_rounds_once():
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(512).astype(np.float32) for _ in range(3))
    c = (-(a.astype(np.float64) * b) * (1 + c * 2**-20)).astype(np.float32)  # cancels
    got = elementwise("fma.rn.f32 %out, %a0, %a1, %a2;", a, b, c, out=np.float32)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    # An exact double, as these sums of 48-bit products are, rounds to float32 once.
    doubles = np.array([float(v) for v in exact])
    assert all(Fraction(d) == v for d, v in zip(doubles.tolist(), exact, strict=True))
    _equal(got, doubles.astype(np.float32))


def test_decimal_literals():
    a = np.ones(32, np.float32)
    assert (elementwise("add.f32 %out, %a0, 1.5;", a, out=np.float32) == 2.5).all()
    with pytest.raises(emulator.EmulatorError, match="not modelled"):
        elementwise("add.f64 %out, %a0, 1.5;", a.astype(np.float64), out=np.float64)


def test_min_max():
    a, b, c = _floats(3)
    with np.errstate(all="ignore"):
        got = elementwise("max.f32 %out, %a0, %a1, %a2;", a, b, c, out=np.float32) + 0
        _equal(got, np.fmax(np.fmax(a, b), c) + 0)
    negative = np.float32([-0.0, 0.0] * 16), np.float32([0.0, -0.0] * 16)
    assert np.signbit(elementwise("min.f32 %out, %a0, %a1;", *negative, out=np.float32)).all()
    assert not np.signbit(elementwise("max.f32 %out, %a0, %a1;", *negative, out=np.float32)).any()


def test_two_floats_at_once():
    a, b, c = (np.random.default_rng(i).standard_normal((256, 2)).astype(np.float32)
               for i in range(3))  # fmt: skip
    packed = [v.view(np.uint64)[:, 0] for v in (a, b, c)]
    got = elementwise("fma.rn.f32x2 %out, %a0, %a1, %a2;", *packed, out=np.uint64)
    product = a.astype(np.float64) * b
    _equal(got.view(np.float32).reshape(-1, 2), (product + c).astype(np.float32))


def _bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_halves(op):
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(512).astype(np.float16) for _ in range(2))
    with np.errstate(all="ignore"):
        _equal(elementwise(f"{op}.f16 %out, %a0, %a1;", a, b, out=np.float16), operation(a, b))
    x, y = (_bf16(rng.standard_normal(512)) for _ in range(2))
    got = elementwise(f"{op}.rn.bf16 %out, %a0, %a1;", x, y, out=np.uint16)
    want = operation(_from_bf16(x).astype(np.float64), _from_bf16(y).astype(np.float64))
    # Sums and products of bfloat16 of like size are exact in double, and nearly so in float32.
    assert (got == _bf16(want)).mean() > 0.99
    np.testing.assert_allclose(_from_bf16(got), want, rtol=2**-8)


def test_unequal_or_unordered():
    a, b = _floats(2)
    b[::2] = a[::2]
    got = elementwise(".reg .pred %p; setp.neu.f32 %p, %a0, %a1; selp.b32 %out, 1, 0, %p;", a, b)
    assert (got.astype(bool) == (a != b)).all()


def test_compare_packed_halves():
    """setp of f16x2: one predicate for each half."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-2, 3, (256, 2)).astype(np.float16) for _ in range(2))
    ptx = """.reg .pred %p, %q; .reg .b32 %v; setp.lt.f16x2 %p|%q, %a0, %a1;
    selp.b32 %out, 1, 0, %p; selp.b32 %v, 2, 0, %q; or.b32 %out, %out, %v;"""
    got = elementwise(ptx, a.view(np.uint32)[:, 0], b.view(np.uint32)[:, 0])
    assert (got == (a < b)[:, 0] + 2 * (a < b)[:, 1]).all()
