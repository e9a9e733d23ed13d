"""One of the two layers of the experts in a call, and the options of the experts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from cute_kernels.ops.gemm.fused_activation import activates
from cute_kernels.runtime.backend import chosen_backend

from ..recipes import Recipe
from ..tensor.grouped_tensor import GroupedTensor
from .linear_call import LinearCall, WeightGradientAccumulator
from .linear_passes import forward
from .nonfinite_flags import set_forward_flags
from .operands import (
    Epilogue,
    LazyRows,
    OperandProbe,
    QuantizedOperand,
    QuantizedRows,
    SavedOperands,
    Scaling,
    WgradOperands,
    materialize,
)


class ExpertsOptions(NamedTuple):
    """Options of the experts, other than their layers.

    Attributes:
        activation: Text of the activation.
        interleaved: True if the two inputs of a gated activation alternate.
        recompute: Compute z, the input of the activation, again in the backward pass.
        dtype: Data type of the output.
        defer_routing_weights: Do not multiply the output by the routing weights p. The caller
            applies p, and passes back the gradient of the weighted output, not of y. The backward
            pass multiplies it by p, as usual.
    """

    activation: str
    interleaved: bool
    recompute: bool
    dtype: torch.dtype
    defer_routing_weights: bool = False


#: Everything that the forward pass of layers depends on: options, and the tensors that it reads.
#: Absent tensors are None.
ReplayKey: TypeAlias = "tuple[Hashable, list[Tensor | None]]"


class Layer(NamedTuple):
    """One of the two products of a call. See ``grouped.functional.linear_autograd.multiply``.

    Attributes:
        weights: The weight (G, N, K), or (N, K) per group.
        bias: (G, N). None if absent.
        recipe: Formats of the operands.
        quantized: The quantized weight, if it exists already.
        accumulator: Receives the gradients of weight and bias, if autograd does not.
        scaling: Scales under delayed scaling.
        probe: Observes the operands, if an inspector is active.
        flags: (4,) bool. Flags of ``detect_nonfinite``, if that is active.
    """

    weights: Sequence[Tensor]
    bias: Tensor | None
    recipe: Recipe
    quantized: QuantizedOperand | None = None
    accumulator: WeightGradientAccumulator | None = None
    scaling: Scaling | None = None
    probe: OperandProbe | None = None
    flags: Tensor | None = None

    def forward(
        self,
        x: Tensor | LazyRows | QuantizedRows,
        offs: Tensor,
        needs: tuple[bool, bool],
        epilogue: Epilogue | None = None,
    ) -> tuple[list[Tensor], SavedOperands]:
        """Multiply rows by the weight of their group.

        Args:
            x: (T, K) rows.
            offs: (G,) int32 end rows.
            needs: True for each of x and weight if its gradient is needed.
            epilogue: Activation of the result.

        Returns:
            The outputs of the product, and the tensors that its backward pass reads.
        """
        if self.flags is not None and not isinstance(x, QuantizedRows):
            x = materialize(x)
        y, saved = forward(
            x,
            self.weights,
            self.bias,
            offs,
            self.recipe,
            self.quantized,
            needs,
            self.scaling,
            self.probe,
            epilogue,
        )
        if self.flags is not None and isinstance(x, Tensor):
            set_forward_flags(self.flags, x, self.weights, y[-1], offs)
        return y, saved

    def choose_epilogue(
        self,
        rows: Tensor | LazyRows,
        offs: Tensor,
        options: ExpertsOptions,
        next_layer: Layer,
        keeps_z: bool,
    ) -> Epilogue | None:
        """Return the epilogue that activates the product of ``rows``, or None for a separate pass.

        The epilogue also quantizes the result if ``next_layer`` alone reads it.
        """
        x_format, weight_format, _ = self.recipe.texts
        weight = self.weights[0]
        if isinstance(weight, GroupedTensor):
            weight_format = weight.format.text
        activation, interleaved = options.activation, options.interleaved
        fmt = next_layer.recipe.formats[0]
        quantizer_activates = (
            fmt is not None
            and next_layer.probe is None
            and fmt.rounds_activation
            and not interleaved
        )
        if quantizer_activates and keeps_z:
            # As many bytes go to memory and back: steps in FP8Block took 2% less to 4% more (H200).
            return None
        query = (
            chosen_backend(),
            rows.x.device if isinstance(rows, LazyRows) else rows.device,
            rows.dtype,
            (x_format, weight_format),
            tuple(map(int, weight.shape[-2:])),
            activation,
            interleaved,
            _mean_rows(rows, offs),
            quantizer_activates,
        )
        # The amax that a global scale follows from is not known before all rows are computed.
        can_quantize = (
            fmt is not None
            and fmt.global_scale is None
            and next_layer.scaling is None
            and not keeps_z
            and not _is_observed(self, next_layer)
        )
        if fmt is not None and can_quantize and activates(*query, fmt.text):
            return Epilogue(activation, interleaved, keeps_z=False, quantize_to=fmt.text)
        if not activates(*query):
            return None
        return Epilogue(activation, interleaved, keeps_z=keeps_z or self.flags is not None)

    def clone_scale(self, role: int) -> Tensor | None:
        """Return a copy of the scale of a role, whose original the next step may overwrite."""
        return None if self.scaling is None else self.scaling.scales[role].clone()

    def needed_gradients(self, weights: bool, bias: bool) -> tuple[bool, bool]:
        """Return True for each of weight and bias if its gradient is needed.

        Args:
            weights: True if autograd needs the gradient of a weight.
            bias: True if autograd needs the gradient of the bias.
        """
        return (weights, bias) if self.accumulator is None else self.accumulator.wanted

    @property
    def anchor(self) -> Tensor | None:
        """Tensor that connects the layer to autograd if its parameters are detached."""
        return None if self.accumulator is None else self.accumulator.anchor

    def detached(self) -> Layer:
        """Return the layer with detached parameters, for one that has an anchor."""
        bias = None if self.bias is None else self.bias.detach()
        return self._replace(weights=[w.detach() for w in self.weights], bias=bias)

    def without_tensors(self) -> Layer:
        """Return the layer without its weight and bias, as a backward pass needs it."""
        return self._replace(weights=(), bias=None, quantized=None)

    def finish(
        self,
        call: LinearCall,
        wgrad: WgradOperands | None,
        dbias: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Compute or accumulate the gradients of the parameters and return what autograd gets.

        Args:
            call: Metadata of the call.
            wgrad: Operands of the gradient of the weight, or None.
            dbias: Gradient of the bias, or None.
            needs: True for each weight parameter if autograd needs its gradient.
        """
        if self.accumulator is not None:
            return self.accumulator.take(call, wgrad, dbias)
        if wgrad is None:
            return [None] * len(needs), dbias
        return call.split(call.weight_gradient(wgrad), needs), dbias

    def replay_key(self) -> ReplayKey | None:
        """Return everything that the forward pass depends on, or None if it cannot be replayed.

        Each field is covered here or is a key of ``REPLAY_KEY_EXCLUDES``.
        """
        if self.probe is not None or self.flags is not None:
            return None
        weights, scaling = self.weights, self.scaling
        key: list[Hashable] = [
            self.recipe.texts,
            self.recipe.propagate_nonfinite,
            len(weights),
            scaling and tuple(scaling.may_be_zero),
        ]
        tensors = [self.bias, *weights, *(scaling.scales if scaling else ())]
        weight = weights[0]
        if isinstance(weight, GroupedTensor):
            key += weight._layout
            tensors += weight._inner().values()
        elif self.quantized is not None:
            rowwise, columnwise, amax = self.quantized
            key += (rowwise is not None, columnwise is not None)
            tensors += (*(rowwise or ()), *(columnwise or ()), amax)
        return tuple(key), tensors


#: Fields of ``Layer`` that its ``replay_key`` does not contain, and why.
REPLAY_KEY_EXCLUDES: Mapping[str, str] = {
    "accumulator": "only the backward pass uses it",
    "probe": "calls with a probe are not replayed",
    "flags": "calls with flags are not replayed",
}


def _mean_rows(rows: Tensor | LazyRows, offs: Tensor) -> int:
    """Return the mean number of rows per group, rounded down to a power of two."""
    x = rows
    if isinstance(rows, LazyRows):
        x = rows.x if rows.row_index is None else rows.row_index
    count, groups = x.shape[0], offs.shape[0]  # type: ignore[union-attr]
    # A graph for any number of tokens is optimized for many.
    is_known = type(count) is type(groups) is int
    mean = max(1, count // max(1, groups)) if is_known else 1 << 20
    return 1 << mean.bit_length() - 1


def _is_observed(layer: Layer, next_layer: Layer) -> bool:
    """Return True if a probe or a flag reads the activation between two layers."""
    return any(
        observer is not None for observer in (next_layer.probe, layer.flags, next_layer.flags)
    )
