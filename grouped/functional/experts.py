"""The experts of a mixture from tokens to tokens: gather, two products, combine, and gradients.

Also from rows to rows, if rows are sorted by expert already. Then there are no routing weights p,
and x, z and a are saved for the backward pass as two linear layers and an activation save them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.ops.flops import register_flops

from ..tensor.dispatch import handler
from .expert_layer import ExpertsOptions, Layer
from .experts_backward import BackwardContext, NeededGradients, SavedTensors, compute_gradients
from .experts_forward import (
    ExpertsResult,
    products,
    run_forward,
    run_inference,
)
from .flops import experts_flops
from .linear_autograd import recipe_from_texts, scaling_from_arguments, without_derivative
from .linear_call import LinearCall, join_weights
from .routing import PresortedRouting, Routing, compute_routing

__all__ = [
    "ExpertsOptions",
    "ExpertsResult",
    "Layer",
    "PresortedRouting",
    "Routing",
    "compute_routing",
    "experts",
    "products",
    "run_inference",
]


def experts(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | PresortedRouting,
    gate_up: Layer,
    down: Layer,
    options: ExpertsOptions,
) -> Tensor:
    """Apply the experts.

    Args:
        x: (T, H). Tokens. Or rows that are sorted by expert, with a ``PresortedRouting``.
        p: (T, k) fp32. Routing weights. None for sorted rows; also if they are deferred and no
            gradient is needed.
        routing: Routing of the tokens.
        gate_up: The first layer.
        down: The second layer.
        options: Options of the experts.

    Returns:
        (T, H) of ``options.dtype``.
    """
    if not torch.compiler.is_compiling():
        return _differentiable(x, p, routing, (gate_up, down), options)
    scales_1, amaxes_1, may_be_zero_1 = gate_up.scaling or (None, None, None)
    scales_2, amaxes_2, may_be_zero_2 = down.scaling or (None, None, None)
    return torch.ops.grouped.experts(
        x,
        p,
        *routing,
        join_weights(gate_up.weights),
        gate_up.bias,
        join_weights(down.weights),
        down.bias,
        *gate_up.recipe.texts,
        *down.recipe.texts,
        gate_up.recipe.propagate_nonfinite,
        down.recipe.propagate_nonfinite,
        *options,
        scales_1,
        amaxes_1,
        scales_2,
        amaxes_2,
        may_be_zero_1,
        may_be_zero_2,
    )


def _differentiable(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | PresortedRouting,
    layers: tuple[Layer, Layer],
    options: ExpertsOptions,
) -> Tensor:
    """Compute the experts, through autograd if a gradient is needed."""
    anchors = [layer.anchor for layer in layers]
    gate_up, down = (layer if layer.anchor is None else layer.detached() for layer in layers)
    layers = (gate_up, down)
    operands = (x, p, gate_up.bias, down.bias, *anchors)
    weights = (*gate_up.weights, *down.weights)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*operands, *weights)
    ):
        return _Experts.apply(*operands, routing, layers, options, *weights)
    result = run_forward(x, p, routing, layers, options)
    for layer, saved in zip(layers, (result.gate_up, result.down), strict=True):
        if layer.scaling is not None:
            # Recorded here, since there is no backward pass that does it.
            layer.scaling.record((saved.amax_x, saved.amax_weight))
    return result.y


#: Position of the first weight among the inputs of ``_Experts``.
_WEIGHTS = 9


class _Experts(torch.autograd.Function):
    """The experts in eager mode, and where a compiler traces their decomposition."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Tensor | None,
        bias_1: Tensor | None,
        bias_2: Tensor | None,
        anchor_1: Tensor | None,
        anchor_2: Tensor | None,
        routing: Routing | PresortedRouting,
        layers: tuple[Layer, Layer],
        options: ExpertsOptions,
        *weights: Tensor,
    ) -> Tensor:
        """Return y (T, H), and save what the gradients read."""
        gate_up, down = layers
        needs = _needed_gradients(ctx.needs_input_grad, layers)
        layer_needs = (needs.x, needs.gate_up[0]), (needs.z or needs.p, needs.down[0])
        result = run_forward(
            x, p, routing, layers, options, layer_needs, keeps_z=not options.recompute
        )
        saved = SavedTensors.from_forward(x, p, routing, layers, options, needs, result)
        tensors, lengths = saved.flatten()
        ctx.save_for_backward(*tensors)
        calls = (
            LinearCall.from_operands(
                x, layer.weights[0], layer.bias, layer.recipe, layer.probe, layer.scaling
            )
            for layer in layers
        )
        ctx.context = BackwardContext(
            layers=(gate_up.without_tensors(), down.without_tensors()),
            calls=tuple(calls),  # type: ignore[arg-type]
            options=options,
            needs=needs,
            lengths=lengths,
        )
        return result.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, p, both biases and all weights."""
        context: BackwardContext = ctx.context
        for layer in context.layers:
            if layer.accumulator is not None:
                layer.accumulator.check()
        tensors = [dy, *ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        with torch.no_grad():
            gradients = compute_gradients(context, tensors)
        if torch.is_grad_enabled():
            gradients = without_derivative(
                gradients, "grouped.nn.MoE cannot be differentiated twice"
            )
        dx, dp, dbias_1, dbias_2, *dweights = gradients
        return dx, dp, dbias_1, dbias_2, *(None,) * (_WEIGHTS - 4), *dweights

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("grouped.nn.MoE has no forward-mode derivative; use reverse mode")


def _needed_gradients(
    needs_input_grad: Sequence[bool], layers: tuple[Layer, Layer]
) -> NeededGradients:
    """Return the gradients that autograd or the layers' accumulators need."""
    gate_up, down = layers
    split = _WEIGHTS + len(gate_up.weights)
    gate_up_weights = tuple(needs_input_grad[_WEIGHTS:split])
    down_weights = tuple(needs_input_grad[split:])
    gate_up_needs = gate_up.needed_gradients(any(gate_up_weights), needs_input_grad[2])
    return NeededGradients(
        x=needs_input_grad[0],
        p=needs_input_grad[1],
        z=needs_input_grad[0] or any(gate_up_needs),
        gate_up=gate_up_needs,
        down=down.needed_gradients(any(down_weights), needs_input_grad[3]),
        gate_up_weights=gate_up_weights,
        down_weights=down_weights,
    )


# ---- the op

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_FORMATS = ", ".join(
    f"str? {role}_format_{i}" for i in (1, 2) for role in ("input", "weight", "grad_output")
)
_LIBRARY.define(
    "experts(Tensor x, Tensor? p, Tensor offs, Tensor? token, Tensor? pair, Tensor? row, "
    f"Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, {_FORMATS}, "
    "bool propagate_nonfinite_1, bool propagate_nonfinite_2, str activation, bool interleaved, "
    "bool recompute, ScalarType dtype, bool apart, Tensor[]? scales_1, Tensor[]? amaxes_1, "
    "Tensor[]? scales_2, Tensor[]? amaxes_2, bool[]? may_be_zero_1=None, bool[]? "
    "may_be_zero_2=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _parse_arguments(
    arguments: Sequence[Any], *, records_amaxes: bool
) -> tuple[Tensor, Tensor | None, Routing | PresortedRouting, tuple[Layer, Layer], ExpertsOptions]:
    """Return the arguments of ``experts`` from the arguments of the op.

    Args:
        arguments: In the order of the op's schema.
        records_amaxes: True if amaxes may be written.
    """
    x, p = arguments[:2]
    formats, flags = arguments[10:16], arguments[16:18]
    layers = []
    for i in range(2):
        recipe = recipe_from_texts(*formats[3 * i : 3 * i + 3], flags[i])
        scales, amaxes = arguments[23 + 2 * i : 25 + 2 * i]
        may_be_zero = (*arguments[27:], None, None)[i]
        scaling = scaling_from_arguments(scales, amaxes if records_amaxes else None, may_be_zero)
        weight, bias = arguments[6 + 2 * i : 8 + 2 * i]
        layers.append(Layer([weight], bias, recipe, scaling=scaling))
    offs, token = arguments[2:4]
    routing = PresortedRouting(offs) if token is None else Routing(*arguments[2:6])
    return x, p, routing, (layers[0], layers[1]), ExpertsOptions(*arguments[18:23])


def _experts_below_autograd(*arguments: Any) -> Tensor:
    # The autograd layer above records amaxes: this computes, and writes nothing.
    return run_forward(*_parse_arguments(arguments, records_amaxes=False)).y


def _experts_autograd(*arguments: Any) -> Tensor:
    return _differentiable(*_parse_arguments(arguments, records_amaxes=True))


def _experts_fake(*arguments: Any) -> Tensor:
    row, weight, dtype = arguments[5], arguments[8], arguments[21]
    x: Tensor = arguments[0]
    return x.new_empty((x if row is None else row).shape[0], weight.shape[1], dtype=dtype)


_LIBRARY.impl("experts", _experts_below_autograd, "CompositeExplicitAutograd")
_LIBRARY.impl("experts", _experts_autograd, "Autograd")
torch.library.register_fake("grouped::experts", _experts_fake, lib=_LIBRARY)


@handler(torch.ops.grouped.experts.default)
def _experts_of_grouped_tensors(func: Any, *arguments: Any) -> Tensor:
    return _experts_below_autograd(*arguments)


register_flops(torch.ops.grouped, experts_flops, "experts")
