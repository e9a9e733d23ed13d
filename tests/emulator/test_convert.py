import numpy as np

from cute_kernels import emulator
from tests.helpers import each

from .ptx import elementwise, fails


@each("rounding", ["rz", "rp"])
@each("satfinite", [True, False])
def test_to_ue8m0(rounding, satfinite):
	"""As CUDA's cuda_fp8.hpp computes it where there is no instruction."""
	exponents = np.arange(-149, 128)
	v = np.ldexp(1.0, exponents)
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


def test_from_ue8m0():
	codes = np.arange(256, dtype=np.uint16)
	got = elementwise("cvt.rn.bf16x2.ue8m0x2 %out, %a0;", codes)
	low = (got << 16).view(np.float32)
	assert (low[:255] == np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)).all()
	assert np.isnan(low[255])


def test_saturating_to_half():
	v = np.resize(np.float32([1e6, -1e6, np.inf, 2.0]), 32)
	got = elementwise("cvt.rn.satfinite.f16.f32 %out, %a0;", v, out=np.float16)
	assert got[:4].tolist() == [65504, -65504, 65504, 2]
	huge = np.resize(np.float32([3.4e38, -3.4e38]), 32)
	got = elementwise("cvt.rn.satfinite.bf16.f32 %out, %a0;", huge, out=np.uint16)
	assert got[:2].tolist() == [0x7F7F, 0xFF7F]


def test_integers_to_bf16_round_once():
	"""0x1010001 lies just above a tie of bf16, onto which rounding to float32 would drop it."""
	v = np.resize(np.array([0x1010001, -0x1010001, 0x1010000, 7], np.int32), 32)
	got = elementwise("cvt.rn.bf16.s32 %out, %a0;", v, out=np.uint16)
	values = (got[:4].astype(np.uint32) << 16).view(np.float32)
	assert values.tolist() == [0x1020000, -0x1020000, 0x1000000, 7]


def test_nan_to_integer():
	single = np.full(32, np.nan, np.float32)
	assert (elementwise("cvt.rni.s32.f32 %out, %a0;", single) == 0).all()
	assert (elementwise("cvt.rni.s64.f32 %out, %a0;", single, out=np.uint64) == 1 << 63).all()


def test_not_modelled_is_an_error():
	v = np.ones(32, np.float32)
	with fails("stochastic rounding"):
		elementwise("cvt.rs.f16x2.f32 %out, %a0, %a0, %a0;", v)
	assert emulator.unsupported.get("kernel") is None
	with fails("not modelled: cvt.pack"):
		elementwise("cvt.pack.sat.u8.s32.b32 %out, %a0, %a0, 0;", v)
	assert emulator.unsupported["kernel"]
