"""``grouped.linear``: the grouped linear product as an op with registered gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_kernels.formats import parse
from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype, check_tensor, same_device
from cute_kernels.ops.flops import register_flops

from ..recipes import ROLES, CallRecipe, Recipe, check_recipe
from ..tensor.dispatch import handler
from ..tensor.dtensor_parts import is_distributed
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.offsets import Offsets, parse_offs
from ..tensor.validation import check_is_tensor
from .flops import product_flops
from .linear_call import DelayedScales, LinearCall, WeightGradientAccumulator, join_weights
from .linear_passes import backward, forward, to_16_bit
from .operands import OperandCopy, OperandProbe, QuantizedOperand, SavedOperands, Scaling


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Offsets,
    recipe: Recipe,
    *,
    scaling: DelayedScales | None = None,
) -> Tensor:
    """Multiply the rows of each group by its weight: ``y = x W_g^T + b_g``.

    The function is differentiable in x, W and b. ``grouped.nn.GroupedLinear`` calls it. The
    gradients are registered with an op, so they exist in exported and pipelined modules and under
    ``torch.func``. There are no second and no forward-mode derivatives.

    Args:
        x: (..., K) bf16, fp16 or fp32, whose leading dimensions flatten to T rows sorted by group.
            Under autocast they are cast to its dtype.
        weight: (G, N, K) with any strides. Pass a weight that is stored as (G, K, N) as
            ``weight.mT``. The gradient has the dtype of the weight. Or a uniform GroupedTensor,
            which is used as it is, and whose gradient is that of its decoded values.
        bias: (G, N). Optional.
        offs: (G,). End rows: an integer tensor on the device of ``x``, or a host list.
        recipe: The format of each operand, forward and backward. BF16 multiplies in bf16, or in
            fp16 if ``x`` is fp16.
        scaling: State of delayed scaling, required by recipes that have it: a
            ``grouped.nn.DelayedScaling(recipe, G)`` that outlives the call. In ``train()`` mode the
            call records its amaxes. Call ``scaling.update()`` once per step to compute the next
            scales from them.

    Returns:
        (..., N) of the dtype of ``x``. Rows from ``offs[-1]`` on, the tail of a capacity buffer,
        are zeros, here and in the gradient of ``x``.

    Raises:
        TypeError: ``recipe`` is not a Recipe, or a dtype is not supported.
        ValueError: A shape, a device or offs are invalid. Or ``scaling`` is missing, or is for
            another recipe.
        RuntimeError: A GroupedTensor lacks a copy that the product or a gradient reads. Or a second
            or forward-mode derivative was requested.
    """
    check_recipe(recipe)
    check_is_tensor("x", x)
    check_tensor("weight", weight, dtypes=INPUT_DTYPES, ndim=(3,))
    same_device("x", x.device, weight=weight, bias=bias)
    groups, cols, depth = weight.shape
    if is_distributed(x, weight):
        return _distributed_linear(x, weight, bias, offs, recipe)
    if x.dim() >= 2 and x.shape[-1] != depth:
        raise ValueError(
            f"x (..., K) and weight (G, N, K) must share K, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}: a weight stored "
            "(G, K, N) is given as weight.mT"
        )
    rows, end_rows = rows_and_end_rows(x, offs, groups, depth)
    if (scaling is not None) != recipe.takes_scales:
        raise ValueError(
            f"{type(recipe).__name__} takes the scales of earlier steps: pass a "
            "grouped.nn.DelayedScaling(recipe, G) as scaling, the same in each step"
            if recipe.takes_scales
            else f"scaling is for recipes with delayed scaling, got {recipe}"
        )
    call_scaling = None if scaling is None else scaling.call_scaling(recipe, groups)
    y = multiply(rows, [weight], bias, end_rows, recipe, scaling=call_scaling)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], cols)


def _distributed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Offsets, recipe: Recipe
) -> Tensor:
    """``linear`` of DTensors."""
    from . import dtensor_ops

    if recipe.takes_scales:
        raise ValueError(f"{recipe} keeps scales on each rank: pass to_local() instead of DTensors")
    dtensor_ops.refuse_stochastic(recipe.input, recipe.weight, recipe.grad_output)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = dtensor_ops.product(
        lambda x, w, offs, b, _: linear(x, w, b, offs, recipe), rows, weight, offs, bias
    )
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[1])


def flatten_rows(x: Tensor, depth: int) -> Tensor:
    """Return ``x`` as rows (T, depth) of the dtype of the computation."""
    check_is_tensor("x", x)
    if x.dim() < 2 or x.shape[-1] != depth:
        raise ValueError(
            f"x must have shape (..., {depth}) and at least 2 dimensions, got {tuple(x.shape)}"
        )
    if type(x) is not Tensor and is_distributed(x):
        raise TypeError(
            "x is a DTensor: modules of grouped.nn take a rank's rows, its to_local(), which "
            "PrepareModuleInputOutput of "
            "torch.distributed.tensor.parallel gives them"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, depth)
    kind = x.device.type
    # Torch 2.11 does not trace torch.amp.is_autocast_available.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    check_dtype("x", rows.dtype, INPUT_DTYPES)
    return rows


def rows_and_end_rows(x: Tensor, offs: Offsets, groups: int, depth: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` as rows (T, depth) of the dtype of the computation, and ``offs`` as a tensor."""
    rows = flatten_rows(x, depth)
    end_rows = parse_offs(offs, rows.shape[0], x.device)
    differs = end_rows.shape[0] != groups
    if torch.compiler.is_compiling():
        # Slow to import, but imported by now.
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        # The number of offsets from ``torch.bincount`` is known when the graph runs, and checks.
        differs = guard_or_false(differs)
        torch._check(differs or end_rows.shape[0] == groups)
    if differs:
        raise ValueError(
            f"offs must have one end row for each of the {groups} groups, got {end_rows.shape[0]} "
            "entries"
        )
    return rows, end_rows


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    quantized: QuantizedOperand | None = None,
    accumulator: WeightGradientAccumulator | None = None,
    scaling: Scaling | None = None,
    probe: OperandProbe | None = None,
) -> Tensor:
    """Compute ``linear`` of checked arguments.

    Args:
        x: (T, K) rows.
        weights: The weight (G, N, K), or (N, K) per group.
        bias: (G, N), or None.
        offs: (G,) int32 end rows.
        recipe: Formats of the operands.
        quantized: The quantized weight, if it exists already. Not used while the call is traced.
        accumulator: Receives the gradients of weight and bias. Not used while the call is traced.
        scaling: Scales under delayed scaling.
        probe: Observes the operands. Not used while the call is traced.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return torch.ops.grouped.linear(
            x,
            join_weights(weights),
            bias,
            offs,
            *recipe.texts,
            recipe.propagate_nonfinite,
            *(scaling or ()),
        )
    return _differentiable(x, weights, bias, offs, recipe, quantized, accumulator, scaling, probe)


# ---- autograd

#: Position of the first weight among the inputs of ``_Linear``.
_WEIGHTS = 9


class _Linear(torch.autograd.Function):
    """The product in eager mode, and where a compiler traces its decomposition."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        offs: Tensor,
        recipe: Recipe,
        quantized: QuantizedOperand | None,
        accumulator: WeightGradientAccumulator | None,
        scaling: Scaling | None,
        probe: OperandProbe | None,
        *weights: Tensor,
    ) -> Tensor:
        """Return y (T, N), and save what the gradients read."""
        wanted = any(ctx.needs_input_grad[_WEIGHTS:]), ctx.needs_input_grad[1]
        ctx.needs = (
            ctx.needs_input_grad[0],
            *(wanted if accumulator is None else accumulator.wanted),
        )
        (y,), saved = forward(x, weights, bias, offs, recipe, quantized, ctx.needs, scaling, probe)
        # A copy: the scale may be updated in place before the backward pass of this call.
        scale = None if scaling is None else scaling.scales[-1].clone()
        ctx.save_for_backward(offs, scale, *saved.flatten())
        # Autograd must not save them: other calls write the amaxes of the step in between.
        ctx.call = LinearCall.from_operands(x, weights[0], bias, recipe, probe, scaling)
        ctx.accumulator, ctx.scaling = accumulator, scaling
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, bias and weights."""
        if ctx.accumulator is not None:
            ctx.accumulator.check()
        offs, scale, *tensors = ctx.saved_tensors
        saved = SavedOperands.unflatten(tensors)
        # Unless the graph is retained, this frees the quantized weight before its gradient is made.
        ctx.maybe_clear_saved_tensors()
        del tensors
        with torch.no_grad():
            dx, wgrad, dbias, amax_dy = backward(ctx.call, ctx.needs, dy, offs, saved, scale)
            amaxes = (saved.amax_x, saved.amax_weight, amax_dy)
            del saved
            if ctx.scaling is not None:
                ctx.scaling.record(amaxes)
            wanted = ctx.needs_input_grad[_WEIGHTS:]
            dweights: Sequence[Tensor | None] = [None] * len(wanted)
            if ctx.accumulator is not None:
                dweights, dbias = ctx.accumulator.take(ctx.call, wgrad, dbias)
            elif wgrad is not None:
                dweights = ctx.call.split(ctx.call.weight_gradient(wgrad), wanted)
        gradients = (dx, dbias, *dweights)
        # Gradients are enabled if the caller intends to differentiate the result again.
        if torch.is_grad_enabled():
            gradients = without_derivative(gradients, _TWICE)
        dx, dbias, *dweights = gradients
        return dx, dbias, *(None,) * (_WEIGHTS - 2), *dweights

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


def without_derivative(
    gradients: Sequence[Tensor | None], message: str
) -> tuple[Tensor | None, ...]:
    """Return the gradients as tensors whose derivative raises.

    ``once_differentiable`` does this only if dy requires a gradient. The gradient of the weight
    depends on x, too.
    """
    refuse: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))
    return refuse(*(t if t is None else t.detach().requires_grad_() for t in gradients))


_TWICE = "grouped.linear cannot be differentiated twice"


class _ReverseOnly(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError(
            "grouped.linear has no vmap: it takes many groups and leading dimensions at once"
        )


class _TransformedLinear(_ReverseOnly):
    """The product in the form that ``torch.func`` needs: saved tensors are outputs."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        recipe: Recipe,
        needs: tuple[bool, bool],
        *scales: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return y (T, N), and the tensors to save."""
        scaling = Scaling(scales) if scales else None
        (y,), saved = forward(x, [_unpacked(weight)], bias, offs, recipe, None, needs, scaling)
        if not recipe.is_quantized:
            return (y,)  # x and weight are saved.
        copies = (copy for copy in (saved.x, saved.weight) if copy is not None)
        return y, *(t for copy in copies for t in copy if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs and outputs that the gradients read."""
        x, weight, bias, offs, recipe, needs, *scales = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, offs, scales[-1] if scales else None, *output[1:])
        ctx.scales = len(scales)
        scaling = Scaling(scales) if scales else None
        call = LinearCall.from_operands(x, weight, bias, recipe, None, scaling)
        ctx.call = call._replace(prepacked=False)
        ctx.saved_for = needs

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        needs = ctx.needs_input_grad[:3]
        options = (ctx.call, ctx.saved_for, needs)
        gradients = iter(_TransformedGradients.apply(dy, *ctx.saved_tensors, *options))
        return *(next(gradients) if need else None for need in needs), *(None,) * (3 + ctx.scales)


class _TransformedGradients(_ReverseOnly):
    """The gradients under ``torch.func``, which may differentiate them again."""

    @staticmethod
    def forward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        scale: Tensor | None,
        *copies_and_options: Any,
    ) -> tuple[Tensor, ...]:
        """Return the needed ones of the gradients of x, weight and bias."""
        *tensors, call, saved_for, needs = copies_and_options
        if call.recipe.is_quantized:
            saved = _saved_copies(tensors, call, saved_for)
        else:
            saved = SavedOperands(x=OperandCopy(to_16_bit(x)), parameters=[_unpacked(weight)])
        dx, wgrad, dbias, _ = backward(call, needs, dy, offs, saved, scale)
        dweight = None if wgrad is None else call.weight_gradient(wgrad)
        return tuple(t for t in (dx, dweight, dbias) if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_TWICE)


def _saved_copies(
    tensors: Sequence[Tensor], call: LinearCall, saved_for: Sequence[bool]
) -> SavedOperands:
    """Rebuild the copies of x and of the weight from their tensors.

    Args:
        tensors: The tensors of both copies, in order.
        call: Metadata of the call.
        saved_for: True for each of dx and dweight if its operand was saved: the columnwise copy of
            the weight for dx, of x for dweight.
    """
    x = weight = None
    count = 0
    if saved_for[1] and call.recipe.input is not None:
        count = len(call.recipe.input.operand_names(columnwise=True))
        x = OperandCopy.from_tensors(call.recipe.input, *tensors[:count])
    if saved_for[0] and call.weight_format is not None:
        weight = OperandCopy.from_tensors(parse(call.weight_format), *tensors[count:])
    return SavedOperands(x, weight)


def _unpacked(weight: Tensor) -> Tensor:
    return weight.unpack() if isinstance(weight, GroupedTensor) else weight


def _refuse_forward_mode() -> None:
    raise RuntimeError("grouped.linear has no forward-mode derivative; use reverse mode")


def _differentiable(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    quantized: QuantizedOperand | None = None,
    accumulator: WeightGradientAccumulator | None = None,
    scaling: Scaling | None = None,
    probe: OperandProbe | None = None,
) -> Tensor:
    """Compute the product, through autograd if a gradient is needed."""
    anchor = None if accumulator is None else accumulator.anchor
    if anchor is not None:
        weights, bias = [w.detach() for w in weights], bias if bias is None else bias.detach()
    operands = (x, bias, anchor, *weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _Linear.apply(
            x, bias, anchor, offs, recipe, quantized, accumulator, scaling, probe, *weights
        )
    if forward_ad._current_level >= 0:
        for t in operands:
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                _refuse_forward_mode()
    needs = (False, False)
    (y,), saved = forward(x, weights, bias, offs, recipe, quantized, needs, scaling, probe)
    if scaling is not None:
        # Recorded here, since there is no backward pass that does it.
        scaling.record((saved.amax_x, saved.amax_weight))
    return y


# ---- the op

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor offs, str? input_format, "
    "str? weight_format, str? grad_output_format, bool propagate_nonfinite, "
    "Tensor[]? scales=None, Tensor[]? amaxes=None, bool[]? may_be_zero=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def recipe_from_texts(*formats_and_flags: Any) -> Recipe:
    """Return the recipe of an op's arguments: the texts of its formats, propagate_nonfinite."""
    *formats, propagate_nonfinite = formats_and_flags
    records = (None if text is None else parse(text) for text in formats)
    roles = dict(zip(ROLES, records, strict=True))
    return CallRecipe(**roles, propagate_nonfinite=propagate_nonfinite)


def scaling_from_arguments(
    scales: Sequence[Tensor] | None = None,
    amaxes: Sequence[Tensor] | None = None,
    may_be_zero: Sequence[bool] | None = None,
) -> Scaling | None:
    """Return the scaling of an op's arguments."""
    return None if scales is None else Scaling(scales, amaxes, may_be_zero or (True, True, True))


def _linear_below_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    """Compute ``linear`` without gradients, for plain tensors."""
    recipe = recipe_from_texts(*recipe_and_scaling[:4])
    # The autograd layer above records amaxes: this computes, and writes nothing.
    scales, _, *may_be_zero = (*recipe_and_scaling[4:], None, None)[:3]
    scaling = scaling_from_arguments(scales, None, *may_be_zero)
    (y,), _ = forward(x, [weight], bias, offs, recipe, None, (False, False), scaling)
    return y


def _linear_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    # torch.library.register_autograd does not work here: torch.func ignores the functions that it
    # generates. And the saved tensors depend on the gradients that are needed at run time, not at
    # trace time.
    recipe = recipe_from_texts(*recipe_and_scaling[:4])
    scaling = scaling_from_arguments(*recipe_and_scaling[4:])
    return _differentiable(x, [weight], bias, offs, recipe, scaling=scaling)


def _linear_transformed(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    """Compute ``linear`` under ``torch.func``."""
    recipe = recipe_from_texts(*recipe_and_scaling[:4])
    scaling = scaling_from_arguments(*recipe_and_scaling[4:5])
    needs = x.requires_grad, weight.requires_grad
    scales = () if scaling is None else scaling.scales
    outputs = _TransformedLinear.apply(x, weight, bias, offs, recipe, needs, *scales)
    return outputs[0]


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


_LIBRARY.impl("linear", _linear_below_autograd, "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _linear_autograd, "Autograd")
_LIBRARY.impl("linear", _linear_transformed, "FuncTorchDynamicLayerFrontMode")
torch.library.register_fake("grouped::linear", _linear_fake, lib=_LIBRARY)


@handler(torch.ops.grouped.linear.default)
def _linear_of_grouped_tensors(func: Any, *arguments: Any) -> Tensor:
    return _linear_below_autograd(*arguments)


register_flops(torch.ops.grouped, product_flops, "linear")
