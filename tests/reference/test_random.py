"""Philox, the random bytes of each block, and stochastic rounding."""

import itertools

import numpy as np
import pytest
import torch

from cute_kernels import reference
from cute_kernels.formats import NVFP4
from cute_kernels.reference.conversions import encode_e2m1, encode_e2m1_stochastic, round_e2m1
from cute_kernels.reference.philox import philox4x32
from tests.emulator.ptx import elementwise
from tests.helpers import (
    U8,
    assert_same_bytes,
    needs_compiler,
    offs_from_splits,
    ops,
    sample,
    seeded_generator,
)
from tests.reference import oracle

from .oracle_variants import block_bytes
from .oracle_variants import philox4x32 as philox_oracle

WORD = 0xFFFFFFFF
VALUES = torch.tensor(oracle.E2M1_VALUES)
SR = "nvfp4:stochastic_rounding"

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
#: Test vectors that Random123 publishes (kat_vectors): counter, key, rounds, words.
PUBLISHED = [
    ((0,) * 4, (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((WORD,) * 4, (WORD, WORD), 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (*PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ((0,) * 4, (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def tensors_of(*numbers):
    return tuple(torch.tensor(n) for n in numbers)


@pytest.mark.parametrize(("counter", "key", "rounds", "want"), PUBLISHED)
def test_philox_gives_the_published_words(counter, key, rounds, want):
    assert tuple(philox4x32(tensors_of(*counter), tensors_of(*key), rounds).tolist()) == want
    assert philox_oracle(counter, key, rounds) == want


@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (1 << 40, 5), (7, -(2**63)), (3, 2**63 - 1)])
def test_bytes_follow_the_documented_counter(seed):
    """Check that random bytes follow the documented Philox counter."""
    random_bytes = reference.SeededRandomNumbers(torch.tensor(seed), 48)
    rows = torch.tensor([0, 3, 1 << 33])
    drawn_bytes = random_bytes.rows(rows).view(3, 3, 16)
    for (i, row), block in itertools.product(enumerate(rows.tolist()), range(3)):
        assert bytes(drawn_bytes[i, block].tolist()) == block_bytes(seed, 0, row * 3 + block)
    tiles = torch.tensor([0, 2, 1 << 27])
    drawn_bytes = random_bytes.tiles(tiles)
    assert drawn_bytes.shape == (3, 8, 48, 16)
    for (i, tile), chunk, col in itertools.product(enumerate(tiles.tolist()), (0, 7), (0, 47)):
        assert bytes(drawn_bytes[i, chunk, col].tolist()) == block_bytes(
            seed, 1, (tile * 8 + chunk) * 48 + col
        )


def test_all_bits_of_the_seed_count_except_one():
    """Bit 63 of the second number is not read."""

    def bytes_for(*seed):
        random_bytes = reference.SeededRandomNumbers(torch.tensor(seed), 16)
        return random_bytes.rows(torch.arange(4)), random_bytes.tiles(torch.arange(1))

    base = bytes_for(0, 0)
    assert all(map(torch.equal, base, bytes_for(0, -(2**63))))
    for bit in range(63):
        for changed in (bytes_for(1 << bit, 0), bytes_for(0, 1 << bit)):
            assert not any(map(torch.equal, base, changed))
    assert not any(map(torch.equal, base, bytes_for(-(2**63), 0)))


def representative_values():
    """Return E2M1 values, 256 points between any two, their neighbors, and powers of two."""
    between = [
        a + (b - a) * i / 256 for a, b in itertools.pairwise(VALUES.double()) for i in range(257)
    ]
    exact = torch.stack(between).float()
    near = [torch.nextafter(exact, torch.full_like(exact, end)) for end in (-1.0, 7.0)]
    powers = torch.tensor([2.0**e for e in (-149, -127, -126, -60, -9, 3, 60, 127)])
    return torch.cat([exact, *near, powers, torch.tensor([torch.inf, 3.4028235e38, 6.0000005])])


def test_stochastic_rounding_by_every_byte():
    """Check stochastic rounding with each of the 256 random bytes."""
    y = representative_values()
    y = torch.cat([y, -y])[:, None]
    r = torch.arange(256, dtype=U8)
    codes = encode_e2m1_stochastic(*torch.broadcast_tensors(y, r))
    m = y.abs().double().clamp_max(6)
    t = torch.where(m < 2, 0.5, torch.where(m < 4, 1.0, 2.0)).double()
    assert torch.equal(
        VALUES[(codes & 7).long()].double(), ((m / t + r.double() / 256).floor() * t).clamp_max(6)
    )
    assert torch.equal(codes >= 8, torch.signbit(y).expand_as(codes))


def test_rounding_to_nearest_gives_the_values_of_codes():
    y = representative_values().abs()
    assert torch.equal(round_e2m1(y), VALUES[encode_e2m1(y).long()])
    assert round_e2m1(torch.tensor([torch.nan])).isnan()


@pytest.mark.parametrize("missing", ["rowwise", "columnwise"])
def test_missing_bytes_raise(missing):
    draws = reference.GivenRandomNumbers()
    with pytest.raises(ValueError, match=f"{missing} is None"):
        (draws.rows if missing == "rowwise" else draws.tiles)(torch.arange(1))


@pytest.mark.parametrize(
    ("text", "seed", "error", "message"),
    [
        (SR, None, ValueError, "seed is missing.*stochastic_rounding"),
        ("nvfp4", torch.tensor([1, 2]), ValueError, "seed is for stochastic rounding.*nvfp4"),
        (SR, torch.tensor(1), ValueError, "seed must have 1 dim"),
        (SR, torch.tensor([1, 2], dtype=torch.int32), TypeError, "seed must be int64, got int32"),
        (SR, torch.empty(2, dtype=torch.int64, device="meta"), ValueError, "device of x"),
    ],
)
def test_wrong_seeds_raise(text, seed, error, message):
    with pytest.raises(error, match=message):
        ops.grouped_quantize(sample(4, 32), text, offs_from_splits((4,)), seed=seed)
    weight = ops.grouped_quantize(sample(1, 16, 32), NVFP4().text)
    with pytest.raises(error, match=message.replace("device of x", "device of a")):
        ops.m_grouped_quantize_gemm(
            sample(4, 32), weight[0], offs_from_splits((4,)), weight[1:], text, "nvfp4", seed=seed
        )


def test_the_fused_op_uses_the_bytes_of_two_ops():
    """Check that the fused op uses the random bytes of separate ops."""
    x, offs, seed = sample(40, 32), offs_from_splits((25, 15)), torch.tensor([8, 9])
    weight = ops.grouped_quantize(sample(2, 16, 32), "nvfp4")
    copy = ops.grouped_quantize(x, SR, offs, seed=seed)
    want = ops.m_grouped_gemm(
        copy[0],
        weight[0],
        offs,
        a_scales=copy[1:],
        b_scales=weight[1:],
        a_format=SR,
        b_format="nvfp4",
    )
    got = ops.m_grouped_quantize_gemm(x, weight[0], offs, weight[1:], SR, "nvfp4", seed=seed)
    assert_same_bytes(got, want)
    assert np.isfinite(got.float().numpy()).all()


@pytest.mark.emulated
@needs_compiler
def test_the_ptx_instruction_rounds_by_the_same_bytes():
    """The emulator's model takes one byte at the top of each half of the random bits."""
    y = torch.cat([representative_values()[::5], torch.tensor([torch.nan, -0.3, -6.5])])
    y = torch.nn.functional.pad(torch.cat([y, -y]), (0, -2 * len(y) % 32))
    r = torch.randint(0, 256, y.shape, generator=seeded_generator(1))
    bits = (r << 8 | r << 24).numpy().astype(np.uint32)
    ptx = "cvt.rs.satfinite.e2m1x4.f32 %v, {%a0, %a0, %a0, %a0}, %a1; cvt.u32.u16 %out, %v;"
    got = elementwise(f".reg .b16 %v; {ptx}", y.numpy(), bits)
    want = encode_e2m1_stochastic(y, r.to(U8)).numpy().astype(np.uint32)
    assert (got == want * 0x1111).all()
