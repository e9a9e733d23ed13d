"""The grouped GEMM of sm_100a with bf16 and fp16 operands: the same kernel, other operand kinds."""

from __future__ import annotations

import pytest

from cute_kernels import emulator
from cute_kernels.gemm.sm100.config import Sm100GemmConfig, Sm100Tile
from tests.helpers import assert_same_bytes
from tests.kernels.gemm_support import Product, k_grouped, m_grouped
from tests.kernels.op_support import MODE_IDS, MODES

FPROP = Sm100GemmConfig("bfloat16", bias_dtype="bfloat16")
FEW_ROWS = Sm100GemmConfig("bfloat16", transpose_b=True, tile=Sm100Tile(128, 32, swap_ab=True))
DGRAD = Sm100GemmConfig(
    "float16", out_dtype="float16", transpose_b=True, has_alpha=True, tile=Sm100Tile(256, 256, 2)
)
WGRAD = Sm100GemmConfig(
    "bfloat16", "k_grouped", out_dtype="float32", accumulate=True, tile=Sm100Tile(256, 128, 2)
)
CONFIGS = {"fprop": FPROP, "few rows": FEW_ROWS, "dgrad": DGRAD, "wgrad": WGRAD}

#: (rows of each group, N, K, rows of the tail).
SHAPES = {
    "one row": ([1], 8, 8, 0),
    "whole tiles": ([128, 256], 128, 128, 0),
    "tails": ([100, 0, 128, 5, 200], 136, 200, 11),
}


def product_of(config: Sm100GemmConfig, shape: str) -> Product:
    sizes, n, k, tail = SHAPES[shape]
    if config.grouping == "k_grouped":
        return k_grouped(config, sizes, k, n, tail=tail)
    return m_grouped(config, sizes, n, k, tail=tail)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_plain_operands(name: str, shape: str) -> None:
    product = product_of(CONFIGS[name], shape)
    assert_same_bytes(product.run(), product.expected())


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_every_order_of_events_gives_the_same_bits(mode: dict[str, object]) -> None:
    for product in (
        m_grouped(FPROP, [70, 0, 5], 136, 456, tail=1),
        k_grouped(WGRAD, [100, 0, 5, 400], 8, 136, tail=1),
    ):
        want = product.expected()
        with emulator.options(**mode):
            assert_same_bytes(product.run(product.config.tile.num_ctas), want)
