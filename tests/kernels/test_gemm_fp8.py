"""FP8 GEMMs of sm_90a against the tensor-core reference, emulated and on a Hopper GPU."""

from dataclasses import astuple, replace

import pytest

from cute_kernels.kernels.gemm.choose import choose_config
from cute_kernels.kernels.gemm.common.problem import GemmProblem
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES, Sm90GemmConfig

from .gemm_support import (
    SHAPES,
    WGRAD_SHAPES,
    check_modes,
    k_grouped,
    m_grouped,
    product_of,
    randomize_codes_and_scales,
)
from .op_support import MODES
from .test_gemm_sm90 import ADDS, FPROP, K_TILES, M_TILES, SPREAD, flops, tile_name

SQUARES = "fp8_block:block=128x128"
FAST = Sm90GemmConfig("fp8", tile=M_TILES["256x32"])
FAST_ALL = Sm90GemmConfig(
    "fp8",
    b_operand="fp8:dtype=e5m2",
    out_dtype="float16",
    bias_dtype="float32",
    tile=M_TILES["256x128x2"],
    **ADDS,
)
SPLIT = Sm90GemmConfig("fp8:dtype=e5m2", b_operand="fp8", split=True, tile=M_TILES["128x128"])
BLOCK = Sm90GemmConfig("fp8_block", b_operand=SQUARES, pow2_scales=True, tile=M_TILES["256x16"])
BLOCK_ALL = Sm90GemmConfig(
    "fp8_block",
    b_operand=SQUARES,
    out_dtype="float32",
    bias_dtype="bfloat16",
    tile=M_TILES["128x256x2"],
    **ADDS,
)
#: A has block scales of 128x128.
SQUARES_TIMES_ROWS = Sm90GemmConfig(
    SQUARES, b_operand="fp8_block:dtype=e5m2", tile=M_TILES["128x128"]
)
UNSWAPPED = replace(BLOCK, out_dtype="float16", bias_dtype="bfloat16", tile=K_TILES["128x256x2"])
UNSWAPPED_ALL = replace(
    FAST_ALL, out_dtype="float32", bias_dtype="float16", tile=K_TILES["128x256"]
)
ROWS = Sm90GemmConfig("fp8_block", pow2_scales=True, tile=M_TILES["256x64"])
FPROPS = {
    "fast": FAST,
    "fast, all": FAST_ALL,
    "split": SPLIT,
    "block": BLOCK,
    "block, all": BLOCK_ALL,
    "squares x rows": SQUARES_TIMES_ROWS,
    "rows x rows": ROWS,
    "unswapped": UNSWAPPED,
    "unswapped fast, all": UNSWAPPED_ALL,
}
DYNAMIC = {
    "fast": replace(FAST, tile=M_TILES["256x128x2"]),
    "fast, all": FAST_ALL,
    "fast, spread": replace(FAST, tile=M_TILES["256x160x2 fitted"]),
    "fast, all, spread": replace(FAST_ALL, tile=M_TILES["256x160 fitted"]),
    "block": replace(UNSWAPPED, tile=K_TILES["128x256"]),
    "block, all": replace(BLOCK_ALL, tile=K_TILES["128x128"]),
}
WGRAD = Sm90GemmConfig("fp8_block", "k_grouped", out_dtype="float32", tile=K_TILES["128x128"])
WGRADS = {
    "fast": Sm90GemmConfig("fp8", "k_grouped", tile=K_TILES["128x256"]),
    "split": replace(
        SPLIT, grouping="k_grouped", out_dtype="float32", tile=K_TILES["128x128"], **ADDS
    ),
    "block": WGRAD,
    "block, wide": replace(WGRAD, pow2_scales=True, tile=K_TILES["128x256x2"]),
    "rows x squares": replace(WGRAD, b_operand=SQUARES, accumulate=True),
    "squares x rows": replace(WGRAD, operand=SQUARES, b_operand="fp8_block", pow2_scales=True),
}


@pytest.mark.parametrize(
    "sizes",
    [[257, 0, 1, 64, 129, 0, 65, 128], [1] * 33 + [130] + [0] * 30 + [7]],
    ids=["uneven", "two windows"],
)
@pytest.mark.parametrize("config", DYNAMIC.values(), ids=DYNAMIC)
def test_dynamic_scheduling_of_uneven_groups(config, sizes, device):
    m_grouped(config, sizes, 264, 48, tail=3).check(4, device)


def test_tiles_with_few_rows_multiply_half():
    for config in (DYNAMIC["fast"], DYNAMIC["block"]):
        full_tile, half_tile = (flops(m_grouped(config, [rows], 512, 32)) for rows in (65, 64))
        assert half_tile == full_tile / 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("config", FPROPS.values(), ids=FPROPS)
def test_fprop_of_all_shapes(config, shape, device):
    m_grouped(config, *shape).check(device=device)


@pytest.mark.parametrize("k", [16, 144, 272])
@pytest.mark.parametrize("config", FPROPS.values(), ids=FPROPS)
def test_dgrad_with_a_columnwise_copy(config, k, device):
    m_grouped(config, [100, 0, 5, 130], 136, k, tail=3, columnwise_b=True).check(device=device)


@pytest.mark.parametrize("shape", WGRAD_SHAPES.values(), ids=WGRAD_SHAPES)
@pytest.mark.parametrize("config", WGRADS.values(), ids=WGRADS)
def test_wgrad_of_all_shapes(config, shape, device):
    k_grouped(config, *shape).check(device=device)


@pytest.mark.parametrize("config", [FAST, BLOCK_ALL], ids=["fast", "block"])
@pytest.mark.parametrize("tile", SM90_TILES, ids=lambda t: tile_name(t) + " swapped" * t.swap_ab)
def test_every_tile(config, tile, device):
    if config.why_unsupported(tile):
        with pytest.raises(ValueError, match="cannot have the tile"):
            replace(config, tile=tile)
        return
    config = replace(config, tile=tile, out_dtype="float32")
    randomize_codes_and_scales(m_grouped(config, [20, 0, 5, tile.n + 1], 136, 160, tail=11)).check(
        tile.num_ctas, device, any_nan=True
    )


ALL_CONFIGS = FPROPS | {f"wgrad {name}": config for name, config in WGRADS.items()}


@pytest.mark.parametrize("config", ALL_CONFIGS.values(), ids=ALL_CONFIGS)
def test_every_code_and_scale(config, device):
    for log2_range in (20, 127):
        randomize_codes_and_scales(product_of(config, [130, 0, 40], 72, 272), log2_range).check(
            2, device, any_nan=True
        )


@pytest.mark.parametrize("mode", MODES[2:], ids=str)
def test_every_order_of_events_gives_the_same_bits(mode):
    # One or two CTAs, and enough stages that every pipeline wraps around.
    products = (
        (m_grouped(FAST, [33, 0, 5], 24, 1056, tail=11), 1),
        (m_grouped(FAST_ALL, [5, 0, 130], 24, 528, tail=1), 2),
        (m_grouped(SPLIT, [130, 5], 24, 1040, tail=1), 1),
        (m_grouped(BLOCK, [17, 0, 5], 24, 1056, tail=1), 1),
        (m_grouped(BLOCK_ALL, [257, 0, 5], 24, 656, tail=1), 2),
        (m_grouped(UNSWAPPED, [257, 0, 5], 24, 656, tail=1), 2),
        *(
            (m_grouped(DYNAMIC[name], [130, 0, 5], 264, 272, tail=1), 2)
            for name in ("fast", "block")
        ),
        (k_grouped(WGRAD, [100, 0, 5, 800], 8, 136), 1),
        (
            k_grouped(replace(WGRADS["block, wide"], out_dtype="float16"), [100, 0, 400], 264, 264),
            2,
        ),
    )
    check_modes(mode, products)


def test_partial_sums_are_promoted_in_order():
    """One accumulator would truncate these sums, and another order of scales changes roundings."""
    product = m_grouped(BLOCK_ALL, [40], 16, 1024)
    assert product.b.scales is not None and product.a.scales is not None
    product.a.scales.mul_(1 + 2**-20)
    product.b.scales.mul_(3)
    product.check(2)
    fast, split = (m_grouped(replace(SPLIT, split=s), [40], 16, 1024) for s in (0, 1))
    assert not fast.run(2).equal(split.run(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operand": "fp8_block", "split": True}, "split"),
        ({"operand": "bfloat16", "split": True}, "split"),
        ({"operand": "fp8", "pow2_scales": True}, "scales"),
        ({"operand": SQUARES}, "each row"),
        ({"operand": "fp8", "b_operand": "fp8_block"}, "not multiplied by"),
        ({"operand": "fp8", "b_operand": "int8"}, "b_operand"),
        ({"operand": "fp8", "split": True, "tile": M_TILES["256x128x2"]}, "cannot have the tile"),
    ],
)
def test_invalid_configurations_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        Sm90GemmConfig(**{"tile": M_TILES["128x128"]} | fields)


CHOICES = [
    (BLOCK, 1, M_TILES["256x8"]),
    (BLOCK, 128, K_TILES["128x256"]),
    (BLOCK, 4096, K_TILES["128x256x2"]),
]
CHOICES += [(FAST, rows, M_TILES["256x160x2 fitted"]) for rows in (128, 256)]
CHOICES += [(FAST, 64, M_TILES["256x128x2"]), (FAST, 512, K_TILES["128x256"])]
CHOICES += [
    (FPROP, rows, M_TILES[tile])
    for rows, tile in (
        (1, "256x8"),
        (16, "256x32 fitted"),
        (64, "256x64"),
        (128, "256x128x2"),
        (4096, "256x128x2"),
    )
]
CHOICES += [(SPREAD, 16, M_TILES["256x32"]), (SPREAD, 256, M_TILES["256x160x2 fitted"])]


@pytest.mark.parametrize("config, rows_per_group, tile", CHOICES, ids=str)
def test_the_tile_follows_the_rows_of_a_group(config, rows_per_group, tile):
    problem = GemmProblem(
        config.operand, "m_grouped", "bfloat16", 32, 32 * rows_per_group, 4096, k=7168
    )
    assert choose_config(config, problem, 132).tile == tile


def test_the_tile_follows_the_bandwidth():
    """Check that the chosen tile depends on the bandwidth of the GPU."""
    problem = GemmProblem("fp8", "m_grouped", "bfloat16", 128, 128 * 64, 5760, k=2880)
    h200, h100 = (2 * clock * bus / 8 for clock, bus in ((3.201e9, 6144), (2.619e9, 5120)))
    for bandwidth, tile in (
        (None, "256x128x2"),
        (h200, "256x128x2"),
        (0.98 * h200, "256x128x2"),
        (h100, "128x128"),
    ):
        assert choose_config(FAST, problem, 132, bandwidth=bandwidth).tile == M_TILES[tile]
    block = GemmProblem("fp8_block", "m_grouped", "bfloat16", 32, 32 * 128, 4096, k=7168)
    assert choose_config(BLOCK, block, 132, bandwidth=h100).tile == K_TILES["128x256"]


def test_scales_of_wgrad_need_a_multiple_of_8_rows():
    for m in (16, 24, 20):
        problem = GemmProblem("fp8_block", "k_grouped", "float32", 4, 512, 64, m=m)
        assert bool(WGRAD.can_implement(problem)) == (m % 8 == 0)
    assert choose_config(WGRAD, problem.__class__(*astuple(problem)[:-2], 16), 132)
