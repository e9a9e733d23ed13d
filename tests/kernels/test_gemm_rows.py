"""Rows that a GEMM reads and writes, on both architectures, also for invalid end rows."""

from dataclasses import replace

import pytest
import torch

from tests.helpers import offs_tensor
from tests.kernels import test_gemm_decoded as decoded
from tests.kernels import test_gemm_fp8 as fp8
from tests.kernels import test_gemm_sm90 as sm90
from tests.kernels import test_gemm_sm100 as sm100
from tests.kernels import test_gemm_sm100_fp8 as sm100_fp8

from .gemm_support import (
    arch_of,
    check_far_rows,
    check_live_rows,
    check_many_groups,
    check_zeroed_tails,
    product_of,
)
from .op_support import MODES, watching

SMALLEST, LARGEST = -(2**31), 2**31 - 1
#: Invalid end rows for groups of 130, 10 and 60 rows in a buffer of 211.
INVALID_END_ROWS = {
    "negative": offs_tensor(-5, -1, -300),
    "falling": offs_tensor(200, 60, 10),
    "falls and rises": offs_tensor(150, 20, 211),
    "past the buffer": offs_tensor(212, 1000, 2000),
    "largest": offs_tensor(LARGEST, LARGEST, LARGEST),
    "smallest": offs_tensor(SMALLEST, SMALLEST, SMALLEST),
    "smallest, then largest": offs_tensor(SMALLEST, LARGEST, 211),
    "largest, then smallest": offs_tensor(LARGEST, SMALLEST, LARGEST),
}
#: One configuration per method to find the rows of a tile.
CONFIGS = {
    "sm_90a nvfp4": sm90.FPROP_ALL,
    "sm_90a cluster": sm90.CLUSTER,
    "sm_90a fitted": sm90.FITTED,
    "sm_90a zeroed tail": replace(
        sm90.FPROP,
        out_dtype="float32",
        bias_dtype="bfloat16",
        zero_tail=True,
        tile=sm90.M_TILES["256x32"],
    ),
    "sm_90a bf16": sm90.PLAIN,
    "sm_90a spread": sm90.SPREAD,
    "sm_90a w4a16": sm90.W4A16,
    "sm_90a fp8_block": replace(fp8.UNSWAPPED, zero_tail=True),
    "sm_90a squares x rows": fp8.SQUARES_TIMES_ROWS,
    "sm_90a uneven fp8": fp8.DYNAMIC["fast"],
    "sm_90a uneven fp8_block": fp8.DYNAMIC["block"],
    "sm_90a wgrad": sm90.WGRAD_ADD,
    "sm_90a rows x squares wgrad": fp8.WGRADS["rows x squares"],
    "sm_90a bf16 wgrad": sm90.PLAIN_WGRAD,
    "sm_100a nvfp4": sm100.FPROP_ALL,
    "sm_100a two CTAs": sm100.TILED["256x256 partial"],
    "sm_100a swapped": sm100.TILED["swapped 128x32"],
    "sm_100a zeroed tail": replace(
        sm100.FPROP_FP32, zero_tail=True, tile=sm100.TILED["swapped 128x32"].tile
    ),
    "sm_100a bf16": sm100.PLAIN,
    "sm_100a promoted": sm100_fp8.M_GROUPED["promoted all"],
    "sm_100a promoted few": sm100_fp8.M_GROUPED["promoted few"],
    "sm_100a promoted wgrad": sm100_fp8.K_GROUPED["promoted"],
    "sm_100a mxfp8 wgrad": sm100_fp8.K_GROUPED["mxfp8 add"],
    "sm_100a w4a16": decoded.CONFIGS["nvfp4 256x128"],
    "sm_100a wgrad": sm100.WGRAD_ADD,
    "sm_100a bf16 wgrad": sm100.PLAIN_WGRAD,
}
ONE_TILE = replace(sm90.FPROP, out_dtype="float32", bias_dtype="bfloat16")
ZEROED = [
    *(replace(ONE_TILE, tile=sm90.M_TILES[tile]) for tile in ("256x32", "256x128x2")),
    *(replace(config, bias_dtype="float32") for config in (fp8.FAST, fp8.BLOCK, fp8.UNSWAPPED)),
    *(
        replace(sm100.FPROP_FP32, tile=sm100.TILED[tile].tile)
        for tile in ("256x128", "swapped 128x32", "256x256 partial")
    ),
    *(sm100_fp8.M_GROUPED[name] for name in ("mxfp8", "fp8 few", "promoted")),
    decoded.CONFIGS["nvfp4 few rows"],
]
FAR = [
    sm90.PLAIN,
    fp8.BLOCK,
    fp8.UNSWAPPED,
    sm100.FPROP,
    sm100.TILED["swapped 128x64"],
    *ZEROED[-4:],
]


@pytest.mark.parametrize("config", ZEROED, ids=str)
def test_the_tail_can_be_zeroed(config, device):
    if device == "cuda" and arch_of(config) != "sm_90a":
        pytest.skip("the GPU of these tests is a Hopper")
    check_zeroed_tails(config, device, (MODES[1], MODES[-1]))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=name)
        for name, c in CONFIGS.items()
        if c.grouping == "m_grouped" and not c.zero_tail
    ],
)
def test_only_rows_of_groups_are_written(config):
    check_live_rows(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_more_groups_than_a_window_of_the_scheduler(config):
    check_many_groups(config)


@pytest.mark.parametrize("config", FAR, ids=str)
def test_element_offsets_past_2_to_the_31(config):
    check_far_rows(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_invalid_end_rows_stay_in_the_buffers(config):
    product = product_of(config, [130, 10, 60], 72, 96, 11)
    # Copy the output, because watching covers whole storages.
    prepared = product.prepared(product.before.clone(), 2)
    for offs in INVALID_END_ROWS.values():
        arguments = prepared._replace(offs=offs)
        with watching(*arguments):
            product.launch(arguments)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_of_no_group_are_unchanged(config):
    """End rows at or below 0 make all groups empty: nothing is written, or zeros in wgrad."""
    product = product_of(config, [0, 0, 0], 72, 96, 200)
    keeps = config.accumulate or config.grouping == "m_grouped" and not config.zero_tail
    want = product.before if keeps else 0
    for offs in (offs_tensor(0, 0, 0), INVALID_END_ROWS["negative"], INVALID_END_ROWS["smallest"]):
        product.offs = offs
        out = product.run(2)
        assert out.equal(torch.zeros_like(out) + want)
