"""Products of the grouped linear layer on plain tensors, and the quantization of their operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import Format

from ..recipes import ROLES, Recipe
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.seeds import draw_seed
from .gemm import w4a16_operand
from .linear_call import LinearCall, join_weights
from .operands import (
    Epilogue,
    LazyRows,
    OperandCopy,
    OperandScale,
    QuantizedOperand,
    QuantizedRows,
    Scaling,
    materialize,
)


def quantize_weight(
    weight: Tensor, recipe: Recipe, columnwise: bool, scaling: Scaling | None = None
) -> QuantizedOperand:
    """Quantize weights (G, N, K) rowwise, and columnwise on request."""
    return quantize_operand(
        weight.detach(),
        None,
        role_format(recipe, "weight"),
        rowwise=True,
        columnwise=columnwise,
        scale=None if scaling is None else scaling.operand_scale("weight"),
    )


def role_format(recipe: Recipe, role: str) -> Format:
    """Return the format that the operand of a role is quantized to."""
    fmt = recipe.formats[ROLES.index(role)]
    if fmt is None:
        raise ValueError(f"recipe has no format for {role}: {recipe}")
    return fmt


def quantize_operand(
    x: Tensor | LazyRows,
    offs: Tensor | None,
    fmt: Format,
    *,
    rowwise: bool,
    columnwise: bool,
    scale: OperandScale | None,
) -> QuantizedOperand:
    """Quantize rows; lazy ones are computed by the quantizer if it can."""
    activation = index = inverse = scale_values = None
    if scale is not None:
        scale_values = scale.value
        if scale.may_be_zero:
            x = materialize(x)
            scale_values = scale.resolve(x, offs, fmt)
    if isinstance(x, LazyRows):
        x, _, index, inverse, activation, _ = x.for_quantizer(fmt)
    buffers = ops.grouped_quantize(
        x,
        fmt.text,
        offs,
        rowwise=rowwise,
        columnwise=columnwise,
        scale=scale_values,
        seed=draw_seed(fmt, x.device),
        activation=activation,
        rows=index,
        inverse=inverse,
    )
    return _operand_from_buffers(fmt, iter(buffers), rowwise, columnwise)


def _operand_from_buffers(
    fmt: Format, buffers: Iterator[Tensor], rowwise: bool, columnwise: bool
) -> QuantizedOperand:
    """Take the outputs of ``grouped_quantize`` for the requested directions from ``buffers``."""
    names = [*fmt.buffer_names(False)] if rowwise else []
    if columnwise:
        names += fmt.buffer_names(True)
    named = {name: next(buffers) for name in dict.fromkeys(names)}

    def copy(columnwise: bool) -> OperandCopy:
        return OperandCopy.from_tensors(
            fmt, *(named[name] for name in fmt.operand_names(columnwise))
        )

    return QuantizedOperand(
        rowwise=copy(False) if rowwise else None,
        columnwise=copy(True) if columnwise else None,
        amax=named["amax"] if fmt.has_given_scale else None,
    )


class ActivationGradientOperands(NamedTuple):
    """Quantized gradient of an activation, and its weighted result.

    Attributes:
        dz: Gradient of the activation's input, in both directions.
        weighted_activation: The product p * a, quantized columnwise.
        dp: (T, k) fp32 gradient of the routing weights.
    """

    dz: QuantizedOperand
    weighted_activation: QuantizedOperand
    dp: Tensor


def quantize_activation_gradient(
    z: Tensor,
    grad: Tensor,
    recipes: tuple[Recipe, Recipe],
    scales: Sequence[Tensor | None],
    **options: Any,
) -> ActivationGradientOperands:
    """Compute and quantize dz and p * a in one op.

    Args:
        z: (R, W). Input of the activation.
        grad: (R, N). Gradient of its result, without the routing weights.
        recipes: Recipes of the two products. dz has the first one's gradient format, and p * a the
            second one's input format.
        scales: (G,) fp32 of dz and of p * a, for formats that have given scales.
        **options: Other arguments of ``moe_quantize_gradient``.
    """
    dz_format = role_format(recipes[0], "grad_output")
    activation_format = role_format(recipes[1], "input")
    *outputs, dp = ops.moe_quantize_gradient(
        z,
        grad,
        dz_format.text,
        activation_format.text,
        scale=scales[0],
        scaled_scale=scales[1],
        **options,
    )
    buffers = iter(outputs)
    dz = _operand_from_buffers(dz_format, buffers, rowwise=True, columnwise=True)
    weighted = _operand_from_buffers(activation_format, buffers, rowwise=False, columnwise=True)
    return ActivationGradientOperands(dz, weighted, dp)


# ---- products


class QuantizedProduct(NamedTuple):
    """A product whose rows are quantized first: fprop of the input, or dgrad of the gradient.

    Attributes:
        role: Role of the rows, ``"input"`` or ``"grad_output"``.
        x: (T, K). Rows, or rows that are quantized already.
        weight: Copy of the weight whose blocks run along K.
        offs: (G,) int32. End rows.
        fmt: Format of the rows.
        call: Metadata of the call.
        bias: (G, N). Added in fp32.
        transpose: True if the product is dgrad.
        columnwise: Also make the columnwise copy of the rows.
        scale: Scales of the rows, if their format has given scales.
        epilogue: Activation of the result.
    """

    role: str
    x: Tensor | LazyRows | QuantizedRows
    weight: OperandCopy
    offs: Tensor
    fmt: Format
    call: LinearCall
    bias: Tensor | None = None
    transpose: bool = False
    columnwise: bool = False
    scale: OperandScale | None = None
    epilogue: Epilogue | None = None

    def run(self) -> tuple[list[Tensor], QuantizedOperand]:
        """Return the outputs of the product, and the columnwise copy of the rows on request."""
        if isinstance(self.x, QuantizedRows):
            quantized = QuantizedOperand(self.x.copy)
            return self._multiply(quantized), quantized
        if not self.columnwise and self.scale is None and self.call.probe is None:
            return self._quantize_and_multiply(self.x), QuantizedOperand()
        x = self.x if self.call.probe is None else materialize(self.x)
        quantized = quantize_operand(
            x,
            self.offs,
            self.fmt,
            rowwise=True,
            columnwise=self.columnwise,
            scale=self.scale,
        )
        if self.call.probe is not None:
            fmt = getattr(self.call.recipe, self.role)
            self.call.probe.observe(self.role, materialize(x), quantized, fmt, self.offs)
        return self._multiply(quantized), quantized

    def _multiply(self, quantized: QuantizedOperand) -> list[Tensor]:
        """Multiply rows that are quantized by the weight."""
        x = cast("OperandCopy", quantized.rowwise)
        options = {
            "bias": self.bias,
            "transpose_b": self.transpose,
            "out_dtype": self.call.dtype,
            "a_scales": x.scales,
            "b_scales": self.weight.scales,
            "a_format": self.fmt.text,
            "b_format": self.call.weight_format,
            "prepacked": self.call.prepacked,
        }
        operands = (x.codes, self.weight.codes, self.offs)
        return _m_grouped_gemm(operands, options, self.epilogue)

    def _quantize_and_multiply(self, x: Tensor | LazyRows) -> list[Tensor]:
        """Quantize and multiply in one op, which keeps no copy of the rows."""
        rows = x.for_quantizer(self.fmt) if isinstance(x, LazyRows) else LazyRows(x, self.offs)
        options: dict[str, Any] = {
            "b_scales": self.weight.scales,
            "a_format": self.fmt.text,
            "b_format": self.call.weight_format,
            "bias": self.bias,
            "transpose_b": self.transpose,
            "out_dtype": self.call.dtype,
            "prepacked": self.call.prepacked,
            "seed": draw_seed(self.fmt, rows.x.device),
            "activation": rows.activation,
            "rows": rows.row_index,
            "inverse": rows.inverse,
        }
        operands = (rows.x, self.weight.codes, self.offs)
        if self.epilogue is None:
            return [ops.m_grouped_quantize_gemm(*operands, **options)]
        return ops.m_grouped_quantize_gemm_activate(*operands, **options | self.epilogue.options)


def _m_grouped_gemm(
    operands: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], epilogue: Epilogue | None
) -> list[Tensor]:
    """Return the outputs of ``m_grouped_gemm``, or of its ``_activate`` form with an epilogue."""
    if epilogue is None:
        return [ops.m_grouped_gemm(*operands, **options)]
    return ops.m_grouped_gemm_activate(*operands, **options | epilogue.options)


def plain_product(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    transpose: bool = False,
    row_index: Tensor | None = None,
    inverse: Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> list[Tensor]:
    """Multiply plain rows by plain or quantized weights."""
    options: dict[str, Any] = {"bias": bias, "transpose_b": transpose, "out_dtype": out_dtype}
    b = weight
    if isinstance(weight, GroupedTensor):
        b, options["b_scales"], options["b_format"] = w4a16_operand(x, weight, transpose)
    if row_index is not None:
        options |= {"rows": row_index, "inverse": inverse}
    return _m_grouped_gemm((x, b, offs), options, epilogue)


def to_16_bit(x: Tensor) -> Tensor:
    """Return ``x`` in the data type in which plain operands are multiplied: bf16, or fp16."""
    return x if x.dtype in (torch.bfloat16, torch.float16) else x.to(torch.bfloat16)


def multiplied_weight(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight that multiplies operands of ``dtype``: cast, or quantized as it is."""
    if isinstance(parameters[0], GroupedTensor):
        return parameters[0]
    return join_weights([w.to(dtype) for w in parameters])
