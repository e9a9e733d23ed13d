"""Block scales of MXFP8 and FP8Block for every amax, against the search oracle."""

import functools
from fractions import Fraction

import pytest
import torch

from cute_kernels.formats import E4M3, E5M2, E8M0, MXFP8, FP8Block
from cute_kernels.reference import conversions
from cute_kernels.reference.codecs import codec_of
from tests.helpers import (
    BF16,
    DTYPES,
    F32,
    U8,
    all_16_bit_values,
    assert_all_same,
    assert_same_bytes,
    with_neighbors,
)
from tests.reference import block_oracle

FMAX = torch.finfo(F32).max


def finite(dtype):
    values = all_16_bit_values(dtype).float()
    return values[values.isfinite() & ~values.signbit()]


def test_every_e8m0_code_round_trips():
    """Check that every E8M0 code decodes to its value and back."""
    codes = torch.arange(256, dtype=torch.int32).to(U8)
    values = conversions.decode(E8M0, codes)
    assert [Fraction(v) for v in values[:255].tolist()] == [
        Fraction(2) ** (code - 127) for code in range(255)
    ]
    assert values[255].isnan() and values[0] == 2.0**-127 > 0
    assert_same_bytes(conversions.encode_e8m0(values), codes)


def test_e8m0_rounds_up_near_every_power():
    """Check that E8M0 scales are rounded up near every power of two."""
    powers = torch.from_numpy(block_oracle.POWERS).float()
    values = with_neighbors(torch.cat([powers, powers * 1.5, torch.tensor([0.0, FMAX])])).clamp_min(
        0
    )
    codes = conversions.encode_e8m0(values)
    assert_same_bytes(codes, torch.from_numpy(block_oracle.round_e8m0(values.numpy())))
    largest = values.double().clamp_max(2.0**127)
    assert (conversions.decode(E8M0, codes).double() >= largest).all()
    halves = torch.where(codes > 0, conversions.decode(E8M0, codes).double() / 2, -1.0)
    assert (halves < largest).all()
    specials = torch.tensor([0.0, 1e-45, 2.0**-127, torch.inf, torch.nan, FMAX, -1.0])
    assert conversions.encode_e8m0(specials).tolist() == [0, 0, 0, 254, 255, 254, 127]


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
@pytest.mark.parametrize(
    "make",
    [MXFP8, FP8Block, functools.partial(FP8Block, pow2_scales=False)],
    ids=["mxfp8", "fp8_block", "fp32 scales"],
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scales_of_every_amax(dtype, make, element):
    """A scale of MXFP8 is the smallest power of two that keeps the amax from saturating."""
    fmt = make(dtype=element.dtype)
    amax = torch.cat([finite(BF16 if dtype == F32 else dtype), torch.tensor([torch.inf])])
    factors = codec_of(fmt, dtype).factors(amax, amax)
    rules = block_oracle.rules_of(fmt.text)
    assert_all_same(
        factors,
        map(torch.from_numpy, rules.scales(amax.numpy(), str(dtype).removeprefix("torch."))),
    )
    if rules.is_mx:
        powers = torch.from_numpy(block_oracle.POWERS)
        assert_same_bytes(
            factors[0],
            torch.searchsorted(powers * element.max, amax.double()).clamp_max(254).to(U8),
        )
