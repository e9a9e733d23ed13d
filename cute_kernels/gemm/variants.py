"""The grouped GEMM kernels that layers use, for compilation ahead of time.

The ops take more: any mix of bias and output dtypes, ``alpha``, accumulation into an output. Those
are compiled when they are first used.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from cute_kernels.capability import support
from cute_kernels.formats import NVFP4
from cute_kernels.gemm.config import DTYPE_BYTES, OPERANDS, TILE_SHAPES, GemmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cute_kernels.gemm.config import OperandKind

__all__ = ["kernel_specs"]


def kernel_specs(arch: str) -> Iterator[GemmConfig]:
    """Configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``.

    Those of a forward pass, with and without a bias of the input's dtype, of the input's gradient
    and of the weight's, whatever the sizes.
    """
    for kind in OPERANDS.values():
        fmt = NVFP4() if kind.is_block_scaled else None
        if not support("grouped_gemm", fmt, arch):
            continue
        for base in _products(kind):
            for tile in TILE_SHAPES:
                if base.grouping == "m_grouped" or not tile.swap_ab:
                    yield dataclasses.replace(base, tile=tile)


def _products(kind: OperandKind) -> Iterator[GemmConfig]:
    """The products of a layer whose inputs and weights become operands of this kind."""
    for dtype in DTYPE_BYTES:
        # Inputs of 16 bits are plain operands as they are; those of 32 bits become bf16.
        low = "bfloat16" if dtype == "float32" else dtype
        if kind.is_block_scaled or kind.name == low:
            base = GemmConfig(kind.name, out_dtype=dtype)
            for row_scaled in (False, True) if kind.is_block_scaled else (False,):
                yield dataclasses.replace(base, row_scaled=row_scaled)
                yield dataclasses.replace(base, row_scaled=row_scaled, bias_dtype=dtype)
            if not kind.is_block_scaled:
                yield dataclasses.replace(base, transpose_b=True)
        # A weight may have another dtype than the input.
        yield GemmConfig(kind.name, "k_grouped", out_dtype=dtype)
