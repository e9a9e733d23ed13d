"""Grouped GEMM of plain activations that are quantized on the way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4, Format
from cute_kernels.ops import gemm_kernels
from cute_kernels.ops.checks import (
    INPUT_DTYPES,
    check_dtype,
    check_offs,
    check_tensor,
    same_device,
)
from cute_kernels.ops.gemm import GroupedGemm, MGroupedGemmNVFP4, check_b, check_vectors
from cute_kernels.ops.quantize import GroupedQuantizeNVFP4
from cute_kernels.ops.registry import OutputSpec, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.gemm import Parts
    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = ["MGroupedQuantizeGemmNVFP4"]


@register
@dataclasses.dataclass
class MGroupedQuantizeGemmNVFP4(GroupedGemm):
    """``grouped_quantize_nvfp4`` of ``a`` and ``m_grouped_gemm_nvfp4`` of that in one op.

    The result has the bits of the two. On sm_90a, whose tensor cores multiply fp16, the quantized A
    never exists as codes: the quantizer writes code times block scale, the operand of the GEMM.

    Args:
        a: (T, K) bf16, fp16 or fp32.
        b_codes: (G, N, K / 2) uint8, the rowwise copy of a uniform tensor (fprop); or (G, N, 64 *
            ceil(K / 128)), its columnwise copy (dgrad).
        b_scales: its (G, ceil(N / 128), tiles, 512) uint8 scale tiles.
        b_amax: its (G,) fp32 second level.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        row_scaled: the second level of A is one amax per row instead of one per group.
        out_dtype: bf16, fp16 or fp32; bf16 by default.
        prepacked: as for ``m_grouped_gemm_nvfp4``.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
    """

    a: Tensor
    b_codes: Tensor
    b_scales: Tensor
    b_amax: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None
    row_scaled: bool = False
    out_dtype: torch.dtype | None = None
    prepacked: bool = False

    transpose_b: ClassVar[bool] = False
    quantizes_a: ClassVar[bool] = True
    name: ClassVar[str] = "m_grouped_quantize_gemm_nvfp4"
    fills_fresh: ClassVar[bool] = True
    operand_format: ClassVar[Format | None] = NVFP4()

    @property
    def device(self) -> torch.device:
        return self.a.device

    def check(self) -> None:
        check_tensor("a", self.a, dtypes=INPUT_DTYPES, ndim=(2,))
        check_tensor("b_codes", self.b_codes, dtypes=(torch.uint8,), ndim=(3,))
        check_b("a", self.depth, self.b_codes, self.b_scales, self.b_amax)
        groups, cols, _ = self.b_codes.shape
        check_offs(self.offs, groups)
        check_vectors(groups, cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.out_dtype or torch.bfloat16, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        shape = (self.a.shape[0], self.b_codes.shape[1])
        return [OutputSpec(shape, self.out_dtype or torch.bfloat16, zeroed=True)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_gemm", NVFP4(row_scaled=self.row_scaled)

    @property
    def depth(self) -> int:
        """K."""
        return self.a.shape[1]

    def operands(self) -> tuple[Parts, Parts]:
        return (self.a, None, None), (self.b_codes, self.b_scales, self.b_amax)

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.quantizing(self, launch) or _one_after_the_other

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        self.product().run_reference(outputs, **options)

    def product(self) -> MGroupedGemmNVFP4:
        """The GEMM of the quantized A."""
        a = GroupedQuantizeNVFP4.invoke(
            self.a, self.offs, None, self.row_scaled, False, True, False
        )
        codes, scales, amax = a[:3]
        return MGroupedGemmNVFP4(
            codes,
            scales,
            amax,
            self.b_codes,
            self.b_scales,
            self.b_amax,
            self.offs,
            bias=self.bias,
            alpha=self.alpha,
            row_scaled=self.row_scaled,
            out_dtype=self.out_dtype,
            prepacked=self.prepacked,
        )


def _one_after_the_other(
    op: MGroupedQuantizeGemmNVFP4, outputs: Sequence[Tensor | None], **options: bool
) -> None:
    product = op.product()
    product.cached_plan().run(product, outputs, **options)
