"""The sm_90a variants of the quantizers on the emulator, byte for byte against the reference."""

from __future__ import annotations

import functools

import pytest
import torch

from cute_kernels import emulator
from cute_kernels.quantize import AmaxConfig, RowScaledConfig, TileConfig
from tests.kernels import test_amax as test_amax_module
from tests.kernels.quantize_support import Problem, random_input, special_input
from tests.kernels.test_quantize_nvfp4 import (
    DTYPES,
    RAGGED,
    VARIANTS,
    check_rows,
    check_tiles,
    ragged,
)

Tiles = functools.partial(TileConfig, arch="sm_90a")
Rows = functools.partial(RowScaledConfig, arch="sm_90a")
MODES = [{"mode": "chaos", "seed": seed} for seed in range(2)] + [{"races": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles(variant: str) -> None:
    config = Tiles("bfloat16", **VARIANTS[variant])
    for case in ("odd rows, K past a scale tile", "empty first, middle, last", "tail"):
        check_tiles(config, ragged(case))


def test_uniform_groups() -> None:
    problem = Problem(random_input((2, 140, 80), torch.bfloat16), None)
    check_tiles(Tiles("bfloat16", "uniform", columnwise=True, compute_amax=True), problem)
    check_rows(Rows("bfloat16", "uniform", warps_per_row=1), problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype: str) -> None:
    for case in RAGGED:
        check_rows(Rows(dtype, warps_per_row=2), ragged(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: str) -> None:
    """NaN, infinities, denormals, groups that are all tiny; factors from the smallest to FMAX."""
    x = special_input(150, 128, DTYPES[dtype])
    x[8::7, 48:64] = -float("nan")
    tiny = torch.full((20, 128), torch.finfo(DTYPES[dtype]).tiny * 0.25, dtype=DTYPES[dtype])
    tiny[:, ::3] *= -0.5
    ends = torch.tensor([1, 2, 3, 40, 60, 150, 170], dtype=torch.int32)
    problem = Problem(torch.cat([x, tiny]), ends)
    check_tiles(Tiles(dtype, columnwise=True), problem)
    check_tiles(Tiles(dtype, square_blocks=True, columnwise=True), problem)
    check_rows(Rows(dtype, warps_per_row=1), problem)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_any_order(mode: dict) -> None:
    x = random_input((300, 528), torch.bfloat16)
    problem = Problem(x, torch.tensor([0, 130, 131, 290], dtype=torch.int32))
    with emulator.options(**mode):
        check_tiles(Tiles("bfloat16", columnwise=True, compute_amax=True), problem)
        check_rows(Rows("bfloat16", warps_per_row=4), problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype: str) -> None:
    x = special_input(300, 80, DTYPES[dtype])
    problem = Problem(x, torch.tensor([0, 3, 3, 130, 130, 290], dtype=torch.int32))
    test_amax_module.check(AmaxConfig(dtype, per_row=True, arch="sm_90a"), problem)
