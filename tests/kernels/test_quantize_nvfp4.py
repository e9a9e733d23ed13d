"""NVFP4 quantizers, by tiles and by rows, against the reference byte by byte."""

import dataclasses
import functools
import itertools

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.formats import NVFP4
from cute_kernels.kernels.quantize.config import RowsConfig, TileConfig
from tests.helpers import (
    BF16,
    DTYPES,
    each_arch,
    offs_of_many_groups,
    offs_tensor,
    seeded_generator,
)

from .op_support import ARCHITECTURES, array_of, check_touched, each_mode
from .quantize_support import (
    ARCH,
    NO_RESULTS,
    NO_TILE_RESULTS,
    Problem,
    assert_same_buffers,
    check,
    compiled,
    expected,
    quantize,
    ragged,
    ragged_cases,
    random_input,
    special_input,
)

ROW_SCALED, SQUARE = NVFP4(row_scaled=True).text, NVFP4(block=(16, 16)).text
STOCHASTIC = NVFP4(stochastic_rounding=True).text
#: Row-scaled, from bf16 by default.
Rows = functools.partial(RowsConfig, format=ROW_SCALED, dtype="bfloat16")
#: With amaxes of groups; only sm_90a has such row quantizers.
GivenRows = functools.partial(RowsConfig, "nvfp4", "bfloat16", arch="sm_90a")
RAGGED = ragged_cases("odd rows, K past a scale tile", 128, 16, 80, 48, 32, 144, 64)
UNIFORM = {"partial tiles": (2, 100, 112), "whole tiles": (1, 256, 64), "two tiles": (2, 129, 16)}
#: Arguments of ``tiles``.
VARIANTS = {
    "rowwise": {},
    "columnwise": {"rowwise": False, "columnwise": True},
    "both": {"columnwise": True},
    "row-scaled": {"format": ROW_SCALED},
    "row-scaled and columnwise": {"format": ROW_SCALED, "columnwise": True},
    "square": {"format": SQUARE},
    "square, both": {"format": SQUARE, "columnwise": True},
    "stochastic": {"format": STOCHASTIC, "columnwise": True},
    "Hadamard": {"format": "nvfp4:hadamard,stochastic_rounding", "columnwise": True},
    "stochastic, square": {"format": f"{SQUARE},stochastic_rounding", "columnwise": True},
    "4over6": {"format": f"{ROW_SCALED},four_over_six,four_over_six_error=mse", "columnwise": True},
    "4over6, square": {"format": f"{SQUARE},four_over_six,e4m3_max=448", "columnwise": True},
}
#: Uniform groups differ in the places and numbers of tiles; these variants cover both.
UNIFORM_VARIANTS = [v for v in VARIANTS if not v.startswith(("stochastic", "4over6"))]


def tiles(dtype="bfloat16", grouping="ragged", **changes):
    return TileConfig(**{"format": "nvfp4", "dtype": dtype, "grouping": grouping} | changes)


def problem_with_odd_groups(cols):
    return Problem(random_input((300, cols), BF16), offs_tensor(0, 130, 131, 290))


#: Variants that others contain; they run on one architecture only.
CONTAINED_VARIANTS = ("rowwise", "columnwise", "row-scaled", "square")


@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        (a, v)
        for v in VARIANTS
        for a in (ARCHITECTURES[-1:] if v in CONTAINED_VARIANTS else ARCHITECTURES)
    ],
)
def test_tiles_of_ragged_groups(arch, variant):
    for case in RAGGED.values():
        check(tiles(arch=arch, **VARIANTS[variant]), ragged(*case))


@pytest.mark.parametrize("variant", ["row-scaled and columnwise", "square, both"])
def test_teams_process_several_tiles_of_a_group(variant):
    x = random_input((670, 560), BF16) * torch.linspace(0.5, 40, 670)[:, None].bfloat16()
    x[400:530] *= 2.0**115
    check(
        tiles(arch="sm_90a", **VARIANTS[variant]),
        Problem(x, offs_tensor(400, 400, 530, 660)),
        num_sms=1,
    )


@pytest.mark.parametrize("variant", UNIFORM_VARIANTS)
def test_tiles_of_uniform_groups(variant):
    config = tiles("bfloat16", "uniform", **VARIANTS[variant])
    for shape in UNIFORM.values():
        check(config, Problem(random_input(shape, BF16), None))


@pytest.mark.parametrize(
    ("variant", "grouping", "arch"),
    [
        *itertools.product(
            ("both", "row-scaled and columnwise", "square"), ("ragged", "uniform"), (ARCH,)
        ),
        ("both", "uniform", "sm_90a"),
        *(("Hadamard", "ragged", arch) for arch in ARCHITECTURES),
    ],
)
def test_two_phases_compute_the_amaxes(variant, grouping, arch):
    config = tiles("bfloat16", grouping, compute_amax=True, arch=arch, **VARIANTS[variant])
    if grouping == "uniform":
        check(config, Problem(random_input((3, 40, 80), BF16), None))
    else:
        for case in ("tail", "empty first, middle, last", "all empty"):
            check(config, ragged(*RAGGED[case]))


@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize(("arch", "warps"), [(ARCH, 1), (ARCH, 2), ("sm_90a", 2)])
def test_rows_of_ragged_groups(arch, warps, dtype):
    config = Rows(dtype=dtype, warps_per_row=warps, arch=arch)
    for case in RAGGED.values():
        check(config, ragged(*case, dtype))


@pytest.mark.parametrize(("warps", "rows"), [(1, 4), (1, 1), (2, 1)])
def test_rows_with_amaxes_of_groups(warps, rows):
    config = GivenRows(warps_per_row=warps, rows_per_warp=rows)
    for case in RAGGED.values():
        check(config, ragged(*case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_several_rows_per_warp(dtype, rows):
    config = Rows(dtype=dtype, warps_per_row=1, rows_per_warp=rows)
    generator = seeded_generator(7)
    for cols in (16, config.max_cols - 48, config.max_cols):
        # End rows that leave every number of rows in the last row batch of a tile.
        offs = torch.randint(0, 120, (6,), generator=generator).cumsum(0).int()
        check(config, Problem(random_input((int(offs[-1]) + 3, cols), DTYPES[dtype]), offs))


def test_rows_up_to_16384():
    for dtype in ("bfloat16", "float32"):
        config = Rows(dtype=dtype, warps_per_row=8 if dtype == "bfloat16" else 16)
        assert config.max_cols == 16384
        check(config, Problem(random_input((10, 16384), DTYPES[dtype]), offs_tensor(9, 10)))


@each_arch
def test_rows_of_uniform_groups(arch):
    config = Rows(grouping="uniform", warps_per_row=1, arch=arch)
    for shape in UNIFORM.values():
        check(config, Problem(random_input(shape, BF16), None))


@pytest.mark.parametrize("dtype", [*DTYPES])
@each_arch
def test_special_values(arch, dtype):
    """Quantize infinity, NaN, and tiny values whose encode factor is clamped."""
    x = special_input(150, 128, DTYPES[dtype])
    x[8::7, 48:64] = -torch.nan
    # The last group has tiny values only: its encode factor is clamped to FMAX.
    tiny = torch.full((20, 128), torch.finfo(DTYPES[dtype]).tiny * 0.25, dtype=DTYPES[dtype])
    tiny[:, ::3] *= -0.5
    problem = Problem(torch.cat([x, tiny]), offs_tensor(1, 2, 3, 40, 60, 150, 170))
    check(tiles(dtype, columnwise=True, arch=arch), problem)
    check(tiles(dtype, format=SQUARE, columnwise=True, arch=arch), problem)
    if dtype == "bfloat16":
        for variant in ("stochastic, square", "Hadamard", "4over6", "4over6, square"):
            check(tiles(arch=arch, **VARIANTS[variant]), problem)
    check(Rows(dtype=dtype, warps_per_row=1, arch=arch), problem)


@pytest.mark.parametrize(
    "variant",
    [
        "both",
        "row-scaled and columnwise",
        "square, both",
        "stochastic",
        "Hadamard",
        "4over6",
        "4over6, square",
    ],
)
@each_arch
def test_nan_scales_of_tiles(arch, variant):
    """NaN marks blocks, rows and groups; finite numbers have the bytes of the unmarked format."""
    config = tiles(arch=arch, **{"compute_amax": True} | VARIANTS[variant])
    config = dataclasses.replace(
        config, format=dataclasses.replace(config.fmt, nan_scales=True).text
    )
    x = special_input(170, 128, BF16)
    x[40:60] = random_input((20, 128), BF16)
    problem = Problem(x, offs_tensor(1, 2, 3, 40, 60, 150))
    check(config, problem)
    want = expected(problem, config.fmt, True, True)
    assert want["amax"][:150].isnan().any() and not want["amax"][:150].isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES])
@each_arch
def test_nan_scales_of_rows(arch, dtype):
    config = Rows(format=f"{ROW_SCALED},nan_scales", dtype=dtype, warps_per_row=1, arch=arch)
    check(
        config, Problem(special_input(170, 128, DTYPES[dtype]), offs_tensor(1, 2, 3, 40, 60, 150))
    )


def test_given_amaxes_may_differ_from_the_true_ones():
    check(tiles(columnwise=True), ragged(*RAGGED["tail"]), torch.tensor([1e-3, 3.0, 1e30]))


@pytest.mark.parametrize("kind", ["rows", "tiles"])
def test_more_than_a_thousand_groups(kind):
    offs = offs_of_many_groups()
    problem = Problem(random_input((int(offs[-1]) + 5, 16), BF16), offs)
    if kind == "rows":
        check(Rows(warps_per_row=1), problem)
    else:
        check(tiles(columnwise=True, compute_amax=True), problem)


@each_mode
@pytest.mark.parametrize(
    ("arch", "variant", "cols"),
    [
        # One CTA has two more column tiles than stages.
        *((ARCH, v, 1040) for v in ("both", "row-scaled and columnwise", "square, both")),
        *(
            (arch, v, 528)
            for arch in ARCHITECTURES
            for v in ("Hadamard", "4over6", "4over6, square")
        ),
        ("sm_90a", "both", 528),
    ],
)
def test_tiles_in_any_order(arch, variant, cols, mode):
    check(
        tiles(compute_amax="4over6" not in variant, arch=arch, **VARIANTS[variant]),
        problem_with_odd_groups(cols),
        **mode,
    )


@each_arch
def test_bands_of_tiles_without_rows(arch):
    """Check groups whose tiles leave whole bands without rows."""
    band = TileConfig.band
    offs = [60, *[60] * (12 * band), 700, *[700] * (band // 2), 830, 1500, *[1500] * (2 * band)]
    problem = Problem(random_input((1600, 272), BF16), offs_tensor(*offs))
    config = tiles(columnwise=True, arch=arch)
    want = expected(problem, NVFP4(), True, True)
    for num_sms in (1, 3):
        with emulator.options(num_sms=num_sms):
            assert_same_buffers(quantize(config, problem), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_may_complete_out_of_order(dtype):
    """Rowwise teams never synchronize, so one can be ahead of a load that another waits for."""
    config = tiles(dtype, compute_amax=True)
    problem = Problem(
        random_input((520, 528), DTYPES[dtype]), offs_tensor(6, 6, 134, 262, 390, 519)
    )
    want = expected(problem, NVFP4(), True, False)
    for seed in range(12):
        with emulator.options(mode="chaos", seed=seed, num_sms=1):
            assert_same_buffers(quantize(config, problem), want)


@each_mode
@pytest.mark.parametrize(
    "config",
    [
        *(Rows(warps_per_row=w, rows_per_warp=rows) for w, rows in ((1, 1), (4, 1), (1, 4))),
        *(make(warps_per_row=4, arch="sm_90a") for make in (Rows, GivenRows)),
    ],
    ids=str,
)
def test_rows_in_any_order(config, mode):
    check(config, problem_with_odd_groups(496), **mode)


@pytest.mark.parametrize("kind", ["rows", "tiles"])
def test_only_rows_of_groups_are_touched(kind):
    """At most one tile's box of x is read in the tail, and nothing outside the buffers."""
    problem = ragged(*RAGGED["tail"])
    live = int(problem.offs[-1]) if kind == "rows" else int(problem.offs[-2]) + 128
    if kind == "rows":
        config = Rows(warps_per_row=2)
        out = problem.buffers(NVFP4(row_scaled=True), True, False)
        copy = (out["amax"], out["codes"], out["scales"])
        args = (*problem.inputs, *copy, *NO_RESULTS, 2)
    else:
        config = tiles(columnwise=True, compute_amax=True)
        out = problem.buffers(NVFP4(), True, True)
        names = ("amax_t", "codes", "scales", "codes_t", "scales_t")
        args = (*problem.inputs, None, *(out[n] for n in names), *NO_TILE_RESULTS, 2)
    kernel, readable = compiled(config), (problem.offs, *out.values())
    check_touched(lambda: kernel(*args), [array_of(problem.x)[:live]], readable)


def test_invalid_end_rows_stay_in_the_buffers():
    """Check that invalid end rows are clamped to the buffers."""
    x = random_input((140, 64), BF16)
    clamped = Problem(x, offs_tensor(0, 20, 140, 140))
    config, rows = tiles(columnwise=True), Rows()
    outside = Problem(x, offs_tensor(-5, 20, 1000, 2**31 - 1))
    assert_same_buffers(quantize(config, outside), expected(clamped, NVFP4(), True, True))
    fmt = NVFP4(row_scaled=True)
    assert_same_buffers(quantize(rows, outside), expected(clamped, fmt, True, False))
    two_phase = dataclasses.replace(config, format=ROW_SCALED, compute_amax=True)
    for quantizer in (two_phase, rows):
        quantize(quantizer, Problem(x, offs_tensor(100, 20, -7, 130)))
