"""The sm_90a variants of the quantizers on the emulator, byte for byte against the reference."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor

from cute_kernels import emulator
from cute_kernels.quantize import AmaxConfig, RowsConfig, TileConfig
from cute_kernels.reference.conversions import encode_e2m1, pack_codes
from perf.compiled import compile_for_emulator
from perf.cubin import read_resources
from tests.helpers import DTYPES, ends
from tests.kernels import test_amax as test_amax_module
from tests.kernels.quantize_counts import count
from tests.kernels.quantize_support import (
    Problem,
    check_rows,
    check_tiles,
    compiled,
    random_input,
    special_input,
)

from tests.kernels.encode_kernel import EncodeConfig  # isort: skip
from tests.kernels.test_quantize_nvfp4 import (
    RAGGED,
    ROW_SCALED,
    SQUARE,
    VARIANTS,
    ragged,
    tiles,
)

Tiles = functools.partial(tiles, arch="sm_90a")
Rows = functools.partial(RowsConfig, ROW_SCALED, arch="sm_90a")
GivenRows = functools.partial(RowsConfig, "nvfp4", arch="sm_90a")
MODES = [{"mode": "chaos", "seed": seed} for seed in range(2)] + [{"races": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles(variant: str) -> None:
    config = Tiles("bfloat16", **VARIANTS[variant])
    for case in ("odd rows, K past a scale tile", "empty first, middle, last", "tail"):
        check_tiles(config, ragged(case))


@pytest.mark.parametrize("variant", ["row-scaled and columnwise", "square, both"])
def test_teams_go_from_tile_to_tile_of_a_group(variant: str) -> None:
    """What a team keeps of its group serves all tiles of the group, and no other's."""
    config = Tiles("bfloat16", **VARIANTS[variant])
    x = random_input((670, 560), torch.bfloat16) * torch.linspace(0.5, 40, 670)[:, None].bfloat16()
    x[400:530] *= 2.0**115
    problem = Problem(x, ends(400, 400, 530, 660))
    with emulator.options(num_sms=1):
        check_tiles(config, problem)


def test_uniform_groups() -> None:
    problem = Problem(random_input((2, 140, 80), torch.bfloat16), None)
    check_tiles(Tiles("bfloat16", "uniform", columnwise=True, compute_amax=True), problem)
    check_rows(Rows("bfloat16", "uniform", warps_per_row=1), problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype: str) -> None:
    for case in RAGGED:
        check_rows(Rows(dtype, warps_per_row=2), ragged(case, dtype))


@pytest.mark.parametrize(("warps", "rows"), [(1, 4), (1, 1), (2, 1)])
def test_rows_with_amaxes_of_groups(warps: int, rows: int) -> None:
    config = GivenRows("bfloat16", warps_per_row=warps, rows_per_warp=rows)
    for case in RAGGED:
        check_rows(config, ragged(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: str) -> None:
    """NaN, infinities, denormals, groups that are all tiny; factors from the smallest to FMAX."""
    x = special_input(150, 128, DTYPES[dtype])
    x[8::7, 48:64] = -float("nan")
    tiny = torch.full((20, 128), torch.finfo(DTYPES[dtype]).tiny * 0.25, dtype=DTYPES[dtype])
    tiny[:, ::3] *= -0.5
    offs = ends(1, 2, 3, 40, 60, 150, 170)
    problem = Problem(torch.cat([x, tiny]), offs)
    check_tiles(Tiles(dtype, columnwise=True), problem)
    check_tiles(Tiles(dtype, format=SQUARE, columnwise=True), problem)
    check_rows(Rows(dtype, warps_per_row=1), problem)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_any_order(mode: dict) -> None:
    x = random_input((300, 528), torch.bfloat16)
    problem = Problem(x, ends(0, 130, 131, 290))
    with emulator.options(**mode):
        check_tiles(Tiles("bfloat16", columnwise=True, compute_amax=True), problem)
        check_rows(Rows("bfloat16", warps_per_row=4), problem)
        check_rows(GivenRows("bfloat16", warps_per_row=4), problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype: str) -> None:
    x = special_input(300, 80, DTYPES[dtype])
    problem = Problem(x, ends(0, 3, 3, 130, 130, 290))
    test_amax_module.check(AmaxConfig(dtype, per_row=True, arch="sm_90a"), problem)


#: Where two codes meet, and past the largest.
_MEETINGS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 40.0)


def near_ties(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks (N, 16), and factors (N,) that take one element within two ulps of a tie."""
    generator = torch.Generator().manual_seed(4)
    mantissa = torch.arange(128) / 128 + 1
    meeting, mantissa, ulps = torch.meshgrid(
        torch.tensor(_MEETINGS), mantissa, torch.arange(-2.0, 3.0), indexing="ij"
    )
    factors = (meeting / mantissa).flatten()
    factors = (factors.view(torch.int32) + ulps.flatten().int()).view(torch.float32)
    count = len(factors)
    blocks = torch.rand(count, 16, generator=generator) * 2 - 1
    sign = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1
    place = torch.randint(0, 16, (count,), generator=generator)
    blocks[::3, 5], blocks[1::3, 5] = 0.0, -0.0
    blocks[torch.arange(count), place] = mantissa.flatten() * sign
    power = 10 if dtype == torch.float16 else 100
    shift = torch.randint(-power, power + 1, (count,), generator=generator).float()
    factors = (factors.double() * torch.exp2(-shift.double())).float()
    return (blocks.to(dtype).double() * torch.exp2(shift.double())[:, None]).to(dtype), factors


def check_codes(blocks: Tensor, factors: Tensor, dtype: str) -> None:
    """Compare the codes of blocks (N, 16) with the reference's."""
    want = pack_codes(encode_e2m1(blocks.float() * factors[:, None]))
    assert torch.equal(encoded(EncodeConfig(dtype), blocks, factors), want)


def encoded(config: EncodeConfig, blocks: Tensor, factors: Tensor) -> Tensor:
    """Codes of blocks (N, 16); zeros where there are none."""
    out = torch.zeros(len(blocks), 8, dtype=torch.uint8)
    compiled(config)(blocks.view(torch.uint32), factors, out.view(torch.uint32))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_beside_every_tie(dtype: str) -> None:
    check_codes(*near_ties(DTYPES[dtype]), dtype)


def test_codes_beside_every_border_of_fp16() -> None:
    """Where the fp16 number that stands for y changes, and two ulps to either side."""
    halves = torch.arange(0x0E20, dtype=torch.int16).view(torch.float16).double()
    borders = ((halves[1:] + halves[:-1]) / 2 * 2**14 * 512 / 513).float()
    y = torch.cat([(borders.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)])
    blocks = torch.stack([y, -y]).T.flatten()
    blocks = blocks[: len(blocks) // 16 * 16].view(-1, 16).contiguous()
    check_codes(blocks, torch.ones(len(blocks)), "float32")


#: Most PTX instructions an element; 17.5 would fill an H200 at its copy rate, rowwise.
BUDGETS = {
    "rowwise": (GivenRows("bfloat16", warps_per_row=2), 11),
    "row-scaled": (Rows("bfloat16", warps_per_row=2), 11),
    "row and column": (Tiles("bfloat16", columnwise=True), 19.5),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_counted_cost(name: str) -> None:
    config, instructions = BUDGETS[name]
    x = torch.randn(256, 4096).bfloat16()
    counts = count(config, "sm_90a", x, ends(128, 256))
    assert counts.instructions <= instructions
    assert counts.bytes_read <= 2.1
    assert counts.store_sectors >= (0.98 if isinstance(config, TileConfig) else 0.85)
    assert counts.conflicts <= 0.1
    code = compile_for_emulator(config, "sm_90a")
    assert not re.findall(r"\.ftz|\.approx|e2m1", code.ptx)
    for function, resources in read_resources(code.cubin).items():
        assert resources.stack_bytes == 0, function
