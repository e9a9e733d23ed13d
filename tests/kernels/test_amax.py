"""Kernels of grouped_amax and compute_offsets, against the reference."""

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.kernels.quantize.pass_config import AmaxConfig, OffsetsConfig
from cute_kernels.reference.absmax import absmax
from cute_kernels.reference.reductions import compute_offsets, grouped_amax
from tests.helpers import (
    BF16,
    DTYPES,
    I32,
    each_arch,
    offs_of_many_groups,
    offs_tensor,
    seeded_generator,
)

from .op_support import MODES
from .quantize_support import Problem, compiled, random_input, special_input


def check(config, problem, num_sms=2):
    """Compare the amaxes of rows and groups; rows of no group must stay unchanged."""
    groups = problem.groups
    row_amax = torch.full((len(problem.matrix),), -7.0) if config.per_row else None
    group_amax = torch.full((len(groups),), -7.0) if config.per_group else None
    compiled(config)(problem.x, problem.offs, row_amax, group_amax, num_sms)
    if group_amax is not None:
        want = torch.empty(len(groups))
        grouped_amax(problem.matrix, groups, want)
        assert group_amax.equal(want)
    if row_amax is not None:
        want = absmax(problem.matrix)
        want[groups.group_of_row() == len(groups)] = -7.0
        assert row_amax.equal(want)


@pytest.mark.parametrize("dtype", [*DTYPES])
@each_arch
def test_amaxes_of_rows_and_groups(arch, dtype):
    config = AmaxConfig(dtype, per_row=True, arch=arch)
    for rows, cols, offs in (
        (300, 80, offs_tensor(0, 3, 3, 130, 130, 290)),
        (100, 16, offs_tensor(0, 0, 0)),
        (40, 2064, offs_tensor(1, 2, 40)),
        (1, 16, offs_tensor(1)),
    ):
        check(config, Problem(special_input(rows, cols, DTYPES[dtype]), offs))


@pytest.mark.parametrize("per_row", [False, True])
def test_amaxes_of_either_rows_or_groups(per_row):
    config = AmaxConfig("bfloat16", per_row=per_row, per_group=not per_row)
    check(config, Problem(random_input((90, 48), BF16), offs_tensor(30, 30, 71)))


def test_amaxes_of_uniform_groups():
    check(AmaxConfig("bfloat16", "uniform"), Problem(random_input((5, 7, 48), BF16), None))


def test_many_groups_in_chaos_and_races():
    """Check the amaxes of many groups in chaos mode and for data races."""
    offs = offs_of_many_groups()
    problem = Problem(random_input((int(offs[-1]) + 9, 16), BF16), offs)
    config = AmaxConfig("bfloat16", per_row=True)
    check(config, problem, num_sms=1)
    for mode in MODES:
        with emulator.options(**mode):
            check(config, problem)


@pytest.mark.parametrize("out", [I32, torch.int64])
@pytest.mark.parametrize("splits", [I32, torch.int64])
def test_offsets_and_their_saturation(splits, out):
    kernel = compiled(OffsetsConfig(*(str(d).removeprefix("torch.") for d in (splits, out))))
    largest_split, largest, generator = (
        torch.iinfo(splits).max,
        torch.iinfo(out).max,
        seeded_generator(3),
    )
    for multiplier in (1, 3, 4096, 1 << 20, (1 << 31) - 1):
        limit = largest // multiplier
        for sizes in (
            *(
                torch.randint(0, 50, (count,), generator=generator).tolist()
                for count in (1, 31, 33, 1024, 2100)
            ),
            [1 << 20, 1 << 30, 1 << 30, *[-(1 << 30)] * 5],
            [limit - 2, 1, 1, 1, -limit, -limit, -limit],
        ):
            if max(map(abs, sizes)) > largest_split:
                continue
            counts = torch.tensor(sizes, dtype=splits)
            got, want = torch.full((2, len(sizes)), -1, dtype=out)
            kernel(counts, got, multiplier)
            compute_offsets(counts, multiplier, want)
            assert got.equal(want)


def test_offsets_in_any_order():
    kernel = compiled(OffsetsConfig("int32", "int32"))
    sizes = torch.arange(2100, dtype=I32) % 7
    for mode in MODES:
        got = torch.empty_like(sizes)
        with emulator.options(**mode):
            kernel(sizes, got, 1)
        assert got.equal(sizes.cumsum(0).int())
