"""The grouped GEMM kernels that training and inference with a recipe use.

For compilation ahead of time. Options multiply to thousands of variants (bias, factors and output
of any dtype); the rest is compiled when it is first used.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cute_kernels.capability import support
from cute_kernels.formats import NVFP4
from cute_kernels.gemm.config import OPERANDS, TILE_SHAPES, GemmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kernel_specs"]


def kernel_specs(arch: str) -> Iterator[GemmConfig]:
    """Configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``.

    Activations are bf16, or fp16 with fp16 operands, and a bias has their dtype. Gradients of
    weights are of that dtype or fp32, which may be added to.
    """
    for operand, kind in OPERANDS.items():
        if support("grouped_gemm", NVFP4() if kind.is_block_scaled else None, arch):
            dtype = "bfloat16" if kind.is_block_scaled else operand
            yield from _m_grouped(operand, dtype, kind.is_block_scaled)
            yield from _k_grouped(operand, dtype)


def _m_grouped(operand: str, dtype: str, is_block_scaled: bool) -> Iterator[GemmConfig]:
    flags = itertools.product((False, True), (None, dtype), TILE_SHAPES)
    for flag, bias_dtype, tile in flags:
        yield GemmConfig(
            operand,
            out_dtype=dtype,
            row_scaled=flag and is_block_scaled,
            transpose_b=flag and not is_block_scaled,
            bias_dtype=bias_dtype,
            tile=tile,
        )


def _k_grouped(operand: str, dtype: str) -> Iterator[GemmConfig]:
    outputs = ((dtype, False), ("float32", False), ("float32", True))
    for (out_dtype, accumulate), tile in itertools.product(outputs, TILE_SHAPES):
        if not tile.swap_ab:
            yield GemmConfig(
                operand, "k_grouped", out_dtype=out_dtype, accumulate=accumulate, tile=tile
            )
