from fractions import Fraction

import numpy as np
import torch

from cute_kernels.formats import E4M3, E5M2, E8M0, MXFP8, FP8Block
from cute_kernels.reference import conversions
from cute_kernels.reference.codecs import codec_of
from tests.helpers import BF16, DTYPES, F16, F32, U8, assert_same_bytes, beside, each, every_16_bits
from tests.reference import block_oracle

both_elements = each("element", [E4M3, E5M2], ids=lambda e: e.name)
FMAX = torch.finfo(F32).max


def finite(dtype):
	values = every_16_bits(dtype).float()
	return values[values.isfinite() & ~values.signbit()]


def test_every_code_of_e8m0():
	codes = torch.arange(256, dtype=torch.int32).to(U8)
	values = conversions.decode(E8M0, codes)
	assert [Fraction(v) for v in values[:255].tolist()] == [Fraction(2) ** (code - 127) for code in range(255)]
	assert values[255].isnan() and values[0] == 2.0**-127 > 0
	assert_same_bytes(conversions.encode_e8m0(values), codes)


def test_e8m0_rounds_up_at_and_beside_every_power():
	powers = torch.from_numpy(block_oracle.POWERS).float()
	values = beside(torch.cat([powers, powers * 1.5, torch.tensor([0.0, FMAX])])).clamp_min(0)
	codes = conversions.encode_e8m0(values)
	assert_same_bytes(codes, torch.from_numpy(block_oracle.round_e8m0(values.numpy())))
	largest = values.double().clamp_max(2.0**127)
	assert (conversions.decode(E8M0, codes).double() >= largest).all()
	halves = torch.where(codes > 0, conversions.decode(E8M0, codes).double() / 2, -1.0)
	assert (halves < largest).all()
	specials = torch.tensor([0.0, 1e-45, 2.0**-127, torch.inf, torch.nan, FMAX, -1.0])
	assert conversions.encode_e8m0(specials).tolist() == [0, 0, 0, 254, 255, 254, 127]


@both_elements
@each("dtype", [BF16, F16])
def test_the_scale_of_every_amax_of_mxfp8(dtype, element):
	"""The smallest power of two by which the amax becomes an FP8 number without saturating."""
	amax = finite(dtype)
	codec = codec_of(MXFP8(element.dtype), dtype)
	stored, enc = codec.factors(amax, amax)
	powers = torch.exp2(torch.arange(255).double() - 127)
	want = torch.searchsorted(powers * element.max, amax.double()).clamp_max(254)
	assert_same_bytes(stored, want.to(U8))
	assert torch.equal(enc.double(), 1 / powers[want])
	assert torch.equal(codec.scale_values(stored).double(), powers[want])


@both_elements
@each("pow2", [False, True])
@each("dtype", DTYPES)
def test_the_scale_of_every_amax_of_fp8_block(dtype, pow2, element):
	amax = finite(BF16 if dtype == F32 else dtype)
	amax = torch.cat([amax, torch.tensor([torch.inf])])
	stored, scale = codec_of(FP8Block(dtype=element.dtype, pow2_scales=pow2), dtype).factors(amax, amax)
	largest = torch.finfo(dtype).max
	for a, got, inverse in zip(amax[::7].tolist(), scale[::7], stored[::7], strict=True):
		quotient = np.float32(element.max) / np.float32(a) if a else np.float32(1)
		if not 0 < a < torch.inf:
			want = np.float32(1)
		elif np.isinf(quotient):
			want = np.float32(largest)
		else:
			want = quotient
		if pow2:
			want = np.ldexp(np.float32(0.5), np.frexp(want)[1])
		assert got.item() == want
		assert inverse.item() == np.float32(1) / want
		assert not pow2 or Fraction(got.item()) * Fraction(inverse.item()) == 1
