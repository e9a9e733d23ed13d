"""Configurations of sm_100a GEMMs: limits, errors and the choice of a tile. Needs no CuTe DSL."""

from dataclasses import replace

import pytest

from cute_kernels.capability import support
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block
from cute_kernels.kernels.gemm.choose import choose_config, estimated_cycles, preferred_tiles
from cute_kernels.kernels.gemm.common.operand_kinds import OPERANDS, operand_of
from cute_kernels.kernels.gemm.common.problem import GemmProblem
from cute_kernels.kernels.gemm.sm100.config import (
    SM100_TILES,
    TMEM_COLUMNS,
    Sm100GemmConfig,
    Sm100Tile,
)

BASES = [
    *(
        Sm100GemmConfig(operand, out_dtype=out)
        for operand, kind in OPERANDS.items()
        if support("grouped_gemm", kind.fmt, "sm_100a") and not kind.has_squares
        for out in ("bfloat16", "float32")
    ),
    *(
        Sm100GemmConfig("bfloat16", b_operand=operand, out_dtype="float32")
        for operand, kind in OPERANDS.items()
        if kind.fmt is not None
    ),
    *(Sm100GemmConfig(operand, b_operand="nvfp4") for operand in ("fp8", "fp8_block", "mxfp8")),
]
CONFIGS = [
    replace(base, tile=tile)
    for base in BASES
    for tile in SM100_TILES
    if not base.why_unsupported(tile)
]
PROBLEM = GemmProblem("nvfp4", "m_grouped", "bfloat16", groups=32, rows=4096, n=4096, k=7168)
NUM_SMS = 148


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_fits_shared_and_tensor_memory(config):
    """Check that every tile fits into shared memory and tensor memory."""
    # Four warps each stage 32 rows of 128 bytes, or 32 rows of 32 columns for swapped operands.
    staged = 4 * config.num_store_stage * 32 * 128
    if config.tile.swap_ab:
        staged = 4 * 32 * 32 * (4 if config.out_dtype == "float32" else 2)
    assert config.num_ab_stage >= 3
    stages = config.num_ab_stage * config.stage_bytes
    if config.codes:
        assert config.num_codes_stage >= 3
        stages += config.num_codes_stage * config.codes_stage_bytes
    assert stages + staged <= 227 * 1024 - 2048
    used = 2 * config.tile.n - config.acc_overlap + sum(config.sf_columns)
    assert used <= TMEM_COLUMNS
    # The epilogue releases shared columns before it has read half of an accumulator.
    assert config.acc_overlap <= config.tile.n // 2


def test_operand_kinds_follow_element_and_scale():
    """Check that the operand kind follows from the element and its scales."""
    for fmt in (NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16))):
        assert operand_of(fmt) is OPERANDS["nvfp4"]
    bounds = NVFP4(four_over_six=True, e4m3_max=448), NVFP4(four_over_six=True)
    kinds = [operand_of(fmt) for fmt in bounds]
    assert [kind.global_scale_factor for kind in kinds] == [1 / 2688, 1 / 1536]
    assert kinds[0] is OPERANDS["nvfp4"]
    for fmt in (FP8(), FP8(scaling="delayed")):
        assert operand_of(fmt) is OPERANDS["fp8"]
    for block, squares in (((1, 128), False), ((128, 128), True)):
        for fmt in (FP8Block(block), FP8Block(block, pow2_scales=False)):
            kind = operand_of(fmt)
            assert (kind.fmt, kind.has_row_scales, kind.has_squares) == (
                FP8Block(block),
                True,
                squares,
            )
    assert operand_of(MXFP8(block=(32, 32))) is OPERANDS["mxfp8"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operand": "int8"}, "operand"),
        ({"operand": "fp8_block:block=128x128"}, "each row"),
        ({"operand": "fp8_block", "tile": Sm100Tile(128, 128, swap_partial=True)}, "cannot have"),
        ({"b_operand": "bfloat16"}, "not multiplied by bfloat16"),
        ({"operand": "bfloat16", "b_operand": "nvfp4", "grouping": "k_grouped"}, "multiplied"),
        ({"operand": "bfloat16", "b_operand": "mxfp8", "transpose_b": True}, "along K"),
        ({"grouping": "k_grouped", "row_scaled": True}, "row_scaled"),
        ({"grouping": "k_grouped", "bias_dtype": "float32"}, "bias"),
        ({"transpose_b": True}, "transpose_b"),
        ({"activation": "swiglu", "quantizes_to": "fp8"}, "single rows"),
        ({"zero_tail": True, "accumulate": True}, "zero_tail"),
        ({"grouping": "k_grouped", "tile": Sm100Tile(128, 32, swap_ab=True)}, "swap_ab"),
        ({"grouping": "k_grouped", "tile": Sm100Tile(128, 128, swap_partial=True)}, "swap_partial"),
    ],
)
def test_invalid_configurations_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        Sm100GemmConfig(**{"operand": "nvfp4"} | fields)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"n": 4100}, "N must be"),
        ({"k": 7176}, "K must be"),
        ({"k": 0}, "K must be"),
        ({"rows": 0}, "one row"),
        ({"groups": 0}, "one group"),
        ({"out_dtype": "float32"}, "compiled for"),
        ({"groups": 2**29, "n": 2**16}, "tiles"),
    ],
)
def test_can_implement_gives_a_reason(fields, reason):
    """Check that ``can_implement`` gives a reason."""
    config = Sm100GemmConfig("nvfp4")
    assert config.can_implement(PROBLEM)
    support = config.can_implement(replace(PROBLEM, **fields))
    assert not support and reason in support.reason


def test_can_implement_bounds_ragged_k():
    """Check the largest ragged K that ``can_implement`` accepts."""
    config = Sm100GemmConfig("bfloat16", grouping="k_grouped", out_dtype="float32")
    problem = GemmProblem("bfloat16", "k_grouped", "float32", groups=2, rows=2**30, n=64, m=64)
    assert config.can_implement(problem)
    for fields in ({"rows": 2**30 + 1}, {"m": 60}):
        assert not config.can_implement(replace(problem, **fields))


@pytest.mark.parametrize(
    "rows_per_group, tile",
    [
        (1, Sm100Tile(128, 32, swap_ab=True)),
        (32, Sm100Tile(128, 32, swap_ab=True)),
        (64, Sm100Tile(128, 64, swap_ab=True)),
        (128, Sm100Tile(128, 128, swap_partial=True)),
        (200, Sm100Tile(256, 256, 2, swap_partial=True)),
        (4096, Sm100Tile(256, 256, 2, swap_partial=True)),
    ],
)
def test_the_tile_follows_the_rows_of_a_group(rows_per_group, tile):
    """Check that the chosen tile follows from the rows per group."""
    problem = replace(PROBLEM, rows=rows_per_group * PROBLEM.groups)
    chosen = choose_config(Sm100GemmConfig("nvfp4"), problem, NUM_SMS)
    assert chosen.tile == tile
    alternatives = (replace(chosen, tile=tile) for tile in preferred_tiles(chosen))
    costs = [estimated_cycles(config, problem, NUM_SMS) for config in alternatives]
    assert estimated_cycles(chosen, problem, NUM_SMS) == min(costs)


def test_a_tile_can_be_forced_and_is_checked():
    """Check that a tile can be forced, and that its limits are checked."""
    base = Sm100GemmConfig("nvfp4")
    for tile in SM100_TILES:
        assert choose_config(base, PROBLEM, NUM_SMS, tile).tile == tile
    with pytest.raises(ValueError, match="K must be"):
        choose_config(base, replace(PROBLEM, k=8), NUM_SMS)
    with pytest.raises(ValueError, match="2 CTAs need"):
        choose_config(base, PROBLEM, 1, Sm100Tile(256, 256, 2))
    assert choose_config(base, PROBLEM, 1).tile.num_ctas == 1
