"""Conversions between fp32 and codes, against the oracles that search all values."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.formats import E2M1, E4M3, E5M2
from cute_kernels.reference import conversions
from tests.helpers import (
    BF16,
    F16,
    U8,
    all_16_bit_values,
    assert_same_bytes,
    offs_tensor,
    ops,
    with_neighbors,
)
from tests.reference import block_oracle, oracle


def round_e2m1(values, _):
    return np.array([oracle.round_e2m1(v) for v in values], np.uint8)


#: Conversion by the oracle, and the finite magnitudes, per element type.
ELEMENTS = {
    E2M1: (round_e2m1, oracle.E2M1_VALUES),
    **{
        e: (block_oracle.round_fp8, block_oracle.fp8_magnitudes(e.name).tolist())
        for e in (E4M3, E5M2)
    },
}


@pytest.mark.parametrize("element", ELEMENTS.keys(), ids=[e.name for e in ELEMENTS])
def test_every_16_bit_number_and_all_boundaries(element):
    """Convert every 16-bit number and all numbers near boundaries, and compare with an oracle."""
    convert, table = ELEMENTS[element]
    table = [*table, 2 * table[-1] - table[-2]]  # and the next number, if there were one
    near = with_neighbors(
        [*table, *((a + b) / 2 for a, b in itertools.pairwise(table)), 1e-45, 1e38]
    )
    for values in (*(all_16_bit_values(dtype).float() for dtype in (BF16, F16)), near, -near):
        assert_same_bytes(
            conversions.encode(element, values),
            torch.from_numpy(convert(values.numpy(), element.name)),
        )


@given(st.floats(width=32))
def test_any_fp32_number_rounds_as_the_oracle(value):
    x = torch.tensor([value])
    assert conversions.encode_e2m1(x).item() == oracle.round_e2m1(value)
    assert conversions.encode(E4M3, x).item() == oracle.round_e4m3(value)


def test_every_e4m3_code_decodes():
    for byte, value in enumerate(conversions.decode(E4M3, torch.arange(256, dtype=U8)).tolist()):
        want = oracle.e4m3_value(byte)
        assert value == want or (math.isnan(value) and math.isnan(want))


def test_codes_pack_low_nibble_first_and_unpack_to_their_values():
    """Check that codes are packed with the low nibble first, and unpack to their values."""
    assert conversions.pack_codes(torch.tensor([1, 2, 15, 0], dtype=U8)).tolist() == [0x21, 0x0F]
    packed = torch.arange(256, dtype=U8)
    want = [oracle.e2m1_value(code) for byte in range(256) for code in (byte & 15, byte >> 4)]
    got = conversions.unpack_codes(packed)
    assert_same_bytes(got, torch.tensor(want))
    assert_same_bytes(conversions.pack_codes(conversions.encode_e2m1(got)), packed)


@pytest.mark.parametrize("amax", [2688.0, 6.0, 1.7, 1e-36, 3e38, math.inf])
def test_every_bf16_amax_of_a_block(amax):
    """Each block has one number, so its scale is that number, rounded."""
    values = all_16_bit_values(BF16).float()
    x = torch.zeros(64, 1024, 16, dtype=BF16)
    x[..., 5] = values.view(64, 1024).bfloat16()
    codes, scales, _ = ops.grouped_quantize(
        x.flatten(1), "nvfp4", offs_tensor(64), torch.tensor([amax])
    )
    want_scales, want_codes = [], []
    for v in values.numpy():
        byte, enc = oracle.block_scale(oracle.absmax(v), np.float32(amax))
        want_scales.append(byte)
        want_codes.append(oracle.round_e2m1(v * enc))
    got_codes = codes.view(64, 1024, 8)[..., 2] >> 4
    assert_same_bytes(got_codes.flatten(), torch.tensor(want_codes, dtype=U8), "codes")
    addresses = [oracle.scale_byte(row, block, 1024) for row in range(64) for block in range(1024)]
    assert_same_bytes(
        scales.flatten()[torch.tensor(addresses)], torch.tensor(want_scales, dtype=U8), "scales"
    )


def test_encoding_a_transposed_matrix_does_not_warn(recwarn):
    """Check that encoding a transposed matrix gives no warning."""
    transposed = torch.randn(48, 30).T
    torch.set_warn_always(True)  # torch warns about strides once per process
    try:
        got = conversions.encode_e2m1(transposed)
    finally:
        torch.set_warn_always(False)
    assert not recwarn.list
    assert_same_bytes(got, conversions.encode_e2m1(transposed.contiguous()))


def test_the_order_of_roundings():
    """Another order of roundings, or division instead of a reciprocal, changes these bytes."""
    x = torch.zeros(1, 16)
    # Exactly, a * 2688 / g / 6 = 200, a tie between 192 (0x74, even) and 208 (0x75). S_enc =
    # fl(1365.3..) and fl(S_enc * fl(1/6)) round up, so this order ends just above the tie, while
    # fl(fl(a * S_enc) / 6), fl(a / 6) * S_enc and a * fl(S_enc / 6) end on it.
    x[0, 0] = 0.87890625
    _, scales, _ = ops.grouped_quantize(x, "nvfp4", offs_tensor(1), torch.tensor([1.96875]))
    assert scales[0, 0, 0].item() == 0x75
    # With enc = fl(1 / fl(208 * S_dec)), x * enc rounds to the tie 0.75, whose even code is 2; with
    # fl(S_enc / 208), or x divided by fl(208 * S_dec), it stays below.
    x[0, 0], x[0, 1] = 0.7421875, float.fromhex("0x1.7e9246p-4")
    codes, scales, _ = ops.grouped_quantize(x, "nvfp4", offs_tensor(1), torch.tensor([1.609375]))
    assert scales[0, 0, 0].item() == 0x75
    assert codes[0, 0].item() == 0x27
