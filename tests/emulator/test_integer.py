"""Integer instructions against Python's integers."""

import operator

import numpy as np
import pytest

from .ptx import elementwise

COUNT = 256
_EDGES = [0, 1, 2, 7, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000,
          0xFFFFFFFF, 1 << 63, (1 << 63) - 1, (1 << 64) - 1]  # fmt: skip


def _inputs(bits, count):
    """Return arrays of 256 unsigned integers; every third is an edge case."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(f"u{bits // 8}")
    arrays = []
    for _ in range(count):
        values = rng.integers(0, 1 << 64, COUNT, dtype=np.uint64, endpoint=False)
        values[::3] = rng.choice(np.array(_EDGES, np.uint64), len(values[::3]))
        arrays.append(values.astype(dtype))
    return arrays


def _signed(v, bits):
    return v - (1 << bits) if v >> (bits - 1) else v


def _check(ptx, bits, reference, operands=2, out=None):
    """Compare with ``reference``, which maps unsigned integers to one whose low bits count."""
    arrays = _inputs(bits, operands)
    out = out or bits
    got = elementwise(ptx, *arrays, out=np.dtype(f"u{out // 8}"))
    columns = zip(*(a.tolist() for a in arrays), strict=True)
    assert got.tolist() == [reference(*row) & ((1 << out) - 1) for row in columns]


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("kind", ["s", "u"])
@pytest.mark.parametrize("op", ["add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem"])
def test_integer_arithmetic(op, kind, bits):
    def number(v):
        return _signed(v, bits) if kind == "s" else v

    def reference(a, b):
        a, b = number(a), number(b | 1)
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return {
            "add": a + b,
            "sub": a - b,
            "mul.lo": a * b,
            "mul.hi": a * b >> bits,
            "min": min(a, b),
            "max": max(a, b),
            "div": quotient,
            "rem": a - quotient * b,
        }[op]

    _check(f"or.b{bits} %a1, %a1, 1; {op}.{kind}{bits} %out, %a0, %a1;", bits, reference)


@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_logic_with_a_negative_literal_fits_its_register(op):
    """The upper half of the 64-bit result shows whether a 32-bit register holds more."""
    reference = getattr(operator, f"__{op}__")
    ptx = f".reg .b32 %v; {op}.b32 %v, %a0, -8; cvt.u64.u32 %out, %v; add.u64 %out, %out, 0;"
    _check(ptx, 32, lambda a: reference(a, (1 << 32) - 8), 1, 64)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("op", ["shl.b", "shr.u", "shr.s"])
def test_shifts_clamp(op, bits):
    def shift(a, n):
        return {"shl.b": a << n, "shr.u": a >> n, "shr.s": _signed(a, bits) >> n}[op]

    ptx = f".reg .b32 %n; cvt.u32.u{bits} %n, %a1; {op}{bits} %out, %a0, %n;"
    _check(ptx, bits, lambda a, b: shift(a, min(b & 0xFFFFFFFF, bits)))


def test_conversions_extend_the_sign():
    _check("cvt.s64.s32 %out, %a0;", 32, lambda a: _signed(a, 32), 1, 64)


def test_conversions_saturate():
    _check(
        "cvt.sat.s16.s32 %out, %a0;", 32, lambda a: min(max(_signed(a, 32), -32768), 32767), 1, 16
    )


def test_narrow_results_are_truncated_then_extended_to_the_register():
    ptx = ".reg .b32 %v; cvt.s8.s32 %v, %a0; mov.b32 %out, %v;"
    _check(ptx, 32, lambda a: _signed(a & 0xFF, 8), 1)
