"""E2M1 encoding on every boundary between codes, against the reference."""

import pytest
import torch

from cute_kernels.reference.conversions import encode_e2m1, encode_e2m1_stochastic, pack_codes
from tests.helpers import DTYPES, F16, F32, I32, U8, each_arch, seeded_generator

from .quantize_support import compiled

from .encode_kernel import EncodeConfig  # isort: skip

#: Boundaries between codes, and numbers past the largest.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 40.0)


def near_ties(dtype):
    """Return blocks (N, 16) and factors (N,) whose products are within two ulps of a boundary."""
    generator = seeded_generator(4)
    mantissa = torch.arange(128) / 128 + 1
    boundary, mantissa, ulps = torch.meshgrid(
        torch.tensor(_BOUNDARIES), mantissa, torch.arange(-2.0, 3.0), indexing="ij"
    )
    factors = (boundary / mantissa).flatten()
    factors = (factors.view(I32) + ulps.flatten().int()).view(F32)
    count = len(factors)
    blocks = torch.rand(count, 16, generator=generator) * 2 - 1
    sign = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    position = torch.randint(0, 16, (count,), generator=generator)
    blocks[::3, 5], blocks[1::3, 5] = 0.0, -0.0
    blocks[torch.arange(count), position] = mantissa.flatten() * sign
    power = 10 if dtype == F16 else 100
    shift = torch.randint(-power, power + 1, (count,), generator=generator).float()
    factors = (factors.double() * torch.exp2(-shift.double())).float()
    return (blocks.to(dtype).double() * torch.exp2(shift.double())[:, None]).to(dtype), factors


def check_codes(blocks, factors, dtype):
    assert encode_blocks(EncodeConfig(dtype), blocks, factors).equal(
        pack_codes(encode_e2m1(blocks.float() * factors[:, None]))
    )


def encode_blocks(config, blocks, factors, random_bytes=None):
    """Return the codes of the kernel, (N, 8) bytes."""
    out = torch.zeros(len(blocks), 8, dtype=U8)
    block_bytes = torch.zeros(len(blocks), 16, dtype=U8) if random_bytes is None else random_bytes
    compiled(config)(
        blocks.view(torch.uint32), factors, block_bytes.view(torch.uint32), out.view(torch.uint32)
    )
    return out


@each_arch
def test_stochastic_codes_near_every_boundary(arch):
    """Numbers at k/256 between codes and two ulps around, with random bytes near 256 - k."""
    low = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0])
    k, ulps = torch.arange(256), torch.arange(-2, 3, dtype=I32)
    y = (low[:, None] + step[:, None] * k / 256).flatten().clamp_min_(2.0**-100)
    y = (y.view(I32)[:, None, None] + ulps[:, None]).view(F32)
    random_bytes = (256 - k.repeat(8))[:, None, None] + torch.tensor([-1, 0, 1, 100])
    y, random_bytes = y.expand(-1, -1, 4).flatten(), random_bytes.expand(-1, 5, -1).flatten()
    sign = 1.0 - 2.0 * (torch.arange(len(y)) % 3 == 0)
    special = torch.tensor([0.0, -0.0, 1e30, -1e38, torch.inf, -torch.inf, torch.nan, 1e-45])
    y, random_bytes = (
        torch.cat([y * sign, special.repeat(2)]),
        torch.cat([random_bytes, torch.arange(16) * 17]),
    )
    y, random_bytes = y.view(-1, 16), random_bytes.clamp(0, 255).to(U8).view(-1, 16)
    got = encode_blocks(
        EncodeConfig("float32", arch, is_stochastic=True), y, torch.ones(len(y)), random_bytes
    )
    assert got.equal(pack_codes(encode_e2m1_stochastic(y, random_bytes)))


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_codes_near_every_tie(dtype):
    check_codes(*near_ties(DTYPES[dtype]), dtype)


def test_codes_near_every_fp16_boundary():
    """sm_90a rounds y to fp16 first; test y within two ulps of each of those roundings."""
    halves = torch.arange(0x0E20, dtype=torch.int16).view(F16).double()
    borders = ((halves[1:] + halves[:-1]) / 2 * 2**14 * 512 / 513).float()
    y = torch.cat([(borders.view(I32) + ulps).view(F32) for ulps in range(-2, 3)])
    blocks = torch.stack([y, -y]).T.flatten()
    blocks = blocks[: len(blocks) // 16 * 16].view(-1, 16).contiguous()
    check_codes(blocks, torch.ones(len(blocks)), "float32")
