"""NVFP4 and plain GEMMs of sm_100a against the tensor-core reference, bit for bit."""

from dataclasses import replace

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.kernels.gemm.sm100.config import Sm100GemmConfig, Sm100Tile
from tests.helpers import assert_same_bytes

from .gemm_support import SHAPES, WGRAD_SHAPES, check_modes, k_grouped, m_grouped, product_of
from .op_support import each_mode

FPROP = Sm100GemmConfig("nvfp4", row_scaled=True)
FPROP_ALL = Sm100GemmConfig(
    "nvfp4", out_dtype="float16", bias_dtype="float32", has_alpha=True, accumulate=True
)
FPROP_FP32 = Sm100GemmConfig("nvfp4", out_dtype="float32", row_scaled=True, bias_dtype="bfloat16")
WGRAD = Sm100GemmConfig("nvfp4", grouping="k_grouped", out_dtype="float32")
WGRAD_ADD = replace(WGRAD, accumulate=True, has_alpha=True)

#: One configuration per remaining tile, with varied options.
TILED = {
    "128x64": replace(FPROP_FP32, tile=Sm100Tile(128, 64)),
    "256x128": replace(WGRAD_ADD, tile=Sm100Tile(256, 128, 2)),
    "256x256": replace(FPROP, tile=Sm100Tile(256, 256, 2)),
    "256x256 fp32": replace(WGRAD, tile=Sm100Tile(256, 256, 2)),
    "256x256 partial": replace(FPROP, tile=Sm100Tile(256, 256, 2, swap_partial=True)),
    "128x128 partial": replace(FPROP_FP32, tile=Sm100Tile(128, 128, swap_partial=True)),
    "swapped 128x64": replace(FPROP, tile=Sm100Tile(128, 64, swap_ab=True)),
    "swapped 128x32": replace(
        FPROP_ALL, out_dtype="float32", tile=Sm100Tile(128, 32, swap_ab=True)
    ),
}

PLAIN = Sm100GemmConfig("bfloat16", bias_dtype="bfloat16")
PLAIN_FEW_ROWS = replace(
    PLAIN, bias_dtype=None, transpose_b=True, tile=Sm100Tile(128, 32, swap_ab=True)
)
PLAIN_DGRAD = Sm100GemmConfig(
    "float16", out_dtype="float16", transpose_b=True, has_alpha=True, tile=Sm100Tile(256, 256, 2)
)
PLAIN_WGRAD = Sm100GemmConfig(
    "bfloat16", "k_grouped", out_dtype="float32", accumulate=True, tile=Sm100Tile(256, 128, 2)
)
#: (rows of each group, N, K, rows of the tail); K is not a multiple of blocks.
PLAIN_SHAPES = {
    "one row": ([1], 8, 8, 0),
    "whole tiles": ([128, 256], 128, 128, 0),
    "tails": ([100, 0, 128, 5, 200], 136, 200, 11),
}


@pytest.mark.parametrize("shape", PLAIN_SHAPES.values(), ids=PLAIN_SHAPES)
@pytest.mark.parametrize(
    "config",
    [PLAIN, PLAIN_FEW_ROWS, PLAIN_DGRAD, PLAIN_WGRAD],
    ids=["fprop", "few rows", "dgrad", "wgrad"],
)
def test_plain_operands_of_all_shapes(config, shape):
    product_of(config, *shape).check()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "config",
    [FPROP, FPROP_ALL, FPROP_FP32, TILED["256x256 partial"]],
    ids=["row-scaled", "all", "fp32", "partial"],
)
def test_fprop_of_all_shapes(config, shape):
    m_grouped(config, *shape).check()


@pytest.mark.parametrize("k", [32, 144, 320])
@pytest.mark.parametrize("config", [FPROP, TILED["256x256 partial"]], ids=["direct", "partial"])
def test_dgrad_with_a_columnwise_copy(config, k):
    m_grouped(config, [100, 0, 5, 130], 136, k, tail=3, columnwise_b=True).check()


@pytest.mark.parametrize("shape", WGRAD_SHAPES.values(), ids=WGRAD_SHAPES)
@pytest.mark.parametrize("config", [WGRAD, WGRAD_ADD], ids=["overwrite", "accumulate"])
def test_wgrad_of_all_shapes(config, shape):
    k_grouped(config, *shape).check()


def tiled_products(name):
    """Return products of a tile and the number of SMs to run them on, with tiles for two rounds."""
    config = TILED[name]
    num_sms = config.tile.num_ctas
    if config.grouping == "k_grouped":
        return [(k_grouped(config, [100, 0, 5, 700], 136, 264, tail=1), num_sms)]
    return [
        (m_grouped(config, [100, 0, 5, 290], 264, 288, tail=11), num_sms),
        (m_grouped(config, [1, 32, 33], 72, 48, columnwise_b=True), 2 * num_sms),
    ]


#: Row counts around every boundary of a tile that swaps operands if it is partial: steps of an
#: instruction, blocks of loads and stores, halves of a CTA pair, the full tile.
TAILS = [1, 15, 16, 17, 0, 31, 33, 95, 97, 112, 127, 128, 129, 0, 160, 240, 241, 255, 256, 257, 447]


@pytest.mark.parametrize("name", ["256x256 partial", "128x128 partial", "swapped 128x64"])
def test_tails_of_every_length(name):
    # One cluster alternates between partial and full tiles.
    product = m_grouped(TILED[name], TAILS, 264, 96, tail=3)
    product.check(product.config.tile.num_ctas)


@pytest.mark.parametrize("name", ["256x256 partial", "128x128 partial"])
def test_shared_memory_has_no_bank_conflicts(name):
    """Check that shared memory has no bank conflicts."""
    product = m_grouped(TILED[name], [256, 0, 200], 264, 64)
    emulator.reset_stats()
    product.run(2)
    stats = emulator.stats()
    assert 0 < stats["smem_wavefronts"] <= stats["smem_accesses"]


def test_partial_tiles_of_two_ctas_accumulate():
    config = replace(FPROP_ALL, tile=TILED["256x256 partial"].tile)
    m_grouped(config, [300, 0, 70, 256], 392, 160, tail=5).check(4)


@pytest.mark.parametrize("name", [*TILED])
def test_every_tile(name):
    for product, num_sms in tiled_products(name):
        product.check(num_sms)


def test_wgrad_of_an_empty_group_is_zero_or_unchanged():
    """Check that wgrad writes zeros for an empty group, or leaves it when it accumulates."""
    zeros = k_grouped(WGRAD, [4, 0], 8, 16).run()[1]
    assert zeros.equal(torch.zeros(8, 16)) and not zeros.signbit().any()
    # Negative and infinite factors do not change that.
    product = k_grouped(replace(WGRAD, has_alpha=True, out_dtype="bfloat16"), [4, 0, 0, 9], 8, 16)
    product.alpha[1], product.a.amax[2] = -1.0, torch.inf
    product.check()
    product = k_grouped(WGRAD_ADD, [4, 0], 8, 16)
    product.before[1, 0, 0] = torch.nan
    assert_same_bytes(product.run()[1], product.before[1])


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    # One or two CTAs, so that every pipeline wraps around.
    products = (
        (m_grouped(FPROP, [70, 0, 5], 264, 288, tail=11), 1),
        (m_grouped(FPROP_ALL, [1, 140], 136, 32, tail=1), 2),
        (k_grouped(WGRAD, [100, 0, 5, 600], 8, 136), 1),
        tiled_products("256x256")[0],
        tiled_products("256x256 partial")[0],
        (m_grouped(TILED["128x128 partial"], [128, 150, 0, 33], 136, 288, tail=1), 1),
        tiled_products("swapped 128x32")[1],
        (m_grouped(PLAIN, [70, 0, 5], 136, 456, tail=1), 1),
        (k_grouped(PLAIN_WGRAD, [100, 0, 5, 400], 8, 136, tail=1), 2),
    )
    check_modes(mode, products)


@pytest.mark.parametrize("config", [FPROP, TILED["256x256 partial"]], ids=["direct", "partial"])
def test_infinite_and_nan_factors_stay_in_their_rows(config):
    """Check that infinite and NaN global scales of rows affect only their rows."""
    product = m_grouped(config, [40, 9], 16, 32)
    product.a.amax[3], product.a.amax[41] = torch.inf, torch.nan
    got, want = product.run(), product.expected()
    clean = [row for row in range(49) if row not in (3, 41)]
    assert_same_bytes(got[clean], want[clean])
    assert got[41].isnan().all() and not got[3].isfinite().any()
