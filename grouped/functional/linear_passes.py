"""Forward and backward passes of the grouped linear product on plain tensors.

``linear_autograd`` and ``experts`` connect them to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import Format

from ..recipes import Recipe
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.members import QuantizedCopy
from .linear_call import LinearCall, join_weights
from .operands import (
    NOTHING_SAVED,
    Epilogue,
    Gradients,
    LazyRows,
    OperandCopy,
    OperandProbe,
    QuantizedOperand,
    QuantizedRows,
    SavedOperands,
    Scaling,
    WgradOperands,
    materialize,
)
from .products import (
    QuantizedProduct,
    multiplied_weight,
    plain_product,
    quantize_activation_gradient,
    quantize_operand,
    quantize_weight,
    role_format,
    to_16_bit,
)

__all__ = [
    "WgradInput",
    "backward",
    "forward",
    "quantize_activation_gradient",
    "quantize_weight",
    "to_16_bit",
    "wgrad_input",
]


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
        x: (T, K). Rows.
        weights: The weight (G, N, K), or (N, K) per group.
        bias: (G, N). Optional.
        offs: (G,) int32. End rows.
        recipe: Formats of the operands.
        quantized: The quantized weight, if it exists already.
        needs: True for each of x and weight if its gradient is needed.
        scaling: Scales under delayed scaling.
        probe: Observes the operands.
        epilogue: Activation of the result.

    Returns:
        The outputs of the product: y (T, N), or the outputs of the epilogue. And the tensors that
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
    product = QuantizedProduct(
        "input",
        x,
        cast("OperandCopy", quantized.rowwise),
        offs,
        role_format(recipe, "input"),
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
    row_index: Tensor | None = None
    inverse: Tensor | None = None
    if isinstance(x, LazyRows) and x.activation is None and probe is None and not need_dweight:
        row_index, inverse, x = x.row_index, x.inverse, x.x
    x = materialize(x)
    low_x = to_16_bit(x)
    low_weight = multiplied_weight(weights, low_x.dtype)
    y = plain_product(
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
    # dgrad casts and joins the parameters again. Saving them costs no memory, unlike a copy.
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
            f"weight is {weight.format}, whose transformed columnwise copy the gradient of the "
            "input does not read: quantize it without hadamard where x requires a gradient"
        )
    if weight.rowwise is None:
        raise RuntimeError(
            f"weight has no rowwise copy, which the forward product reads: {weight!r}"
        )
    if weight.columnwise is None and need_dx:
        raise RuntimeError(
            "weight has no columnwise copy, which the gradient of the input reads. To serve, call "
            "the layer under torch.no_grad(). To train layers before it, make the copy by "
            f"grouped.prepare or grouped.quantize with columnwise=True. weight is {weight!r}"
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
    quantized = quantize_operand(
        x,
        offs,
        role_format(call.recipe, "input"),
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
        dy: (T, N). Gradient of the output. Or quantized in both directions, if the gradients of x
            and of the weight are needed, and that of the bias is not.
        offs: (G,) int32. End rows.
        saved: The tensors that the forward pass saved.
        scale: (G,) fp32. Scales of ``dy``, if its format has given scales.
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
        weight = multiplied_weight(parameters, low_dy.dtype)
        (dx,) = plain_product(low_dy, weight, offs, out_dtype=call.dtype, transpose=True)
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
    fmt = role_format(call.recipe, "grad_output")
    dy_scale = call.operand_scale("grad_output", scale)
    if need_dx and weight is not None:
        (dx,), quantized = QuantizedProduct(
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
    quantized = quantize_operand(dy, offs, fmt, rowwise=False, columnwise=True, scale=dy_scale)
    if call.probe is not None:
        call.probe.observe("grad_output", materialize(dy), quantized, call.recipe.grad_output, offs)
    return None, quantized
