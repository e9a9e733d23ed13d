"""NVFP4 and plain GEMMs of sm_90a against the tensor-core reference, emulated and on a GPU."""

from dataclasses import replace

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES, Sm90GemmConfig
from cute_kernels.kernels.gemm.sm90.warp_schedule import WarpSchedule
from tests.helpers import seeded_generator

from .gemm_support import SHAPES, WGRAD_SHAPES, check_modes, k_grouped, m_grouped, product_of
from .op_support import each_mode


def tile_name(tile):
    ctas = f"x{tile.num_ctas}" if tile.num_ctas > 1 else ""
    return f"{tile.m}x{tile.n}{ctas}{' fitted' * tile.row_fitted}"


M_TILES = {tile_name(tile): tile for tile in SM90_TILES if tile.swap_ab}
K_TILES = {tile_name(tile): tile for tile in SM90_TILES if not tile.swap_ab}

ADDS = {"has_alpha": True, "accumulate": True}
FPROP = Sm90GemmConfig("nvfp4", row_scaled=True, tile=M_TILES["128x128"])
FPROP_ALL = Sm90GemmConfig(
    "nvfp4", out_dtype="float16", bias_dtype="float32", tile=M_TILES["256x16"], **ADDS
)
CLUSTER = replace(FPROP_ALL, row_scaled=True, tile=M_TILES["256x128x2"])
WGRAD = Sm90GemmConfig("nvfp4", "k_grouped", out_dtype="float32", tile=K_TILES["128x128"])
WGRAD_ADD = replace(WGRAD, **ADDS)
WGRAD_16 = replace(WGRAD, out_dtype="bfloat16", tile=K_TILES["128x256"])
PLAIN = Sm90GemmConfig("bfloat16", bias_dtype="bfloat16", tile=M_TILES["256x32"])
PLAIN_DGRAD = Sm90GemmConfig(
    "float16", out_dtype="float16", transpose_b=True, has_alpha=True, tile=M_TILES["128x128"]
)
PLAIN_WGRAD = Sm90GemmConfig(
    "bfloat16", "k_grouped", out_dtype="float32", accumulate=True, tile=K_TILES["128x128"]
)
PLAIN_WGRAD_16 = Sm90GemmConfig("bfloat16", "k_grouped", tile=K_TILES["128x256"])

FITTED = replace(FPROP, tile=M_TILES["256x32 fitted"])
SPREAD = replace(PLAIN, tile=M_TILES["256x160x2 fitted"])
PREPACKED = replace(FPROP, prepacked=True, tile=M_TILES["256x8"])
W4A16 = Sm90GemmConfig("nvfp4", activations="bfloat16", tile=M_TILES["256x16"])
W4A16_ALL = Sm90GemmConfig(
    "nvfp4",
    activations="float16",
    out_dtype="float32",
    bias_dtype="bfloat16",
    tile=M_TILES["128x128"],
    **ADDS,
)

#: Kinds of operands.
KINDS = {
    "nvfp4": {"operand": "nvfp4"},
    "nvfp4 prepacked": {"operand": "nvfp4", "prepacked": True},
    "w4a16": {"operand": "nvfp4", "activations": "bfloat16"},
    "bf16": {"operand": "bfloat16"},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "config",
    [FPROP, FPROP_ALL, FITTED, CLUSTER, PREPACKED, W4A16, W4A16_ALL],
    ids=["row-scaled", "all", "fitted", "cluster", "prepacked", "w4a16 bf16", "w4a16 fp16, all"],
)
def test_fprop_of_all_shapes(config, shape, device):
    m_grouped(config, *shape).check(device=device)


@pytest.mark.parametrize("k", [32, 144, 320])
@pytest.mark.parametrize("config", [FPROP, W4A16], ids=["nvfp4", "w4a16"])
def test_dgrad_with_a_columnwise_copy(config, k, device):
    m_grouped(config, [100, 0, 5, 130], 136, k, tail=3, columnwise_b=True).check(device=device)


@pytest.mark.parametrize("shape", WGRAD_SHAPES.values(), ids=WGRAD_SHAPES)
@pytest.mark.parametrize(
    "config", [WGRAD, WGRAD_ADD, WGRAD_16], ids=["overwrite", "accumulate", "16 bits"]
)
def test_wgrad_of_all_shapes(config, shape, device):
    k_grouped(config, *shape).check(device=device)


def flops(product):
    """Return the FLOPs of the emulated tensor cores for a product."""
    emulator.reset_stats()
    product.run(2)
    return emulator.stats()["mma_flops"]


def test_wgrad_skips_rows_past_the_last():
    base, *larger = (
        flops(k_grouped(PLAIN_WGRAD_16, [rows], 128, 256)) for rows in (16, 80, 81, 128)
    )
    assert [x / base for x in larger] == [5, 6, 8]


def test_balanced_tiles_share_the_rows_of_a_group():
    # 161 rows are 88 and 73, 257 are 136 and 121, 321 are three tiles of up to 112.
    base, *larger = (
        flops(m_grouped(SPREAD, [rows], 512, 64)) for rows in (64, 65, 160, 161, 257, 321)
    )
    assert [x / base * 64 for x in larger] == [96, 160, 192, 272, 384]


@pytest.mark.parametrize("shape", ["one row", "whole tiles", "tails"])
@pytest.mark.parametrize(
    "config", [PLAIN, PLAIN_DGRAD, PLAIN_WGRAD], ids=["fprop", "dgrad", "wgrad"]
)
def test_plain_operands_of_all_shapes(config, shape, device):
    product_of(config, *SHAPES[shape]).check(device=device)


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        (k, t)
        for i, k in enumerate(KINDS)
        for t in ([*M_TILES.values()][i::3] if i else M_TILES.values())
    ]
    + [("bf16", M_TILES["256x160 fitted"])],
)
def test_every_tile(tile, kind, device):
    """Run every tile on ragged groups, and compare with the reference."""
    base = Sm90GemmConfig(out_dtype="float32", tile=M_TILES["128x128"], **KINDS[kind])
    if base.why_unsupported(tile):
        with pytest.raises(ValueError, match="cannot have the tile"):
            replace(base, tile=tile)
        return
    config = replace(base, tile=tile)
    for product in (
        m_grouped(config, [100, 0, 5, tile.n + 1], 264, 288, tail=11),
        m_grouped(config, [1, 8, 9, 33], 72, 48),
    ):
        product.check(tile.num_ctas, device)


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    # One or two CTAs, and enough stages that every pipeline wraps around.
    products = (
        (m_grouped(FPROP, [70, 0, 5], 264, 1056, tail=11), 1),
        (m_grouped(FPROP_ALL, [1, 140], 136, 160, tail=1), 2),
        (m_grouped(PLAIN, [33, 0, 5], 136, 328, tail=1), 1),
        (m_grouped(replace(PLAIN, tile=M_TILES["64x32"]), [33, 0, 5], 136, 1320, tail=1), 1),
        (m_grouped(PREPACKED, [9, 0, 5], 264, 1312, tail=1), 1),
        (m_grouped(W4A16, [33, 0, 5], 264, 544, tail=1), 1),
        (m_grouped(FITTED, [33, 0, 5, 16], 264, 1056, tail=1), 1),
        (m_grouped(SPREAD, [330, 0, 5, 161], 520, 328, tail=1), 4),
        (k_grouped(WGRAD, [100, 0, 5, 600], 8, 136), 1),
        (m_grouped(CLUSTER, [260, 0, 5], 264, 144, tail=11), 2),
        (k_grouped(WGRAD_16, [5, 0, 200], 136, 264), 1),
        (k_grouped(PLAIN_WGRAD_16, [33, 0, 300], 136, 520), 1),
    )
    check_modes(mode, products)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
def test_extreme_weights_and_activations(dtype, device):
    """All codes and block scales, and plain activations over the full range of their dtype."""
    config = Sm90GemmConfig("nvfp4", activations=dtype, out_dtype="float32", tile=M_TILES["256x16"])
    product = m_grouped(config, [16, 3], 264, 256, seed=7)
    generator = seeded_generator(1)
    for codes, scales in ((x.codes, x.scales) for x in (product.b, product.a)):
        if scales is None:
            random_values = (
                torch.randint(-(2**15), 2**15, codes.shape, generator=generator)
                .to(torch.int16)
                .view(codes.dtype)
            )
            codes.copy_(
                torch.where(
                    random_values.isfinite(), random_values, torch.zeros_like(random_values)
                )
            )
        else:
            scales.copy_(torch.randint(0, 0x7F, scales.shape, generator=generator))
            codes.copy_(torch.randint(0, 256, codes.shape, generator=generator))
    product.check(device=device)


@pytest.mark.parametrize("operand", ["nvfp4", "bfloat16"])
@pytest.mark.parametrize("tile", SM90_TILES, ids=tile_name)
def test_every_tile_fits_shared_memory_and_registers(tile, operand):
    """Check that every tile fits into shared memory and registers."""
    grouping = "m_grouped" if tile.swap_ab else "k_grouped"
    base = Sm90GemmConfig(operand, grouping, tile=Sm90GemmConfig.any_tile(grouping))
    if base.why_unsupported(tile):
        return
    config = replace(base, tile=tile)
    # NVFP4 stages have 128 elements of K, twice as many as others.
    assert config.num_ab_stage >= 3 or (operand, tile.n) == ("nvfp4", 256)
    assert config.num_ab_stage >= 2
    assert config.num_ab_stage * config.stage_bytes + config.epilogue_bytes <= 227 * 1024 - 2048
    warps = WarpSchedule(tile.consumers)
    consumer, producer = warps.registers
    # Warps share the registers of the launch, which come in steps of eight per thread.
    launched = 65536 // warps.num_threads // 8 * 8 * warps.num_threads
    assert (consumer * tile.consumers + producer) * 128 <= launched
