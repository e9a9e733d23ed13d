"""The grouped GEMM kernels that training and inference with a recipe use.

For compilation ahead of time. Options multiply to thousands of variants (bias, factors and output
of any dtype); the rest is compiled when it is first used.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from cute_kernels.capability import support
from cute_kernels.gemm.operands import OPERANDS, OperandKind
from cute_kernels.gemm.sm90.config import Sm90GemmConfig
from cute_kernels.gemm.sm90.fp4.config import ArrangeConfig, ExpandConfig
from cute_kernels.gemm.sm100.config import Sm100GemmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cute_kernels.gemm.problem import GemmConfig
    from cute_kernels.runtime.spec import KernelSpec

__all__ = ["CONFIGS", "kernel_specs"]

#: The configurations of each architecture's kernel.
CONFIGS: dict[str, type[GemmConfig]] = {"sm_90a": Sm90GemmConfig, "sm_100a": Sm100GemmConfig}


def kernel_specs(arch: str) -> Iterator[KernelSpec]:
    """Configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``.

    Activations are bf16, or fp16 with fp16 operands, and a bias has their dtype; they are written
    into fresh outputs. Gradients of weights are of that dtype or fp32, which may be added to.
    """
    for operand, kind in OPERANDS.items():
        if support("grouped_gemm", kind.fmt, arch):
            dtype = "bfloat16" if kind.fmt else operand
            cls = CONFIGS[arch]
            yield from _m_grouped(cls, kind, dtype)
            yield from _k_grouped(cls, kind, dtype)
            if arch == "sm_90a" and not kind.is_wgmma:
                yield from (ExpandConfig(is_ragged) for is_ragged in (False, True))
                yield from _served(kind)


def _served(kind: OperandKind) -> Iterator[KernelSpec]:
    """Kernels for sm_90a beside weights that are quantized once: prepacked, and W4A16."""
    base = Sm90GemmConfig(kind.name, tile=Sm90GemmConfig.any_tile("m_grouped"), zero_tail=True)
    yield ArrangeConfig("bfloat16")
    for tile in filter(base.takes, Sm90GemmConfig.tile_shapes):
        yield dataclasses.replace(base, tile=tile, activations="bfloat16")
        for row_scaled in (False, True):
            yield dataclasses.replace(base, tile=tile, prepacked=True, row_scaled=row_scaled)


def _m_grouped(cls: type[GemmConfig], kind: OperandKind, dtype: str) -> Iterator[GemmConfig]:
    any_tile = cls(kind.name, tile=cls.any_tile("m_grouped"))
    tiles = filter(any_tile.may_choose, cls.tile_shapes)
    for flag, bias_dtype, tile in itertools.product((False, True), (None, dtype), tiles):
        yield cls(
            kind.name,
            out_dtype=dtype,
            row_scaled=flag and kind.level_factor is not None,
            transpose_b=flag and not kind.is_transposed,
            bias_dtype=bias_dtype,
            zero_tail=True,
            tile=tile,
        )


def _k_grouped(cls: type[GemmConfig], kind: OperandKind, dtype: str) -> Iterator[GemmConfig]:
    base = cls(kind.name, "k_grouped", tile=cls.any_tile("k_grouped"))
    outputs = ((dtype, False), ("float32", False), ("float32", True))
    tiles = filter(base.may_choose, cls.tile_shapes)
    for (out_dtype, accumulate), tile in itertools.product(outputs, tiles):
        yield dataclasses.replace(base, out_dtype=out_dtype, accumulate=accumulate, tile=tile)
