"""Backward pass of the experts.

Saved for it are x, p, z and the routing. Neither the gathered rows nor a nor h are: rows and a are
computed again, and nothing reads h, by the formulas of docs/internals/moe.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import ops, support
from cute_kernels.formats.activations import is_gated
from cute_kernels.runtime.replay import replayed

from ..recipes import Recipe
from .autocast import in_own_dtypes
from .expert_layer import ExpertsOptions, Layer
from .experts_forward import REPLAYED_TENSOR_TYPES, ExpertsResult
from .linear_call import LinearCall
from .linear_passes import backward, quantize_activation_gradient, wgrad_input
from .nonfinite_flags import set_gradient_flag
from .operands import (
    Gradients,
    LazyRows,
    OperandCopy,
    QuantizedOperand,
    SavedOperands,
    Scaling,
    materialize,
)
from .routing import PresortedRouting, Routing


class NeededGradients(NamedTuple):
    """Gradients that a backward pass computes.

    Attributes:
        x: True if the gradient of the input is needed.
        p: True if the gradient of the routing weights is needed.
        z: True if the gradient of the activation's input is needed.
        gate_up: True for each of weight and bias of the first layer.
        down: True for each of weight and bias of the second layer.
        gate_up_weights: True for each weight parameter of the first layer, for autograd.
        down_weights: True for each weight parameter of the second layer, for autograd.
    """

    x: bool
    p: bool
    z: bool
    gate_up: tuple[bool, bool]
    down: tuple[bool, bool]
    gate_up_weights: tuple[bool, ...]
    down_weights: tuple[bool, ...]


@dataclasses.dataclass
class SavedLayer:
    """Tensors that one layer saves.

    Attributes:
        input_scale: (G,) scales of the input, if the backward pass quantizes it again.
        grad_scale: (G,) scales of the gradient of the output.
        operands: Operands of the gradients, and amaxes.
    """

    input_scale: Tensor | None
    grad_scale: Tensor | None
    operands: SavedOperands

    def release_operands(self) -> None:
        """Release the operands after their last use. The amaxes stay."""
        self.operands = self.operands._replace(x=None, weight=None, parameters=())

    def amaxes(self) -> list[Tensor | None]:
        """Return the amaxes of input and weight."""
        return [self.operands.amax_x, self.operands.amax_weight]


class RecomputeInputs(NamedTuple):
    """Operands that compute z again.

    Attributes:
        bias: Bias of the first layer.
        weight_scale: (G,) scales of its weight under delayed scaling.
        weight_copy: Its quantized weight, if the caller gave it.
        parameters: Its weight otherwise; empty if the operands of the layer have it.
    """

    bias: Tensor | None
    weight_scale: Tensor | None
    weight_copy: OperandCopy | None
    parameters: Sequence[Tensor]


@dataclasses.dataclass
class SavedTensors:
    """Tensors that the experts save for the backward pass, which releases each after its last use.

    Attributes:
        x: (T, H). Input, for wgrad of the first layer or to compute z again.
        p: (T, k) fp32. Routing weights.
        z: (R, W). Input of the activation. None if it is computed again.
        routing: Routing of the tokens.
        down_bias: Bias of the second layer.
        gate_up: Tensors of the first layer.
        down: Tensors of the second layer.
        recompute: Operands that compute z again. None if absent.
    """

    x: Tensor | None
    p: Tensor | None
    z: Tensor | None
    routing: Routing | PresortedRouting
    down_bias: Tensor | None
    gate_up: SavedLayer
    down: SavedLayer
    recompute: RecomputeInputs | None

    @classmethod
    def from_forward(
        cls,
        x: Tensor,
        p: Tensor | None,
        routing: Routing | PresortedRouting,
        layers: tuple[Layer, Layer],
        options: ExpertsOptions,
        needs: NeededGradients,
        result: ExpertsResult,
    ) -> SavedTensors:
        """Collect the tensors to save after a forward pass."""
        is_gathered = routing.token is not None
        gate_up, down = (
            SavedLayer(layer.clone_scale(0) if is_gathered else None, layer.clone_scale(2), saved)
            for layer, saved in zip(layers, (result.gate_up, result.down), strict=True)
        )
        needs_x = (needs.gate_up[0] and is_gathered) or options.recompute
        return cls(
            x=x if needs_x else None,
            p=p,
            z=result.z,
            routing=routing,
            down_bias=layers[1].bias,
            gate_up=gate_up,
            down=down,
            recompute=_recompute_inputs(layers[0], result.gate_up) if options.recompute else None,
        )

    def flatten(self) -> tuple[list[Tensor | None], tuple[int, ...]]:
        """Return all tensors in a list, and the lengths that ``unflatten`` needs."""
        recompute: list[Tensor | None] = []
        if self.recompute is not None:
            bias, weight_scale, weight_copy, parameters = self.recompute
            recompute = [bias, weight_scale, *(weight_copy or (None,) * 3), *parameters]
        lists: list[list[Tensor | None]] = [
            [self.x, self.p, self.z, *self.routing, self.down_bias],
            [self.gate_up.input_scale, self.gate_up.grad_scale],
            [self.down.input_scale, self.down.grad_scale],
            self.gate_up.operands.flatten(),
            self.down.operands.flatten(),
            recompute,
        ]
        return [t for tensors in lists for t in tensors], tuple(map(len, lists))

    @classmethod
    def unflatten(cls, tensors: list[Any], lengths: Sequence[int]) -> SavedTensors:
        """Rebuild the record from ``flatten``. The list is empty afterwards."""
        lists, start = [], 0
        for length in lengths:
            lists.append(tensors[start : start + length])
            start += length
        tensors.clear()
        (x, p, z, offs, token, pair, row, bias), gate_up_scales, down_scales = lists[:3]
        routing = PresortedRouting(offs) if token is None else Routing(offs, token, pair, row)
        recompute = None
        if lists[5]:
            bias_1, weight_scale, codes, block_scales, global_scale, *parameters = lists[5]
            copy = None if codes is None else OperandCopy(codes, block_scales, global_scale)
            recompute = RecomputeInputs(bias_1, weight_scale, copy, parameters)
        return cls(
            x=x,
            p=p,
            z=z,
            routing=routing,
            down_bias=bias,
            gate_up=SavedLayer(
                gate_up_scales[0], gate_up_scales[1], SavedOperands.unflatten(lists[3])
            ),
            down=SavedLayer(down_scales[0], down_scales[1], SavedOperands.unflatten(lists[4])),
            recompute=recompute,
        )


def _recompute_inputs(layer: Layer, saved: SavedOperands) -> RecomputeInputs:
    """Return the operands that compute z again. A weight is saved once."""
    copy = None if layer.quantized is None else layer.quantized.rowwise
    parameters = [] if copy is not None else list(layer.weights)
    if parameters and saved.parameters and saved.parameters[0] is parameters[0]:
        parameters = []
    return RecomputeInputs(layer.bias, layer.clone_scale(1), copy, parameters)


class BackwardContext(NamedTuple):
    """Everything but tensors that the backward pass of the experts depends on.

    Attributes:
        layers: The two layers, without their tensors.
        calls: Metadata of the two products.
        options: Options of the experts.
        needs: The gradients to compute.
        lengths: Lengths of the lists of saved tensors.
    """

    layers: tuple[Layer, Layer]
    calls: tuple[LinearCall, LinearCall]
    options: ExpertsOptions
    needs: NeededGradients
    lengths: tuple[int, ...]

    def replay_key(self) -> Hashable:
        """Return the key under which a backward pass is replayed, or None if it cannot be.

        It cannot if it writes tensors other than its results, or if something observes it.
        """
        for layer in self.layers:
            if layer.accumulator or layer.scaling or layer.probe or layer.flags is not None:
                return None
        calls = [
            (call.recipe.texts, call.recipe.propagate_nonfinite, *call[1:]) for call in self.calls
        ]
        return ("gradients", self.options, self.needs, self.lengths, *calls)


def compute_gradients(context: BackwardContext, tensors: list[Any]) -> Sequence[Tensor | None]:
    """Compute the gradients of x, p, both biases and all weights, replayed if possible.

    Args:
        context: Metadata of the call, without tensors.
        tensors: The gradient of the output, and the saved tensors. The list is empty afterwards,
            and each tensor is released after its last use.
    """

    def run(tensors: list[Any]) -> Sequence[Tensor | None]:
        dy = tensors.pop(0)
        return _BackwardPass(context, dy, SavedTensors.unflatten(tensors, context.lengths)).run()

    key = context.replay_key()
    if key is None:
        return run(tensors)
    gradients, _ = replayed(
        key, tensors, lambda tensors: (run(tensors), None), REPLAYED_TENSOR_TYPES
    )
    return gradients


class _BackwardPass:
    """One backward pass. Its methods run in order and release tensors after their last use.

    Args:
        context: Metadata of the call, without tensors.
        dy: (T, H) gradient of the output.
        saved: The saved tensors.
    """

    def __init__(self, context: BackwardContext, dy: Tensor, saved: SavedTensors) -> None:
        self.options, self.needs = context.options, context.needs
        self.gate_up, self.down = context.layers
        self.gate_up_call, self.down_call = context.calls
        self.dtype = self.gate_up_call.dtype
        self.is_gathered = saved.routing.token is not None
        self.offs = saved.routing.offs
        self.dy, self.saved = dy, saved
        self.dz: Tensor | QuantizedOperand | None = None
        self.weighted_activation: Tensor | QuantizedOperand | None = None
        self.dp: Tensor | None = None

    def run(self) -> Sequence[Tensor | None]:
        """Return the gradients of x, p, both biases, and of all weights."""
        if self.saved.z is None:
            self.saved.z = self._recompute_z()
        gradients = self._differentiate_down()
        self._differentiate_activation(gradients)
        down_weights, down_bias = self._finish_down(gradients)
        del gradients
        dx, gate_up_weights, gate_up_bias = self._differentiate_gate_up()
        dp = self.dp if self.needs.p else None
        return dx, dp, gate_up_bias, down_bias, *gate_up_weights, *down_weights

    def _rows(self, x: Any) -> LazyRows:
        """Return the rows of a tensor (T, H) that is gathered, or sorted by expert."""
        routing = self.saved.routing
        return LazyRows(x, routing.offs, routing.token, routing.row)

    def _recompute_z(self) -> Tensor:
        """Compute z by the first product of the forward pass."""
        saved, recompute = self.saved, self.saved.recompute
        assert recompute is not None
        scaling = quantized = None
        if saved.gate_up.input_scale is not None:
            scale = saved.gate_up.input_scale
            # The third scale is that of the gradient, which this product does not read.
            scales = [scale, recompute.weight_scale, scale]
            scaling = Scaling(scales, may_be_zero=self.gate_up_call.may_be_zero)  # type: ignore[arg-type]
        count = len(self.needs.gate_up_weights)
        weights = recompute.parameters or saved.gate_up.operands.parameters[:count]
        if recompute.weight_copy is not None:
            quantized = QuantizedOperand(recompute.weight_copy)
            weights = [recompute.weight_copy.codes.new_empty(())]
        layer = self.gate_up._replace(
            weights=weights,
            bias=recompute.bias,
            quantized=quantized,
            scaling=scaling,
            probe=None,
            flags=None,
        )
        (z,), _ = layer.forward(self._rows(saved.x), self.offs, (False, False))
        return z

    def _differentiate_down(self) -> Gradients:
        """Compute the gradients of the second product."""
        needs, saved = self.needs, self.saved.down
        rows: Tensor | LazyRows = self._rows(self.dy.to(self.dtype))
        if self.down.flags is not None:
            rows = materialize(rows)
            set_gradient_flag(self.down.flags, rows, self.offs)
        needs_bias = needs.down[1] and not self.is_gathered
        gradients = backward(
            self.down_call,
            (needs.z or needs.p, needs.down[0], needs_bias),
            rows,
            self.offs,
            saved.operands,
            saved.grad_scale,
        )
        saved.release_operands()
        return gradients

    def _differentiate_activation(self, gradients: Gradients) -> None:
        """Compute dz, and p * a and dp if tokens are gathered; release z."""
        z, grad = self.saved.z, gradients.dx
        assert z is not None
        self.saved.z = None
        if grad is None and self.is_gathered:
            is_gated_activation = is_gated(self.options.activation)
            grad = z.new_zeros(z.shape[0], z.shape[1] // 2 if is_gated_activation else z.shape[1])
        if grad is None:
            return
        activation, interleaved = self.options.activation, self.options.interleaved
        p, pair = self.saved.p, self.saved.routing.pair
        if self._quantizes_in_one_op(gradients):
            self.dz, self.weighted_activation, self.dp = quantize_activation_gradient(
                z,
                grad,
                (self.gate_up.recipe, self.down.recipe),
                (self.saved.gate_up.grad_scale, self.saved.down.input_scale),
                activation=activation,
                offs=self.offs,
                interleaved=interleaved,
                weight=p,
                pair=pair,
            )
            return
        outputs = ops.moe_activate_gradient(
            z, grad, activation, self.offs, interleaved, weight=p, pair=pair
        )
        self.dz = outputs[0]
        if self.is_gathered:
            self.weighted_activation, self.dp = outputs[1:]

    def _quantizes_in_one_op(self, gradients: Gradients) -> bool:
        """Return True if one op computes and quantizes dz and p * a."""
        needs = self.needs
        # Scales that follow from current amaxes need the values before they are quantized.
        needs_amaxes = (*self.gate_up_call.may_be_zero[2:], *self.down_call.may_be_zero[:1])
        is_observed = (
            self.gate_up.flags is not None
            or self.gate_up.probe is not None
            or self.down.probe is not None
            or any(needs_amaxes)
        )
        return (
            self.is_gathered
            and gradients.wgrad is not None
            and needs.x
            and needs.gate_up == (True, False)
            and not is_observed
            and _supports_quantized_gradient(self.gate_up.recipe, self.down.recipe)
        )

    def _finish_down(self, gradients: Gradients) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Compute the gradients of the second layer's parameters, and record its amaxes."""
        saved, wgrad, dbias = self.saved, gradients.wgrad, gradients.dbias
        amax_x, amax_weight = saved.down.amaxes()
        if self.is_gathered:
            if wgrad is not None:
                x, index, inverse, amax = wgrad_input(
                    self.down_call,
                    self.weighted_activation,  # type: ignore[arg-type]
                    self.offs,
                    saved.down.input_scale,
                )
                wgrad = wgrad._replace(x=x, row_index=index, inverse=inverse)
                if amax is not None and amax_x is not None:
                    amax_x = torch.maximum(amax_x, amax)
            self.weighted_activation = None
            if saved.down_bias is not None:
                dbias = _bias_gradient(
                    self.dy,
                    saved.p,
                    self.dp,
                    self.offs,
                    saved.routing.row,
                    saved.down_bias,
                    self.needs.down[1],
                )
        result = self.down.finish(self.down_call, wgrad, dbias, self.needs.down_weights)
        if self.down.scaling is not None:
            self.down.scaling.record((amax_x, amax_weight, gradients.amax))
        return result

    def _differentiate_gate_up(
        self,
    ) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None]:
        """Compute the gradients of x and of the first layer's parameters."""
        needs, saved, layer = self.needs, self.saved.gate_up, self.gate_up
        if not needs.z:
            return None, [None] * len(needs.gate_up_weights), None
        if layer.flags is not None:
            set_gradient_flag(layer.flags, self.dz, self.offs)  # type: ignore[arg-type]
        gradients = backward(
            self.gate_up_call,
            (needs.x, *needs.gate_up),
            self.dz,  # type: ignore[arg-type]
            self.offs,
            saved.operands,
            saved.grad_scale,
        )
        self.dz = None
        saved.release_operands()
        dx, wgrad = gradients.dx, gradients.wgrad
        if wgrad is not None and self.is_gathered:
            x, index, inverse, _ = wgrad_input(
                self.gate_up_call, self._rows(self.saved.x), self.offs, saved.input_scale
            )
            wgrad = wgrad._replace(x=x, row_index=index, inverse=inverse)
        row = self.saved.routing.row
        if dx is not None and row is not None:
            dx = ops.moe_combine(dx, row, out_dtype=self.dtype)
        dweights, dbias = layer.finish(
            self.gate_up_call, wgrad, gradients.dbias, needs.gate_up_weights
        )
        if layer.scaling is not None:
            layer.scaling.record((*saved.amaxes(), gradients.amax))
        return dx, dweights, dbias


@functools.lru_cache(maxsize=64)
def _supports_quantized_gradient(gate_up: Recipe, down: Recipe) -> bool:
    """Return True if ``moe_quantize_gradient`` has the formats of dz and of p * a."""
    formats = gate_up.grad_output, down.input
    return all(f is not None and support("moe_quantize_gradient", f, "reference") for f in formats)


@in_own_dtypes
def _bias_gradient(
    dy: Tensor, p: Any, dp: Any, offs: Tensor, row: Any, bias: Tensor, is_needed: bool
) -> Tensor | None:
    """Return the gradient of the second bias (E, H), and add the bias's share to ``dp``.

    Args:
        dy: (T, H). Gradient of the output.
        p: (T, k) fp32. Routing weights.
        dp: (T, k) fp32. Gradient of ``p``, updated in place.
        offs: (E,) int32. End rows.
        row: (T, k) int32. Row of each pair; -1 if there is none.
        bias: (E, H).
        is_needed: False to update ``dp`` only and return None.
    """
    is_routed = row >= 0
    # The tail of a capacity buffer may hold anything.
    dy = dy.float().masked_fill(~is_routed.any(1, keepdim=True), 0)
    expert = torch.searchsorted(offs, row.clamp_min(0), right=True).clamp_max(len(offs) - 1)
    dp += torch.where(is_routed, (dy @ bias.float().T).gather(1, expert), 0)
    if not is_needed:
        return None
    chosen = (
        expert.unsqueeze(-1) == torch.arange(len(offs), device=offs.device)
    ) & is_routed.unsqueeze(-1)
    # 0 * NaN is NaN: by the product a non-finite gradient would reach all experts.
    nonfinite = ~dy.isfinite()
    sums = torch.where(chosen, p.unsqueeze(-1), 0).sum(1).T @ dy.masked_fill(nonfinite, 0)
    has_nonfinite = chosen.any(1).T.bfloat16() @ nonfinite.bfloat16() > 0
    return sums.masked_fill_(has_nonfinite, torch.nan).to(bias.dtype)
