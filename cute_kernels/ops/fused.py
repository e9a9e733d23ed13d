"""Grouped GEMM of plain activations that are quantized on the way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4, Format
from cute_kernels.ops import gemm_kernels
from cute_kernels.ops.checks import INPUT_DTYPES
from cute_kernels.ops.gemm import MGroupedGemmNVFP4, MixedInputGemm
from cute_kernels.ops.quantize import GroupedQuantizeNVFP4
from cute_kernels.ops.registry import Allocator, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = ["MGroupedQuantizeGemmNVFP4"]


@register
@dataclasses.dataclass
class MGroupedQuantizeGemmNVFP4(MixedInputGemm):
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
        out_dtype: bf16, fp16 or fp32; bf16 by default, as in the second of the two ops.
        prepacked: as for ``m_grouped_gemm_nvfp4``.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
    """

    row_scaled: bool = False
    out_dtype: torch.dtype | None = None
    prepacked: bool = False

    quantizes_a: ClassVar[bool] = True
    name: ClassVar[str] = "m_grouped_quantize_gemm_nvfp4"
    a_dtypes: ClassVar[tuple[torch.dtype, ...]] = INPUT_DTYPES

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or torch.bfloat16

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_gemm", NVFP4(row_scaled=self.row_scaled)

    def kernels(self, launch: Launcher) -> Runner:
        return gemm_kernels.quantizing(self, launch) or _one_after_the_other(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        quantizer = self.quantizer()
        a = [s and s.allocate(self.device, True) for s in quantizer.outputs()]
        quantizer.run_reference(a)
        self.product(a).run_reference(outputs, **options)

    def quantizer(self) -> GroupedQuantizeNVFP4:
        """What quantizes A."""
        return GroupedQuantizeNVFP4(self.a, self.offs, row_scaled=self.row_scaled)

    def product(self, a: Sequence[Tensor | None]) -> MGroupedGemmNVFP4:
        """The GEMM of what the quantizer made of A."""
        return MGroupedGemmNVFP4(
            *cast("tuple[Tensor, Tensor, Tensor]", tuple(a[:3])),
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


def _one_after_the_other(op: MGroupedQuantizeGemmNVFP4, launch: Launcher) -> Runner:
    """Quantizing to codes in memory, and the GEMM of those."""
    quantizer = op.quantizer()
    quantize = quantizer.kernels(launch)
    codes = Allocator(quantizer.outputs(), op.device)
    multiply = op.product(codes.make()).kernels(launch)

    def run(
        op: MGroupedQuantizeGemmNVFP4, outputs: Sequence[Tensor | None], **options: bool
    ) -> None:
        a = codes.make()
        quantize(op.quantizer(), a)
        multiply(op.product(a), outputs, **options)

    return run
