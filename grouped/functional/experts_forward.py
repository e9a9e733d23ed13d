"""Forward pass of the experts, and its replay.

y[t] = sum over k of p[t, k] h[row(t, k)] with h = W2 a + b2 and a = act(z), z = W1 x + b1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.runtime.observers import PLAIN_TENSOR_TYPES
from cute_kernels.runtime.replay import replayed

from ..recipes import Recipe
from ..tensor.grouped_tensor import GroupedTensor
from .expert_layer import ExpertsOptions, Layer, ReplayKey
from .operands import LazyRows, OperandCopy, QuantizedRows, SavedOperands
from .routing import PresortedRouting, Routing

#: For each layer: True for each of its input and its weight if the gradient is needed.
LayerNeeds: TypeAlias = "tuple[tuple[bool, bool], tuple[bool, bool]]"
NO_GRADIENTS: LayerNeeds = ((False, False), (False, False))
#: Classes of tensors that a replayed call may read.
REPLAYED_TENSOR_TYPES = PLAIN_TENSOR_TYPES | {GroupedTensor}


class ExpertsResult(NamedTuple):
    """Results of a forward pass.

    Attributes:
        y: (T, H) output; rows of the second product where they are not combined.
        z: (R, W) input of the activation, if it was kept.
        gate_up: Tensors that the first layer saves.
        down: Tensors that the second layer saves.
    """

    y: Tensor
    z: Tensor | None
    gate_up: SavedOperands
    down: SavedOperands


def run_inference(
    key: Hashable,
    inputs: Sequence[Tensor | None],
    layers: tuple[Layer, Layer],
    run: Callable[[], Tensor],
) -> Tensor:
    """Return ``run()``, replayed if gradients are disabled.

    Args:
        key: Options that ``run`` depends on, other than the layers.
        inputs: Tensors that ``run`` reads, other than those of the layers.
        layers: The layers that ``run`` multiplies by.
        run: Computes the result.
    """
    is_scaled = layers[0].scaling or layers[1].scaling
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_scaled:
        return run()
    layers_key = key_of_layers(layers)
    return run() if layers_key is None else replay_inference(key, inputs, layers_key, run)


def replay_inference(
    key: Hashable,
    inputs: Sequence[Tensor | None],
    layers_key: ReplayKey,
    run: Callable[[], Tensor],
) -> Tensor:
    """Return ``run()``, replayed if possible. Gradients must be disabled.

    Args:
        key: Options that ``run`` depends on, other than the layers.
        inputs: Tensors that ``run`` reads, other than those of the layers.
        layers_key: Replay key of the layers that ``run`` multiplies by.
        run: Computes the result.
    """
    (y,), _ = replayed(
        (key, layers_key[0]),
        [*inputs, *layers_key[1]],
        lambda _: ([run()], None),
        REPLAYED_TENSOR_TYPES,
    )
    return y


def key_of_layers(layers: tuple[Layer, Layer]) -> ReplayKey | None:
    """Return the replay key of both layers, or None if one of them cannot be replayed."""
    gate_up, down = layers[0].replay_key(), layers[1].replay_key()
    if gate_up is None or down is None:
        return None
    return (gate_up[0], down[0]), gate_up[1] + down[1]


def key_of_quantized_layers(
    weights: tuple[GroupedTensor, GroupedTensor],
    biases: tuple[Tensor | None, Tensor | None],
    recipe: Recipe,
) -> ReplayKey:
    """Return a replay key like ``key_of_layers`` faster, for quantized weights."""
    gate_up, down = weights
    key = (recipe.texts, recipe.propagate_nonfinite, gate_up._layout, down._layout)
    inner = (*gate_up._inner().values(), down, *down._inner().values())
    return key, [*biases, gate_up, *inner]


def run_forward(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | PresortedRouting,
    layers: tuple[Layer, Layer],
    options: ExpertsOptions,
    needs: LayerNeeds = NO_GRADIENTS,
    keeps_z: bool = False,
) -> ExpertsResult:
    """Compute the experts, replayed if possible.

    Args:
        x: (T, H). Tokens, or rows that are sorted by expert.
        p: (T, k) fp32. Routing weights. None for sorted rows.
        routing: Routing of the tokens.
        layers: The two layers.
        options: Options of the experts.
        needs: For each layer, True for each of input and weight if its gradient is needed.
        keeps_z: Return the input of the activation.
    """
    layers_key = key_of_layers(layers)
    if layers_key is None:
        return _run(x, p, routing, layers, options, needs, keeps_z)

    def run(_: object) -> tuple[list[Tensor | None], int]:
        y, z, gate_up, down = _run(x, p, routing, layers, options, needs, keeps_z)
        saved = gate_up.flatten()
        return [y, z, *saved, *down.flatten()], len(saved)

    (y, z, *saved), count = replayed(
        ("experts", layers_key[0], options, needs, keeps_z),
        [x, p, *routing, *layers_key[1]],
        run,
        REPLAYED_TENSOR_TYPES,
    )
    gate_up, down = SavedOperands.unflatten(saved[:count]), SavedOperands.unflatten(saved[count:])
    return ExpertsResult(y, z, gate_up, down)


def _run(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | PresortedRouting,
    layers: tuple[Layer, Layer],
    options: ExpertsOptions,
    needs: LayerNeeds,
    keeps_z: bool,
) -> ExpertsResult:
    """Compute both products and combine rows into tokens. See ``run_forward``."""
    result = products(x, routing, layers, options, needs, keeps_z)
    if routing.row is None:
        return result
    weights = None if options.defer_routing_weights else p
    return result._replace(y=ops.moe_combine(result.y, routing.row, weights, options.dtype))


def products(
    x: Tensor,
    routing: Routing | PresortedRouting,
    layers: tuple[Layer, Layer],
    options: ExpertsOptions,
    needs: LayerNeeds = NO_GRADIENTS,
    keeps_z: bool = False,
) -> ExpertsResult:
    """Compute both products without combining rows into tokens. The arguments are as above.

    If tokens are gathered, the inputs of the products are not saved: the backward pass computes
    them again.
    """
    gate_up, down = layers
    (need_dx, need_dw1), (need_da, need_dw2) = needs
    rows: Tensor | LazyRows = x
    if routing.token is not None:
        need_dw1 = need_dw2 = False
        rows = LazyRows(x, routing.offs, routing.token, routing.row)
    offs = routing.offs
    epilogue = gate_up.choose_epilogue(rows, offs, options, down, keeps_z)
    outputs, saved_gate_up = gate_up.forward(rows, offs, (need_dx, need_dw1), epilogue)
    z: Tensor | None
    activation: Tensor | LazyRows | QuantizedRows
    if epilogue is None:
        z = outputs[0]
        activation = LazyRows(
            z, offs, activation=options.activation, interleaved=options.interleaved
        )
    else:
        z = outputs[1] if keeps_z else None
        activation = outputs[0]
        if epilogue.quantize_to is not None:
            # Codes and block scales: such formats have no global scale.
            activation = QuantizedRows(OperandCopy(*outputs), x.dtype)
    (h,), saved_down = down.forward(activation, offs, (need_da, need_dw2))
    return ExpertsResult(h, z if keeps_z else None, saved_gate_up, saved_down)
