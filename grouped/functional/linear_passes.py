"""Forward and backward passes of the grouped linear product on plain tensors.

``linear_autograd`` and ``experts`` connect them to autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import Format

from ..recipes import ROLES, Recipe
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.members import QuantizedCopy
from ..tensor.seeds import draw_seed
from .gemm import w4a16_operand
from .linear_call import LinearCall, join_weights
from .operands import (
    NOTHING_SAVED,
    Epilogue,
    Gradients,
    LazyRows,
    OperandCopy,
    OperandProbe,
    OperandScale,
    QuantizedOperand,
    QuantizedRows,
    SavedOperands,
    Scaling,
    WgradOperands,
    materialize,
)

# ---- quantization


def quantize_weight(
    weight: Tensor, recipe: Recipe, columnwise: bool, scaling: Scaling | None = None
) -> QuantizedOperand:
    """Quantize weights (G, N, K) rowwise, and columnwise on request."""
    return _quantize(
        weight.detach(),
        None,
        _role_format(recipe, "weight"),
        rowwise=True,
        columnwise=columnwise,
        scale=None if scaling is None else scaling.operand_scale("weight"),
    )


def _role_format(recipe: Recipe, role: str) -> Format:
    fmt = recipe.formats[ROLES.index(role)]
    if fmt is None:
        raise ValueError(f"recipe has no format for {role}: {recipe}")
    return fmt


def _quantize(
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
        weighted_activation: P * a, columnwise.
        dp: (T, k) fp32 gradient of the routing weights.
    """

    dz: QuantizedOperand
    weighted_activation: QuantizedOperand
    dp: Tensor


def quantize_activation_gradient(
    z: Tensor,
    grad: Tensor | None,
    recipes: tuple[Recipe, Recipe],
    scales: Sequence[Tensor | None],
    **options: Any,
) -> ActivationGradientOperands:
    """Compute and quantize dz and p * a in one op.

    Args:
        z: (R, W) input of the activation.
        grad: (R, N) gradient of its result, without the routing weights.
        recipes: Recipes of the two products: dz has the first one's gradient format, p * a the
            second one's input format.
        scales: (G,) fp32 of dz and of p * a, for formats that have given scales.
        **options: Other arguments of ``moe_quantize_gradient``.
    """
    dz_format = _role_format(recipes[0], "grad_output")
    activation_format = _role_format(recipes[1], "input")
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


class _QuantizedProduct(NamedTuple):
    """A product whose rows are quantized first: fprop of the input, or dgrad of the gradient.

    Attributes:
        role: Role of the rows, ``"input"`` or ``"grad_output"``.
        x: (T, K) rows, or rows that are quantized already.
        weight: Copy of the weight whose blocks run along K.
        offs: (G,) int32 end rows.
        fmt: Format of the rows.
        call: Metadata of the call.
        bias: (G, N), added in fp32.
        transpose: The product is dgrad.
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
        quantized = _quantize(
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
        return _call_gemm("m_grouped_gemm", operands, options, self.epilogue)

    def _quantize_and_multiply(self, x: Tensor | LazyRows) -> list[Tensor]:
        """Quantize and multiply in one op, which keeps no copy of the rows."""
        rows = x.for_quantizer(self.fmt) if isinstance(x, LazyRows) else LazyRows(x, self.offs)
        options = {
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
        return _call_gemm("m_grouped_quantize_gemm", operands, options, self.epilogue)


def _call_gemm(
    name: str, operands: tuple[Tensor, ...], options: dict[str, Any], epilogue: Epilogue | None
) -> list[Tensor]:
    """Call a GEMM op, or its ``_activate`` form if there is an epilogue; return its outputs."""
    if epilogue is None:
        return [getattr(ops, name)(*operands, **options)]
    options["epilogue"], options["interleaved"], options["keeps_z"] = epilogue[:3]
    options["quantize_to"] = epilogue.quantize_to
    return getattr(ops, f"{name}_activate")(*operands, **options)


def _plain_product(
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
    return _call_gemm("m_grouped_gemm", (x, b, offs), options, epilogue)


def to_16_bit(x: Tensor) -> Tensor:
    """Return ``x`` in the data type in which plain operands are multiplied: bf16, or fp16."""
    return x if x.dtype in (torch.bfloat16, torch.float16) else x.to(torch.bfloat16)


def _multiplied_weight(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight that multiplies operands of ``dtype``: cast, or quantized as it is."""
    if isinstance(parameters[0], GroupedTensor):
        return parameters[0]
    return join_weights([w.to(dtype) for w in parameters])


# ---- forward


def forward(
    x: Tensor | LazyRows | QuantizedRows,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    quantized: QuantizedOperand | None,
    needs: Sequence[bool],
    scaling: Scaling | None = None,
    probe: OperandProbe | None = None,
    epilogue: Epilogue | None = None,
) -> tuple[list[Tensor], SavedOperands]:
    """Multiply rows by the weight of their group.

    Args:
        x: (T, K) rows.
        weights: The weight (G, N, K), or (N, K) per group.
        bias: (G, N), or None.
        offs: (G,) int32 end rows.
        recipe: Formats of the operands.
        quantized: The quantized weight, if it exists already.
        needs: True for each of x and weight if its gradient is needed.
        scaling: Scales under delayed scaling.
        probe: Observes the operands.
        epilogue: Activation of the result.

    Returns:
        The outputs of the product: y (T, N), or the outputs of the epilogue; and the tensors that
        the backward pass reads.
    """
    need_dx, need_dweight = needs[:2]
    weight = weights[0]
    if isinstance(weight, GroupedTensor):
        _check_quantized_weight(weight, need_dx)
    if not recipe.is_quantized:
        rows = cast("Tensor | LazyRows", x)
        return _plain_forward(
            rows, weights, bias, offs, need_dx, need_dweight, probe=probe, epilogue=epilogue
        )
    if isinstance(weight, GroupedTensor):
        quantized = _operand_from_grouped(weight)
    elif quantized is None:
        quantized = quantize_weight(join_weights(weights), recipe, need_dx, scaling)
    if probe is not None:
        _observe_weight(probe, weights, quantized, recipe.weight)
    product = _QuantizedProduct(
        "input",
        x,
        cast("OperandCopy", quantized.rowwise),
        offs,
        _role_format(recipe, "input"),
        LinearCall.from_operands(x, weight, bias, recipe, probe, scaling),
        bias,
        columnwise=need_dweight,
        scale=None if scaling is None else scaling.operand_scale("input"),
        epilogue=epilogue,
    )
    y, quantized_x = product.run()
    if not need_dx and not need_dweight and scaling is None:
        return y, NOTHING_SAVED
    saved = SavedOperands(quantized_x.columnwise, quantized.columnwise if need_dx else None)
    if scaling is not None:
        saved = saved._replace(amax_x=quantized_x.amax, amax_weight=quantized.amax)
    return y, saved


def _plain_forward(
    x: Tensor | LazyRows,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    need_dx: bool,
    need_dweight: bool,
    *,
    probe: OperandProbe | None,
    epilogue: Epilogue | None,
) -> tuple[list[Tensor], SavedOperands]:
    """``forward`` of recipes that quantize nothing; the weight may be quantized already."""
    row_index = inverse = None
    if isinstance(x, LazyRows) and x.activation is None and probe is None and not need_dweight:
        x, row_index, inverse = x.x, x.row_index, x.inverse
    x = materialize(x)
    low_x = to_16_bit(x)
    low_weight = _multiplied_weight(weights, low_x.dtype)
    y = _plain_product(
        low_x,
        low_weight,
        offs,
        out_dtype=x.dtype,
        bias=bias,
        row_index=row_index,
        inverse=inverse,
        epilogue=epilogue,
    )
    if probe is not None:
        probe.observe("input", x, QuantizedOperand(OperandCopy(low_x)), None, offs)
        _observe_weight(probe, weights, QuantizedOperand(OperandCopy(low_weight)), None)
    del low_weight
    if not need_dx:
        return y, SavedOperands(OperandCopy(low_x)) if need_dweight else NOTHING_SAVED
    # dgrad casts and joins the parameters again: to save them costs no memory, a copy does.
    parameters = list(weights)
    weight = weights[0]
    if isinstance(weight, GroupedTensor):
        # Autograd then notices a write to a plain tensor of the weight through another wrapper.
        parameters += [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    return y, SavedOperands(OperandCopy(low_x) if need_dweight else None, None, parameters)


def _observe_weight(
    probe: OperandProbe,
    weights: Sequence[Tensor],
    quantized: QuantizedOperand,
    fmt: Format | None,
) -> None:
    weight = weights[0]
    if isinstance(weight, GroupedTensor):
        quantized, fmt = _operand_from_grouped(weight), weight.format
    probe.observe("weight", weight if weight.dim() == 3 else weights, quantized, fmt)


def _operand_from_grouped(weight: GroupedTensor) -> QuantizedOperand:
    """Return the copies of a GroupedTensor as an operand."""

    def copy(quantized: QuantizedCopy | None) -> OperandCopy | None:
        if quantized is None:
            return None
        return OperandCopy.from_quantized_copy(weight.format, quantized)

    return QuantizedOperand(copy(weight.rowwise), copy(weight.columnwise))


def _check_quantized_weight(weight: GroupedTensor, need_dx: bool) -> None:
    """Raise unless a weight that is quantized already has the copies that the products read."""
    if weight.grouping != "uniform":
        raise ValueError(f"weight must be uniform, got {weight!r}")
    level = weight.format.global_scale
    if level is not None and level.per == "row":
        raise ValueError(
            f"weight must have one global scale per group, got {weight.format}: row_scaled is for "
            "activations"
        )
    if need_dx and weight.format.is_transformed:
        raise ValueError(
            f"weight is {weight.format}, whose transformed columnwise copy dgrad does not read: "
            "quantize it without hadamard where x requires a gradient"
        )
    if weight.rowwise is None:
        raise RuntimeError(f"weight has no rowwise copy, which fprop reads: {weight!r}")
    if weight.columnwise is None and need_dx:
        raise RuntimeError(
            f"weight has no columnwise copy, which dgrad reads: {weight!r}; make it by "
            "grouped.prepare or grouped.quantize with columnwise=True, or call the layer under "
            "torch.no_grad()"
        )


# ---- backward


class WgradInput(NamedTuple):
    """Input of a product as wgrad reads it.

    Attributes:
        x: Columnwise copy, or values if plain.
        row_index: Row of ``x`` for each row, if plain rows are gathered by the product.
        inverse: The inverse of ``row_index``.
        amax: (G,) amax under delayed scaling.
    """

    x: OperandCopy
    row_index: Tensor | None = None
    inverse: Tensor | None = None
    amax: Tensor | None = None


def wgrad_input(
    call: LinearCall,
    x: Tensor | LazyRows | QuantizedOperand,
    offs: Tensor,
    scale: Tensor | None,
) -> WgradInput:
    """Return what wgrad reads of the input, for a call whose forward pass did not save it.

    Args:
        call: Metadata of the call.
        x: The input (T, K), or quantized with a columnwise copy.
        offs: (G,) int32 end rows.
        scale: (G,) fp32 scales of the input, if its format has given scales.
    """
    if isinstance(x, QuantizedOperand):
        return WgradInput(cast("OperandCopy", x.columnwise), amax=x.amax)
    if not call.recipe.is_quantized:
        if isinstance(x, LazyRows) and x.activation is None and x.row_index is not None:
            return WgradInput(OperandCopy(to_16_bit(x.x)), x.row_index, x.inverse)
        return WgradInput(OperandCopy(to_16_bit(materialize(x))))
    if call.probe is not None:
        x = materialize(x)
    quantized = _quantize(
        x,
        offs,
        _role_format(call.recipe, "input"),
        rowwise=False,
        columnwise=True,
        scale=call.operand_scale("input", scale),
    )
    if call.probe is not None:
        call.probe.observe("input", materialize(x), quantized, call.recipe.input, offs)
    return WgradInput(cast("OperandCopy", quantized.columnwise), amax=quantized.amax)


def backward(
    call: LinearCall,
    needs: Sequence[bool],
    dy: Tensor | LazyRows | QuantizedOperand,
    offs: Tensor,
    saved: SavedOperands,
    scale: Tensor | None = None,
) -> Gradients:
    """Compute the gradients of a call.

    Args:
        call: Metadata of the call.
        needs: True for each of x, weight and bias if its gradient is needed.
        dy: (T, N) gradient of the output; or quantized in both directions, if the gradients of x
            and of the weight are needed, and that of the bias is not.
        offs: (G,) int32 end rows.
        saved: The tensors that the forward pass saved.
        scale: (G,) fp32 scales of ``dy``, if its format has given scales.
    """
    if isinstance(dy, QuantizedOperand):
        return _quantized_backward(call, dy, offs, saved)
    amax = None
    if needs[2] or call.probe is not None or not call.recipe.is_quantized:
        dy = materialize(dy)
    if call.recipe.is_quantized:
        dx, quantized = _quantized_gradients(call, needs, dy, offs, saved.weight, scale)
        dy_copy, amax = quantized.columnwise, quantized.amax
    else:
        dx, dy_copy = _plain_gradients(call, needs, materialize(dy), offs, saved.parameters)
    dbias = ops.grouped_dbias(materialize(dy), offs).to(call.bias_dtype) if needs[2] else None
    wgrad = None if dy_copy is None else WgradOperands(dy_copy, saved.x, offs)
    return Gradients(dx, wgrad, dbias, amax)


def _quantized_backward(
    call: LinearCall, dy: QuantizedOperand, offs: Tensor, saved: SavedOperands
) -> Gradients:
    """``backward`` of a gradient that is quantized already."""
    rowwise, columnwise = cast("OperandCopy", dy.rowwise), cast("OperandCopy", dy.columnwise)
    weight = cast("OperandCopy", saved.weight)
    dx: Tensor = ops.m_grouped_gemm(
        rowwise.codes,
        weight.codes,
        offs,
        transpose_b=True,
        out_dtype=call.dtype,
        a_scales=rowwise.scales,
        b_scales=weight.scales,
        a_format=call.recipe.texts[2],
        b_format=call.weight_format,
        prepacked=call.prepacked,
    )
    return Gradients(dx, WgradOperands(columnwise, saved.x, offs), None, dy.amax)


def _plain_gradients(
    call: LinearCall,
    needs: Sequence[bool],
    dy: Tensor,
    offs: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Tensor | None, OperandCopy | None]:
    """Return the gradient of x, and ``dy`` as wgrad reads it."""
    low_dy = dy.to(torch.float16 if call.dtype == torch.float16 else torch.bfloat16)
    dx = None
    if needs[0] and parameters:
        weight = _multiplied_weight(parameters, low_dy.dtype)
        (dx,) = _plain_product(low_dy, weight, offs, out_dtype=call.dtype, transpose=True)
    if call.probe is not None:
        call.probe.observe("grad_output", dy, QuantizedOperand(OperandCopy(low_dy)), None, offs)
    return dx, OperandCopy(low_dy) if needs[1] else None


def _quantized_gradients(
    call: LinearCall,
    needs: Sequence[bool],
    dy: Tensor | LazyRows,
    offs: Tensor,
    weight: OperandCopy | None,
    scale: Tensor | None,
) -> tuple[Tensor | None, QuantizedOperand]:
    """Return the gradient of x, and quantized ``dy``, whose columnwise copy wgrad reads."""
    need_dx, need_dweight = needs[:2]
    fmt = _role_format(call.recipe, "grad_output")
    dy_scale = call.operand_scale("grad_output", scale)
    if need_dx and weight is not None:
        (dx,), quantized = _QuantizedProduct(
            "grad_output",
            dy,
            weight,
            offs,
            fmt,
            call,
            transpose=True,
            columnwise=need_dweight,
            scale=dy_scale,
        ).run()
        return dx, quantized
    if not need_dweight:
        return None, QuantizedOperand()
    quantized = _quantize(dy, offs, fmt, rowwise=False, columnwise=True, scale=dy_scale)
    if call.probe is not None:
        call.probe.observe("grad_output", materialize(dy), quantized, call.recipe.grad_output, offs)
    return None, quantized
