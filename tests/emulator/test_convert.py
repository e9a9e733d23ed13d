"""Conversions between number formats, against NumPy and CUDA's headers."""

import numpy as np
import pytest

import ptx_emulator as emulator

from .ptx import elementwise, fails


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", [True, False])
def test_f32_to_ue8m0(rounding, satfinite):
    """The expected value follows cuda_fp8.hpp, which converts in software on older GPUs."""
    v = np.ldexp(1.0, np.arange(-149, 128))
    v = np.concatenate([v, v * 1.25, v * 1.9999, [0, 3.4028235e38, np.inf]]).astype(np.float32)
    v = np.concatenate([v, -v])
    v = np.resize(v, (len(v) + 31) // 32 * 32)
    modifier = ".satfinite" if satfinite else ""
    ptx = f".reg .b16 %v; cvt.{rounding}{modifier}.ue8m0x2.f32 %v, %a0, %a0; cvt.u32.u16 %out, %v;"
    got = elementwise(ptx, v)
    bits = v.view(np.uint32) & 0x7FFFFFFF
    want = bits >> 23
    if rounding == "rp":
        want += ((bits & 0x7FFFFF) != 0) & (bits > 0x400000) & np.isfinite(v)
    if satfinite:
        want = np.minimum(want, 254)
    assert (got == want * 0x101).all()
    nan = np.full(32, np.nan, np.float32)
    assert (elementwise(ptx, nan) == 0xFFFF).all()


def test_ue8m0_to_bf16():
    """Check the conversion of all 256 UE8M0 codes to bf16."""
    got = elementwise("cvt.rn.bf16x2.ue8m0x2 %out, %a0;", np.arange(256, dtype=np.uint16))
    low = (got << 16).view(np.float32)
    assert (low[:255] == np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)).all()
    assert np.isnan(low[255])


def _bf16(values):
    return (np.float32(values).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("types", "inputs", "expected"),
    [
        (
            "rn.satfinite.f16.f32",
            np.float32([1e6, -1e6, np.inf, 2.0]),
            np.float16([65504, -65504, 65504, 2]),
        ),
        ("rn.satfinite.bf16.f32", np.float32([3.4e38, -3.4e38]), np.uint16([0x7F7F, 0xFF7F])),
        # 0x1010001 lies just above a tie of bf16; rounding to float32 first would give the tie.
        (
            "rn.bf16.s32",
            np.int32([0x1010001, -0x1010001, 0x1010000, 7]),
            _bf16([0x1020000, -0x1020000, 0x1000000, 7]),
        ),
        ("rni.s32.f32", np.float32([np.nan]), np.uint32([0])),
        ("rni.s64.f32", np.float32([np.nan]), np.uint64([1 << 63])),
    ],
)
def test_conversions_of_special_values(types, inputs, expected):
    got = elementwise(f"cvt.{types} %out, %a0;", np.resize(inputs, 32), out=expected.dtype)
    assert (got[: len(expected)] == expected).all()


def test_unmodelled_conversions_fail_when_reached():
    """Check that a conversion that is not modelled fails only when a warp reaches it."""
    v = np.ones(32, np.float32)
    with fails("stochastic rounding"):
        elementwise("cvt.rs.f16x2.f32 %out, %a0, %a0, %a0;", v)
    assert emulator.unsupported.get("kernel") is None
    with fails("not modelled: cvt.pack"):
        elementwise("cvt.pack.sat.u8.s32.b32 %out, %a0, %a0, 0;", v)
    assert emulator.unsupported["kernel"]
