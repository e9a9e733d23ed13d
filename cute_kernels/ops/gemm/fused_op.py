"""GEMM ops that quantize A first, or apply an activation to the result.

``op`` has the plain products. The ops here have their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.formats import Format, parse
from cute_kernels.formats.activations import curve_of, parse_activation
from cute_kernels.layout.buffers import BufferSpec, buffers
from cute_kernels.reference.moe import activate
from cute_kernels.runtime.backend import Backend

from ..activation_prologue import check_prologue, result_columns
from ..checks import check_multiple, check_rows, check_tensor
from ..quantize.op import GroupedQuantize
from ..registration import register
from .base_op import MGrouped, parse_given
from .op import MGroupedGemm


@register
@dataclass
class MGroupedQuantizeGemm(MGrouped):
    """Compute ``grouped_quantize`` of ``a`` and ``m_grouped_gemm`` of the result in one op.

    The result has the bits of the two ops. The tensor cores of sm_90a multiply fp16, so there the
    NVFP4 A never exists as codes: the quantizer writes code times block scale, which is the operand
    of the GEMM.

    Args:
        a: (T, K), bf16, fp16 or fp32.
        b: Codes of a uniform tensor, as for ``m_grouped_gemm``.
        offs: (G,) int32. End rows.
        b_scales: As for ``m_grouped_gemm``.
        a_format: Text of the format to which ``a`` is quantized.
        b_format: Text of the format of ``b``.
        bias: (G, N). Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: As for ``m_grouped_gemm``.
        out_dtype: bf16, fp16 or fp32; bf16 by default, as in the second of the two ops.
        prepacked: As for ``m_grouped_gemm``.
        seed: As for ``grouped_quantize``.
        accumulation: As for ``m_grouped_gemm``.
        activation: Activation of ``a``, as for ``grouped_quantize``: ``a`` is (T, 2K) if it is
            gated.
        rows: (R,) int32. Rows of ``a``, as for ``grouped_quantize``. Then the product has R rows.
        inverse: (S, k) int32, as for ``grouped_quantize``.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form does not write rows of the tail.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    b_scales: list[Tensor]
    a_format: str
    b_format: str
    bias: Tensor | None = None
    alpha: Tensor | None = None
    transpose_b: bool = False
    out_dtype: torch.dtype | None = None
    prepacked: bool = False
    seed: Tensor | None = None
    accumulation: str | None = None
    activation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "m_grouped_quantize_gemm"
    product_type: ClassVar[type[MGroupedGemm]] = MGroupedGemm
    quantized_sides: ClassVar[str] = "b"
    a_scales: ClassVar[None] = None  # type: ignore[misc]

    def require(self, backend: Backend) -> None:
        super().require(backend)
        self.quantizer().require(backend)

    @property
    def depth(self) -> int:
        """K, the columns of A after its activation."""
        return result_columns(self.a.shape[1], self.activation)

    def check(self) -> None:
        """Check the operands, the activation of A and the row index."""
        super().check()
        check_prologue("a", self.a, self.activation)
        if self.rows is not None:
            check_rows(self.rows, "a", self.a)

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Quantize A and multiply with the reference backend."""
        quantizer = self.quantizer()
        a = [s.allocate(self.device, True) for s in quantizer.outputs()]
        quantizer.run_reference(a)
        self.product(a).run_reference(outputs, **options)

    def quantizer(self) -> GroupedQuantize:
        """Return the op that quantizes A."""
        return GroupedQuantize(
            self.a,
            self.a_format,
            self.offs,
            seed=self.seed,
            activation=self.activation,
            rows=self.rows,
            inverse=self.inverse,
        )

    def product(self, a: Sequence[Tensor]) -> MGroupedGemm:
        """Return the GEMM of the tensors that the quantizer made of A."""
        num_tensors = len(parse(self.a_format).operand_names(columnwise=False))
        # By position: an op is created in every call.
        return self.product_type(
            a[0],
            self.b,
            self.offs,
            self.bias,
            self.alpha,
            self.transpose_b,
            self.result_dtype,
            list(a[1:num_tensors]),
            self.b_scales,
            self.a_format,
            self.b_format,
            self.prepacked,
            self.accumulation,
            None,
            None,
            *self.epilogue_fields,
        )


@dataclass
class _Activated(MGrouped):
    """Base class of m_grouped GEMMs with an activation in the epilogue."""

    accumulates: ClassVar[bool] = False
    returns_list: ClassVar[bool] = True
    has_activation: ClassVar[bool] = True
    setup_context = None
    backward = None

    epilogue: str = "swiglu"
    interleaved: bool = False
    keeps_z: bool = False
    quantize_to: str | None = None
    amax: Tensor | None = None

    @property
    def epilogue_fields(self) -> tuple[str, bool, bool, str | None, Tensor | None]:
        """The activation, and the form in which its result is stored."""
        fmt = self.result_record
        return (
            self.epilogue,
            self.interleaved,
            self.keeps_z,
            None if fmt is None else fmt.text,
            self.amax,
        )

    @property
    def result_record(self) -> Format | None:
        return parse_given(self.quantize_to)

    def check(self) -> None:
        """Check the product, then the activation and the format of the result."""
        super().check()
        act = parse_activation(self.epilogue)
        curve_of(act)  # It raises if nothing computes the curve.
        is_gated = act.is_gated
        if self.transpose_b:
            raise ValueError(
                "transpose_b must be False: the result of dgrad goes through no activation"
            )
        if is_gated and self.cols % 2:
            raise ValueError(
                f"b (G, 2N, K) must have an even number of rows for {self.epilogue}, which is "
                f"gated, got {self.cols} rows"
            )
        if self.interleaved and not is_gated:
            raise ValueError(f"interleaved needs a gated activation, which {self.epilogue} is not")
        if (fmt := self.result_record) is not None:
            if self.keeps_z:
                raise ValueError("keeps_z needs a result that is not quantized")
            check_multiple(
                "N",
                result_columns(self.cols, self.epilogue),
                fmt.k_multiple,
                f"quantize_to={fmt.text!r}",
            )
        needs_amax = fmt is not None and fmt.global_scale is not None
        if needs_amax != (self.amax is not None):
            raise ValueError(
                "amax must be given if, and only if, quantize_to is a format with a global scale, "
                f"got quantize_to={self.quantize_to!r}"
            )
        if self.amax is not None:
            check_tensor("amax", self.amax, dtypes=(torch.float32,), shape=(self.offs.shape[0],))

    def outputs(self) -> list[BufferSpec]:
        """Return the result and the stored preactivation, or the buffers of a quantized result."""
        (z,) = super().outputs()
        width = result_columns(self.cols, self.epilogue)
        if (fmt := self.result_record) is not None:
            return list(buffers(fmt, (z.shape[0], width), self.offs.shape[0]).values())
        return [z._replace(shape=(z.shape[0], width)), *[z] * self.keeps_z]


@register
@dataclass
class MGroupedGemmActivate(_Activated, MGroupedGemm):  # type: ignore[misc]
    """Compute ``m_grouped_gemm`` and ``moe_activate`` of the result in one kernel.

    The result has the bits of the two ops: z, the product with its factors and bias, is rounded to
    ``out_dtype`` before the activation.

    Args:
        a: As for ``m_grouped_gemm``.
        b: (G, N, K), or (G, 2 N, K) for a gated activation, whose rows are halves [A | B].
        offs: (G,) int32. End rows.
        bias: (G, N), or (G, 2 N) for a gated activation. Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: Must be False.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        prepacked: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``.
        rows: As for ``m_grouped_gemm``.
        inverse: As for ``m_grouped_gemm``.
        epilogue: Text of the activation, as for ``moe_activate``.
        interleaved: Rows of ``b`` (and of ``bias``) for the two inputs of a gated activation
            alternate, A first.
        keeps_z: Return z, too, with columns in the order of the rows of ``b``.
        quantize_to: Text of a format. The activated result, rounded to ``out_dtype``, is quantized
            to it, and z is not returned.
        amax: (G,) fp32. The amaxes of the result, for a format with a global scale, as for
            ``grouped_quantize``.

    Returns:
        The activated result (T, N), then z (T, N or 2 N) with ``keeps_z``; rows of the tail are
        zeros. The ``_out`` form does not write rows of the tail. With ``quantize_to`` it returns
        the tensors that ``grouped_quantize`` of the activated result with ``offs`` and ``amax``
        returns.
    """

    name: ClassVar[str] = "m_grouped_gemm_activate"

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Multiply, activate and quantize with the reference backend."""
        (spec,) = MGrouped.outputs(self)
        z = outputs[1] if self.keeps_z else spec.allocate(self.device, True)
        super().run_reference([z], **options)
        width, text = result_columns(self.cols, self.epilogue), self.quantize_to
        a = outputs[0] if text is None else z.new_zeros(z.shape[0], width)
        activate(z, parse_activation(self.epilogue), self.offs, self.interleaved, a)
        if text is not None:
            GroupedQuantize(a, text, self.offs, self.amax).run_reference(outputs)


@register
@dataclass
class MGroupedQuantizeGemmActivate(_Activated, MGroupedQuantizeGemm):
    """Compute ``grouped_quantize`` of ``a`` and ``m_grouped_gemm_activate`` in one op.

    Args:
        a: As for ``m_grouped_quantize_gemm``.
        b: As for ``m_grouped_gemm_activate``.
        offs: (G,) int32. End rows.
        b_scales: As for ``m_grouped_quantize_gemm``.
        a_format: As for ``m_grouped_quantize_gemm``.
        b_format: As for ``m_grouped_quantize_gemm``.
        bias: As for ``m_grouped_gemm_activate``.
        alpha: (G,) fp32. Factors.
        transpose_b: Must be False.
        out_dtype: As for ``m_grouped_quantize_gemm``.
        prepacked: As for ``m_grouped_quantize_gemm``.
        seed: As for ``m_grouped_quantize_gemm``.
        accumulation: As for ``m_grouped_quantize_gemm``.
        activation: As for ``m_grouped_quantize_gemm``.
        rows: As for ``m_grouped_quantize_gemm``.
        inverse: As for ``m_grouped_quantize_gemm``.
        epilogue: As for ``m_grouped_gemm_activate``.
        interleaved: As for ``m_grouped_gemm_activate``.
        keeps_z: As for ``m_grouped_gemm_activate``.
        quantize_to: As for ``m_grouped_gemm_activate``.
        amax: As for ``m_grouped_gemm_activate``.

    Returns:
        As for ``m_grouped_gemm_activate``.
    """

    name: ClassVar[str] = "m_grouped_quantize_gemm_activate"
    product_type: ClassVar[type[MGroupedGemm]] = MGroupedGemmActivate
