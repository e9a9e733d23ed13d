"""``grouped.linear``: the grouped linear product, an op that has its gradients with it."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_kernels.formats import parse
from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype, check_tensor, same_device
from cute_kernels.ops.flops import register_flops
from grouped.functional.flops import product_flops

from ..inspect import Probe
from ..recipes import ROLES, OfCall, Recipe, check_recipe
from ..tensor.dtensor_parts import is_spread
from ..tensor.grouped_tensor import GroupedTensor, handler
from ..tensor.offsets import Offsets, as_offs
from ..tensor.validation import check_is_tensor
from .linear_passes import Copies, Kept, LinearCall, Scaling, backward, forward, joined, low

if TYPE_CHECKING:
    from ..nn.delayed_scaling import DelayedScaling
    from ..nn.weight_gradients import ParameterGradients


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Offsets,
    recipe: Recipe,
    *,
    scaling: "DelayedScaling | None" = None,
) -> Tensor:
    """Rows of each group times its weight: ``y = x W_g^T + b_g``; differentiable in x, W and b.

    What ``grouped.nn.GroupedLinear`` calls. Its gradients are registered with the op that it is, so
    they are there in exported and pipelined modules and under ``torch.func``; there are no second
    derivatives and no forward-mode ones.

    Args:
        x: (..., K) bf16, fp16 or fp32, whose leading dimensions flatten to T rows sorted by
            group; under autocast, cast to its dtype.
        weight: (G, N, K), which takes a gradient of its dtype and may have any strides: one
            that is stored (G, K, N) is given as ``weight.mT``. Or a uniform GroupedTensor,
            used as it is, whose gradient is that of the values that it stands for.
        bias: (G, N), or None.
        offs: (G,) end rows: an integer tensor on the device of ``x``, or a host list.
        recipe: the format of each operand, forward and backward. BF16 multiplies in bf16, or in
            fp16 if that is what ``x`` is.
        scaling: the scales under a recipe with delayed scaling, which needs them and has none
            of its own: a ``grouped.nn.DelayedScaling(recipe, G)`` that outlives the call.
            In ``train()`` mode the call records its amaxes; ``scaling.update()`` makes the
            next scales of them, once a step.

    Returns:
        (..., N) of the dtype of ``x``. Rows from ``offs[-1]`` on, the tail of a capacity
        buffer, are zeros, and so they are in the gradient of ``x``.

    Raises:
        TypeError: ``recipe`` is no Recipe, or a dtype is not taken.
        ValueError: a shape, a device or offs that break a rule; or ``scaling`` is missing, or
            is not for this recipe.
        RuntimeError: a GroupedTensor lacks a copy that the product or a gradient reads, or a
            second or forward-mode derivative.
    """
    check_recipe(recipe)
    check_is_tensor("x", x)
    check_tensor("weight", weight, dtypes=INPUT_DTYPES, ndim=(3,))
    same_device("x", x.device, weight=weight, bias=bias)
    groups, cols, depth = weight.shape
    if is_spread(x, weight):
        return _of_dtensors(x, weight, bias, offs, recipe)
    if x.dim() >= 2 and x.shape[-1] != depth:
        raise ValueError(
            f"x (..., K) and weight (G, N, K) must share K, got {tuple(x.shape)} and {tuple(weight.shape)}: a weight stored "
            "(G, K, N) is given as weight.mT"
        )
    rows, ends = rows_and_ends(x, offs, groups, depth)
    if (scaling is not None) != recipe.takes_scales:
        raise ValueError(
            f"{type(recipe).__name__} takes the scales of earlier steps: pass a "
            "grouped.nn.DelayedScaling(recipe, G) as scaling, the same in each step"
            if recipe.takes_scales
            else f"scaling is for recipes with delayed scaling, got {recipe}"
        )
    of_call = None if scaling is None else scaling.of_call(recipe, groups)
    y = multiply(rows, [weight], bias, ends, recipe, scaling=of_call)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], cols)


def _of_dtensors(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Offsets, recipe: Recipe
) -> Tensor:
    from . import dtensor_ops as sharding

    if recipe.takes_scales:
        raise ValueError(f"{recipe} keeps scales on each rank: pass to_local() instead of DTensors")
    sharding.refuse_random(recipe.input, recipe.weight, recipe.grad_output)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = sharding.product(
        lambda x, w, offs, b, _: linear(x, w, b, offs, recipe), rows, weight, offs, bias
    )
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[1])


def rows_of(x: Tensor, depth: int) -> Tensor:
    """``x`` as (T, K) rows of the dtype of the computation."""
    check_is_tensor("x", x)
    if x.dim() < 2 or x.shape[-1] != depth:
        raise ValueError(
            f"x must have shape (..., {depth}) and at least 2 dimensions, got {tuple(x.shape)}"
        )
    if type(x) is not Tensor and is_spread(x):
        raise TypeError(
            "x is a DTensor: modules of grouped.nn take a rank's rows, its to_local(), which PrepareModuleInputOutput of "
            "torch.distributed.tensor.parallel gives them"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, depth)
    kind = x.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 does not trace it.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    check_dtype("x", rows.dtype, INPUT_DTYPES)
    return rows


def rows_and_ends(x: Tensor, offs: Offsets, groups: int, depth: int) -> tuple[Tensor, Tensor]:
    """``x`` as (T, K) rows of the dtype of the computation, and ``offs`` as a tensor."""
    rows = rows_of(x, depth)
    ends = as_offs(offs, rows.shape[0], x.device)
    differs = ends.shape[0] != groups
    if torch.compiler.is_compiling():
        # Slow to load, and loaded by now.
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        # Of offsets from ``torch.bincount`` the number is known when the graph runs, and checks.
        differs = guard_or_false(differs)
        torch._check(differs or ends.shape[0] == groups)
    if differs:
        raise ValueError(
            f"offs must have one end row for each of the {groups} groups, got {ends.shape[0]} entries"
        )
    return rows, ends


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    copies: Copies | None = None,
    sink: "ParameterGradients | None" = None,
    scaling: Scaling | None = None,
    probe: Probe | None = None,
) -> Tensor:
    """``linear`` of (T, K) rows and of offs (G,) int32 as the kernels take them.

    Weights are (G, N, K), or (N, K) of each group. Not while something traces this: ``copies``, the
    quantized weight if there is one already, ``sink``, what takes the gradients of weight and bias,
    and ``probe``, what looks at the operands.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return torch.ops.grouped.linear(
            *(x, joined(weights), bias, offs, *recipe.texts, recipe.propagate_nonfinite),
            *(scaling or ()),
        )
    return _differentiable(x, weights, bias, offs, recipe, copies, sink, scaling, probe)


# ---- autograd


def _flat(kept: Kept) -> list[Tensor]:
    return [t for operand in kept for t in operand or ()]


def _unflat(flat: Sequence[Tensor], call: LinearCall, needs: Sequence[bool]) -> Kept:
    """What a call kept that needed the gradients of x and of the weight as ``needs`` says."""
    count = 0
    if needs[1]:
        fmt = call.recipe.input
        count = 1 if fmt is None else len(fmt.operand_names(columnwise=True))
    of_x, of_weight = list(flat[:count]), list(flat[count:])
    return of_x or None, of_weight or None


#: Where the weights begin among the inputs of ``_Linear``.
_WEIGHTS = 9


class _Linear(torch.autograd.Function):
    """The product in eager mode, and where a compiler traces what it consists of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        offs: Tensor,
        recipe: Recipe,
        copies: Copies | None,
        sink: "ParameterGradients | None",
        scaling: Scaling | None,
        probe: Probe | None,
        *weights: Tensor,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[_WEIGHTS:]), ctx.needs_input_grad[1]
        ctx.needs = ctx.needs_input_grad[0], *(wanted if sink is None else sink.wanted)
        (y,), kept, amaxes = forward(
            x, weights, bias, offs, recipe, copies, ctx.needs, scaling, probe
        )
        # The scale may be updated in place before the backward pass, which is this call's.
        scale = None if scaling is None else scaling.scales[-1].clone()
        ctx.save_for_backward(offs, scale, *(amaxes or (None, None)), *_flat(kept))
        # Not saved: other calls write the amaxes of the step in between.
        ctx.call = LinearCall.of(x, weights[0], bias, recipe, probe, scaling)
        ctx.sink, ctx.scaling = sink, scaling
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sink is not None:
            ctx.sink.check()
        offs, scale, of_x, of_weight, *kept = ctx.saved_tensors
        operands = _unflat(kept, ctx.call, ctx.needs)
        # Unless the graph is retained: so that the weight is gone before its gradient is made.
        ctx.maybe_clear_saved_tensors()
        del kept
        with torch.no_grad():
            dx, wgrad, dbias, of_dy = backward(ctx.call, ctx.needs, dy, offs, operands, scale)
            del operands
            if ctx.scaling is not None:
                ctx.scaling.record((of_x, of_weight, of_dy))
            wanted = ctx.needs_input_grad[_WEIGHTS:]
            dweights: Sequence[Tensor | None] = [None] * len(wanted)
            if ctx.sink is not None:
                dweights, dbias = ctx.sink.take(ctx.call, wgrad, dbias)
            elif wgrad is not None:
                dweights = ctx.call.split(ctx.call.weight_gradient(wgrad), wanted)
        gradients = (dx, dbias, *dweights)
        # Gradients are on where somebody means to differentiate these again.
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
    """The gradients, of which a derivative raises.

    ``once_differentiable`` does this only where dy requires a gradient, though that of the weight
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
    """The same in the form that ``torch.func`` takes, where what is kept is an output."""

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
        scaling = Scaling(scales) if scales else None
        (y,), kept, _ = forward(x, [_unpacked(weight)], bias, offs, recipe, None, needs, scaling)
        if not recipe.is_quantized:
            return (y,)  # x and weight are kept.
        return y, *_flat(kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, offs, recipe, needs, *scales = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, offs, scales[-1] if scales else None, *output[1:])
        ctx.scales = len(scales)
        scaling = Scaling(scales) if scales else None
        ctx.call = LinearCall.of(x, weight, bias, recipe, None, scaling)._replace(prepacked=False)
        ctx.kept_for = needs

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        options = (ctx.call, ctx.kept_for, needs)
        gradients = iter(_TransformedGradients.apply(dy, *ctx.saved_tensors, *options))
        return *(next(gradients) if need else None for need in needs), *(None,) * (3 + ctx.scales)


class _TransformedGradients(_ReverseOnly):
    """The gradients under ``torch.func``, which differentiates again to no end."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, scale: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        *flat, call, kept_for, needs = rest
        kept: Kept = ([low(x)], [_unpacked(weight)])
        if call.recipe.is_quantized:
            kept = _unflat(flat, call, kept_for)
        dx, wgrad, dbias, _ = backward(call, needs, dy, offs, kept, scale)
        dweight = None if wgrad is None else call.weight_gradient(wgrad)
        return tuple(t for t in (dx, dweight, dbias) if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_TWICE)


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
    copies: Copies | None = None,
    sink: "ParameterGradients | None" = None,
    scaling: Scaling | None = None,
    probe: Probe | None = None,
) -> Tensor:
    anchor = None if sink is None else sink.anchor
    if anchor is not None:
        weights, bias = [w.detach() for w in weights], bias if bias is None else bias.detach()
    operands = (x, bias, anchor, *weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        rest = (offs, recipe, copies, sink, scaling, probe, *weights)
        return _Linear.apply(x, bias, anchor, *rest)
    if forward_ad._current_level >= 0:
        for t in operands:
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                _refuse_forward_mode()
    (y,), _, amaxes = forward(
        x, weights, bias, offs, recipe, copies, (False, False), scaling, probe
    )
    if scaling is not None:
        # No backward pass will.
        scaling.record(amaxes)
    return y


# ---- as an op

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor offs, str? input_format, "
    "str? weight_format, str? grad_output_format, bool propagate_nonfinite, "
    "Tensor[]? scales=None, Tensor[]? amaxes=None, bool[]? may_be_zero=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def recipe_of(*formats_and_flags: Any) -> Recipe:
    """The recipe of the texts of its formats and ``propagate_nonfinite``, as ops have them."""
    *formats, propagate_nonfinite = formats_and_flags
    records = (None if text is None else parse(text) for text in formats)
    return OfCall(**dict(zip(ROLES, records, strict=True)), propagate_nonfinite=propagate_nonfinite)


def scaling_of(
    scales: Sequence[Tensor] | None = None,
    amaxes: Sequence[Tensor] | None = None,
    may_be_zero: Sequence[bool] | None = None,
) -> Scaling | None:
    """The scaling of a call, of what ops have of it."""
    return None if scales is None else Scaling(scales, amaxes, may_be_zero or (True, True, True))


def _linear_below_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    recipe = recipe_of(*recipe_and_scaling[:4])
    # What records amaxes is above: this computes, and writes nothing.
    scales, _, *may_be_zero = (*recipe_and_scaling[4:], None, None)[:3]
    scaling = scaling_of(scales, None, *may_be_zero)
    return forward(x, [weight], bias, offs, recipe, None, (False, False), scaling)[0][0]


def _linear_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    # Not torch.library.register_autograd: torch.func does not go through what it generates, and
    # what is kept depends on which gradients are wanted when it runs, not when it was traced.
    recipe, scaling = recipe_of(*recipe_and_scaling[:4]), scaling_of(*recipe_and_scaling[4:])
    return _differentiable(x, [weight], bias, offs, recipe, scaling=scaling)


def _linear_transformed(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe_and_scaling: Any
) -> Tensor:
    recipe, scaling = recipe_of(*recipe_and_scaling[:4]), scaling_of(*recipe_and_scaling[4:5])
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
def _linear_of_grouped(func: Any, *arguments: Any) -> Tensor:
    return _linear_below_autograd(*arguments)


register_flops(torch.ops.grouped, product_flops, "linear")
