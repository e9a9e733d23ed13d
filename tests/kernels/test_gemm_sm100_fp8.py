"""FP8, FP8Block and MXFP8 GEMMs of sm_100a against the tensor-core reference, bit for bit."""

import functools

import pytest

import ptx_emulator as emulator
from cute_kernels.kernels.gemm.sm100.config import Sm100GemmConfig, Sm100Tile

from .gemm_support import (
    SHAPES,
    WGRAD_SHAPES,
    k_grouped,
    m_grouped,
    product_of,
    randomize_codes_and_scales,
)
from .op_support import each_mode
from .test_gemm_sm100 import TAILS

PARTIAL, WIDE = Sm100Tile(128, 128, swap_partial=True), Sm100Tile(256, 256, 2, swap_partial=True)
FEW, FEWER = (Sm100Tile(128, n, swap_ab=True) for n in (64, 32))
E5M2, SQUARES = ":dtype=e5m2", "fp8_block:block=128x128"
ALL = {"bias_dtype": "float32", "has_alpha": True, "accumulate": True}
M_GROUPED = {
    "mxfp8": Sm100GemmConfig("mxfp8", tile=WIDE),
    "mxfp8 all": Sm100GemmConfig(
        "mxfp8", b_operand="mxfp8" + E5M2, out_dtype="float16", tile=PARTIAL, **ALL
    ),
    "mxfp8 few": Sm100GemmConfig("mxfp8", out_dtype="float32", tile=FEWER),
    "fp8": Sm100GemmConfig("fp8", tile=WIDE),
    "fp8 all": Sm100GemmConfig("fp8" + E5M2, b_operand="fp8", tile=PARTIAL, **ALL),
    "fp8 few": Sm100GemmConfig("fp8", bias_dtype="bfloat16", tile=FEW),
    "block": Sm100GemmConfig("fp8_block", b_operand=SQUARES, pow2_scales=True, tile=WIDE),
    "promoted": Sm100GemmConfig("fp8_block", b_operand=SQUARES, tile=Sm100Tile(128, 128)),
    "promoted all": Sm100GemmConfig(
        "fp8_block" + E5M2, b_operand="fp8_block", tile=Sm100Tile(256, 128, 2), **ALL
    ),
    "promoted few": Sm100GemmConfig("fp8_block", b_operand=SQUARES, tile=FEWER),
    "promoted rows": Sm100GemmConfig("fp8_block", out_dtype="float32", tile=FEW),
    "promoted squares": Sm100GemmConfig(SQUARES, b_operand="fp8_block", tile=FEW),
}
DGRAD = {
    "mxfp8": Sm100GemmConfig("mxfp8", transpose_b=True, tile=WIDE),
    "mxfp8 direct": Sm100GemmConfig(
        "mxfp8" + E5M2, b_operand="mxfp8", transpose_b=True, tile=Sm100Tile(128, 64)
    ),
    "mxfp8 few": Sm100GemmConfig("mxfp8", out_dtype="float32", transpose_b=True, tile=FEW),
    **{name: M_GROUPED[name] for name in ("fp8", "fp8 all", "block", "promoted", "promoted rows")},
}
K_GROUPED = {
    "mxfp8": Sm100GemmConfig("mxfp8", "k_grouped", tile=Sm100Tile(256, 128, 2)),
    "mxfp8 add": Sm100GemmConfig(
        "mxfp8" + E5M2,
        "k_grouped",
        "float32",
        b_operand="mxfp8",
        has_alpha=True,
        accumulate=True,
        tile=Sm100Tile(128, 64),
    ),
    "fp8": Sm100GemmConfig(
        "fp8" + E5M2, "k_grouped", "float32", b_operand="fp8", tile=Sm100Tile(256, 256, 2)
    ),
    "fp8 add": Sm100GemmConfig("fp8", "k_grouped", accumulate=True, tile=Sm100Tile(128, 128)),
    "block": Sm100GemmConfig("fp8_block", "k_grouped", pow2_scales=True, tile=Sm100Tile(128, 64)),
    "promoted": Sm100GemmConfig(
        "fp8_block", "k_grouped", "float32", accumulate=True, tile=Sm100Tile(128, 128)
    ),
    "promoted squares": Sm100GemmConfig(
        SQUARES, "k_grouped", b_operand="fp8_block", tile=Sm100Tile(256, 128, 2)
    ),
}


def dgrad(config, sizes, n, k, tail=0):
    return m_grouped(config, sizes, n, k, tail, columnwise_b=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("config", M_GROUPED.values(), ids=M_GROUPED)
def test_fprop_of_all_shapes(config, shape):
    sizes, n, k, tail = shape
    # K of MXFP8 is a multiple of the block.
    k = -(-k // config.kind.k_align) * config.kind.k_align
    m_grouped(config, sizes, n, k, tail).check()


@pytest.mark.parametrize("k", [48, 144, 272])
@pytest.mark.parametrize("config", DGRAD.values(), ids=DGRAD)
def test_dgrad_with_a_columnwise_copy(config, k):
    """The codes past K within an instruction may be anything; here they are NaN."""
    k = -(-k // config.kind.k_align) * config.kind.k_align
    dgrad(config, [100, 0, 5, 270], 136, k, 3).check()


@pytest.mark.parametrize("shape", WGRAD_SHAPES.values(), ids=WGRAD_SHAPES)
@pytest.mark.parametrize("config", K_GROUPED.values(), ids=K_GROUPED)
def test_wgrad_of_all_shapes(config, shape):
    k_grouped(config, *shape).check()


ALL_CONFIGS = M_GROUPED | {f"wgrad {name}": config for name, config in K_GROUPED.items()}


@pytest.mark.parametrize("config", ALL_CONFIGS.values(), ids=ALL_CONFIGS)
def test_every_code_and_scale(config):
    randomize_codes_and_scales(product_of(config, [20, 0, 5, 129], 136, 160, 11)).check(
        2, any_nan=True
    )


@pytest.mark.parametrize("config", [M_GROUPED["mxfp8"], DGRAD["mxfp8"], M_GROUPED["fp8 all"]])
def test_tails_of_every_length(config):
    # One cluster alternates between partial and full tiles.
    m_grouped(config, TAILS, 264, 96, 3, columnwise_b=config.transpose_b).check(
        config.tile.num_ctas
    )


@functools.cache
def long_product(config):
    """Return a product with more stages and tiles than its pipelines hold, and its output."""
    if config.grouping == "k_grouped":
        product = k_grouped(config, [100, 0, 5, 700], 136, 24, 1)
    else:
        columnwise = config.transpose_b or config.kind.is_transposed
        product = m_grouped(config, [140, 0, 5], 72, 800, 1, columnwise_b=columnwise)
    return product, product.expected()


@each_mode
def test_every_order_of_events_gives_the_same_bits(mode):
    for config in dict.fromkeys([*M_GROUPED.values(), *DGRAD.values(), *K_GROUPED.values()]):
        product, want = long_product(config)
        with emulator.options(**mode):
            product.check(config.tile.num_ctas, want=want)
