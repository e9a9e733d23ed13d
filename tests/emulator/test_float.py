"""Floating-point instructions against NumPy; the bits of an H200 are in ``test_silicon.py``."""

import numpy as np
import pytest

from .ptx import elementwise

_EDGES32 = [0, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF,
            0x00800000, 0x7F7FFFFF, 0x33800000]  # fmt: skip


def _floats(count):
    """Return arrays of 512 fp32 numbers; the first 128 are special values."""
    rng = np.random.default_rng(0)
    arrays = []
    for _ in range(count):
        v = rng.standard_normal(512) * np.exp2(rng.integers(-12, 12, 512))
        v = v.astype(np.float32)
        v[:128] = rng.choice(np.array(_EDGES32, np.uint32).view(np.float32), 128)
        arrays.append(v)
    return arrays


def _assert_equal(got, want):
    """Check bitwise equality, where any NaN equals any other."""
    nan = np.isnan(got) & np.isnan(want)
    bits = f"u{got.dtype.itemsize}"
    assert ((got.view(bits) == want.view(bits)) | nan).all()


def test_max_of_three():
    a, b, c = _floats(3)
    with np.errstate(all="ignore"):
        got = elementwise("max.f32 %out, %a0, %a1, %a2;", a, b, c, out=np.float32) + 0
        _assert_equal(got, np.fmax(np.fmax(a, b), c) + 0)


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("ex2.approx.ftz", np.exp2),
        ("lg2.approx", np.log2),
        ("rcp.approx.ftz", np.reciprocal),
        ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
        ("sqrt.approx", np.sqrt),
        ("tanh.approx", np.tanh),
    ],
)
def test_approximations_are_correctly_rounded(op, reference):
    a = np.geomspace(1e-3, 20, 256).astype(np.float32)
    got = elementwise(f"{op}.f32 %out, %a0;", a, out=np.float32)
    np.testing.assert_allclose(got, reference(a.astype(np.float64)), rtol=2e-5)


def test_fma_of_two_packed_floats():
    """Check that the fma of two packed floats rounds each once."""
    a, b, c = (np.random.default_rng(i).standard_normal((256, 2)).astype(np.float32)
               for i in range(3))  # fmt: skip
    packed = [v.view(np.uint64)[:, 0] for v in (a, b, c)]
    got = elementwise("fma.rn.f32x2 %out, %a0, %a1, %a2;", *packed, out=np.uint64)
    _assert_equal(
        got.view(np.float32).reshape(-1, 2), (a.astype(np.float64) * b + c).astype(np.float32)
    )
