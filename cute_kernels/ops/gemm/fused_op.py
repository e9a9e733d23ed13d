"""GEMM ops that do more on the way: quantize A, or take the result through an activation.

``gemm`` has the products by themselves, whose bits these have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .op import GroupedGemm, MGrouped, MGroupedGemm, parse_given
from .operand_tensors import OperandTensors


@register
@dataclass
class MGroupedQuantizeGemm(MGrouped):
    """``grouped_quantize`` of ``a`` and ``m_grouped_gemm`` of that in one op.

    The result has the bits of the two. On sm_90a, whose tensor cores multiply fp16, the NVFP4 A
    never exists as codes: the quantizer writes code times block scale, the operand of the GEMM.
    Other arguments are those of ``m_grouped_gemm``, of a quantized ``b``.

    Args:
        a: (T, K) bf16, fp16 or fp32.
        a_format: the text of the format that ``a`` is quantized to.
        out_dtype: bf16, fp16 or fp32; bf16 by default, as in the second of the two ops.
        seed: as for ``grouped_quantize``.
        activation: as for ``grouped_quantize``, of ``a``: (T, 2K) of a gated one.
        rows: as for ``grouped_quantize``, of ``a``; there are R rows then.
        inverse: likewise.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
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
        return result_columns(self.a.shape[1], self.activation)

    def check(self) -> None:
        super().check()
        check_prologue("a", self.a, self.activation)
        if self.rows is not None:
            check_rows(self.rows, "a", self.a)

    def reader(self) -> Callable[[GroupedGemm], tuple[OperandTensors, OperandTensors]]:
        read = super().reader()
        if self.rows is None:
            return read
        # Where codes have scales, for what quantizes A to them.
        return lambda op: ((op.a, op.rows, op.inverse), read(op)[1])

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        quantizer = self.quantizer()
        a = [s.allocate(self.device, True) for s in quantizer.outputs()]
        quantizer.run_reference(a)
        self.product(a).run_reference(outputs, **options)

    def quantizer(self) -> GroupedQuantize:
        """What quantizes A."""
        given: dict[str, Any] = {
            name: getattr(self, name) for name in ("seed", "activation", "rows", "inverse")
        }
        return GroupedQuantize(self.a, self.a_format, self.offs, **given)

    def product(self, a: Sequence[Tensor]) -> MGroupedGemm:
        """The GEMM of what the quantizer made of A."""
        read = len(parse(self.a_format).operand_names(columnwise=False))
        return self.product_type(
            a[0],
            self.b,
            self.offs,
            self.bias,
            self.alpha,
            self.transpose_b,
            self.result_dtype,
            list(a[1:read]),
            self.b_scales,
            self.a_format,
            self.b_format,
            self.prepacked,
            self.accumulation,
            None,
            None,
            *self.of_activation,
        )


@dataclass
class _Activated(MGrouped):
    """What m_grouped GEMMs with an activation share."""

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
    def of_activation(self) -> tuple[str, bool, bool, str | None, Tensor | None]:
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
        super().check()
        act = parse_activation(self.epilogue)
        curve_of(act)  # Raises if nothing computes it.
        is_gated = act.is_gated
        if self.transpose_b:
            raise ValueError("transpose_b is of dgrad, whose result goes through no activation")
        if is_gated and self.cols % 2:
            raise ValueError(
                f"b (G, 2N, K) of {self.epilogue}, which is gated, must have an even N, got {self.cols} rows"
            )
        if self.interleaved and not is_gated:
            raise ValueError(f"interleaved is of gated activations, which {self.epilogue} is not")
        if (fmt := self.result_record) is not None:
            if self.keeps_z:
                raise ValueError("keeps_z is of results that are not quantized")
            check_multiple(
                "N",
                result_columns(self.cols, self.epilogue),
                fmt.k_multiple,
                f"quantize_to={fmt.text!r}",
            )
        takes = fmt is not None and fmt.global_scale is not None
        if takes != (self.amax is not None):
            raise ValueError(
                "amax is of results that are quantized to a format with a second level, and needed there"
            )
        if self.amax is not None:
            check_tensor("amax", self.amax, dtypes=(torch.float32,), shape=(self.offs.shape[0],))

    def outputs(self) -> list[BufferSpec]:
        (z,) = super().outputs()
        width = result_columns(self.cols, self.epilogue)
        if (fmt := self.result_record) is not None:
            return list(buffers(fmt, (z.shape[0], width), self.offs.shape[0]).values())
        return [z._replace(shape=(z.shape[0], width)), *[z] * self.keeps_z]


@register
@dataclass
class MGroupedGemmActivate(_Activated, MGroupedGemm):  # type: ignore[misc]
    """``m_grouped_gemm`` and ``moe_activate`` of that in one kernel, with the bits of the two.

    So z, the product with its factors and bias, is rounded to ``out_dtype`` before the activation.

    Args:
        a: as for ``m_grouped_gemm``, and so all up to ``accumulation``.
        b: (G, N, K), or (G, 2 N, K) of a gated activation, whose rows are halves [A | B].
        epilogue: its text, as ``moe_activate`` takes it.
        interleaved: rows of ``b`` (and of ``bias``) for the two inputs of a gated activation
            alternate, A first.
        keeps_z: z is returned, too, with columns in the order of the rows of ``b``.
        quantize_to: text of a format to which a, rounded to ``out_dtype``, is quantized
            instead, without z.
        amax: (G,) fp32, its second level, of a format that has one: as for
            ``grouped_quantize``.

    Returns:
        a (T, N), then z (T, N or 2 N) if kept; rows of the tail are zeros. The ``_out`` form
        leaves them alone. Or what ``grouped_quantize`` of a with ``offs`` and ``amax`` returns.
    """

    name: ClassVar[str] = "m_grouped_gemm_activate"

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
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
    """``grouped_quantize`` of ``a`` and ``m_grouped_gemm_activate`` of that in one op.

    Args:
        a: as for ``m_grouped_quantize_gemm``, and so all up to ``inverse``.
        epilogue: as for ``m_grouped_gemm_activate``, and so all behind it.

    Returns:
        As ``m_grouped_gemm_activate``.
    """

    name: ClassVar[str] = "m_grouped_quantize_gemm_activate"
    product_type: ClassVar[type[MGroupedGemm]] = MGroupedGemmActivate
