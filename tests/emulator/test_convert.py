"""Conversions against tables of all values of the narrow formats."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels import emulator
from tests.emulator.ptx import elementwise

# exponent bits, mantissa bits, bias, codes from here on are no finite numbers
FORMATS = {
	"e4m3": (4, 3, 7, 0x7F),
	"e5m2": (5, 2, 15, 0x7C),
	"e2m1": (2, 1, 1, 8),
	"e2m3": (2, 3, 1, 32),
	"e3m2": (3, 2, 3, 32),
}


def _table(name: str) -> np.ndarray:
	"""The value of every finite non-negative code."""
	_, mantissa_bits, bias, end = FORMATS[name]
	code = np.arange(end)
	exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
	fraction = mantissa / (1 << mantissa_bits)
	subnormal = np.ldexp(fraction, 1 - bias)
	return np.where(exponent == 0, subnormal, np.ldexp(1 + fraction, exponent - bias))


def _encode(name: str, values: np.ndarray) -> np.ndarray:
	"""To nearest, ties to the even code, saturating."""
	exponent_bits, mantissa_bits, _, _ = FORMATS[name]
	table = _table(name)
	magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
	above = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
	below = np.maximum(above - 1, 0)
	to_above, to_below = table[above] - magnitude, magnitude - table[below]
	pick_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
	code = np.where(pick_above, above, below)
	return code | np.signbit(values).astype(np.int64) << exponent_bits + mantissa_bits


def _test_values(name: str) -> np.ndarray:
	"""Every value, every tie, their neighbours, and what lies beyond."""
	table = _table(name)
	ties = (table[1:] + table[:-1]) / 2
	v = np.concatenate([table, ties, [table[-1] * 1.5, table[-1] * 1e4]]).astype(np.float32)
	v = np.concatenate([v, np.nextafter(v, np.float32(np.inf)), np.nextafter(v, np.float32(0))])
	v = np.concatenate([v, -v])
	return np.resize(v, (len(v) + 63) // 64 * 64)


@pytest.mark.parametrize("name", FORMATS)
def test_to_narrow(name):
	v = _test_values(name)
	high, low = v[0::2], v[1::2]
	bits = 4 if name == "e2m1" else 8
	# A pair of e2m1 is 8 bits, which a .b8 register takes in inline assembly.
	convert = f"cvt.rn.satfinite.{name}x2.f32"
	ptx = (
		f"{{ .reg .b8 %v; {convert} %v, %a0, %a1; mov.b32 %out, {{%v, 0, 0, 0}}; }}"
		if bits == 4
		else f".reg .b16 %v; {convert} %v, %a0, %a1; cvt.u32.u16 %out, %v;"
	)
	got = elementwise(ptx, high, low)
	assert (got == _encode(name, high) << bits | _encode(name, low)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_from_narrow(name):
	exponent_bits, mantissa_bits, _, end = FORMATS[name]
	sign = exponent_bits + mantissa_bits
	magnitude = np.arange(end)
	codes = np.concatenate([magnitude, magnitude | 1 << sign])
	want = np.concatenate([_table(name), -_table(name)])
	codes, want = np.resize(codes, 512), np.resize(want, 512)
	bits = 4 if name == "e2m1" else 8
	pair = (codes | np.roll(codes, 1) << bits).astype(np.uint32)
	move = (
		"{ .reg .b8 %v, %w1, %w2, %w3; mov.b32 {%v, %w1, %w2, %w3}, %a0; %c }"
		if bits == 4
		else ".reg .b16 %v; cvt.u16.u32 %v, %a0; %c"
	)
	got = elementwise(move.replace("%c", f"cvt.rn.f16x2.{name}x2 %out, %v;"), pair)
	halves = got.view(np.float16).reshape(-1, 2)
	assert (halves[:, 0] == want.astype(np.float16)).all()
	assert (halves[:, 1] == np.roll(want, 1).astype(np.float16)).all()


def test_narrow_special_values():
	special = np.float32([np.nan, np.inf, -np.inf, 500.0] * 16)
	ptx = ".reg .b16 %v; cvt.rn.satfinite.{}x2.f32 %v, %a0, 0f00000000; cvt.u32.u16 %out, %v;"
	got = elementwise(ptx.format("e4m3"), special)[:4] >> 8
	assert got.tolist() == [0x7F, 0x7E, 0xFE, 0x7E]
	got = elementwise(ptx.format("e5m2"), special)[:4] >> 8
	assert got.tolist() == [0x7F, 0x7B, 0xFB, 0x60]


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", [True, False])
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


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_to_half(rounding):
	rng = np.random.default_rng(1)
	v = (rng.standard_normal(1024) * np.exp2(rng.integers(-26, 17, 1024))).astype(np.float32)
	got = elementwise(f"cvt.{rounding}.f16.f32 %out, %a0;", v, out=np.float16)
	with np.errstate(over="ignore"):
		nearest = v.astype(np.float16)
	up = np.where(nearest < v, np.nextafter(nearest, np.float16(np.inf)), nearest)
	down = np.where(nearest > v, np.nextafter(nearest, np.float16(-np.inf)), nearest)
	want = {"rn": nearest, "rp": up, "rm": down, "rz": np.where(v > 0, down, up)}[rounding]
	assert (got.view(np.uint16) == want.view(np.uint16)).all()


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
	"""0, or the most significant bit where the destination has 64 bits."""
	single = np.full(32, np.nan, np.float32)
	assert (elementwise("cvt.rni.s32.f32 %out, %a0;", single) == 0).all()
	assert (elementwise("cvt.rni.s64.f32 %out, %a0;", single, out=np.uint64) == 1 << 63).all()


def test_not_modelled_is_an_error():
	v = np.ones(32, np.float32)
	with pytest.raises(emulator.EmulatorError, match="stochastic rounding"):
		elementwise("cvt.rs.f16x2.f32 %out, %a0, %a0, %a0;", v)
	assert emulator.unsupported.get("kernel") is None
	with pytest.raises(emulator.EmulatorError, match="not modelled: cvt.pack"):
		elementwise("cvt.pack.sat.u8.s32.b32 %out, %a0, %a0, 0;", v)
	assert emulator.unsupported["kernel"]
