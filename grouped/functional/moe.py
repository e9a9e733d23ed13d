"""``grouped.moe``: the routed experts of a mixture as one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from cute_kernels import ops
from cute_kernels.formats.activations import Activation, is_gated, parse_activation
from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype, check_tensor, same_device
from cute_kernels.ops.derivatives import refuse_derivatives
from cute_kernels.records import check_kind
from cute_kernels.runtime.replay import replayed

from ..recipes import BF16, Recipe, check_recipe
from ..tensor.dtensor_parts import is_distributed
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.validation import check_is_tensor
from .expert_layer import ReplayKey
from .experts import (
    ExpertsOptions,
    Layer,
    Routing,
    compute_routing,
    experts,
    products,
)
from .experts_forward import (
    REPLAYED_TENSOR_TYPES,
    key_of_layers,
    key_of_quantized_layers,
    replay_inference,
)

_BF16 = BF16()


def moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Activation = "swiglu",
    interleaved: bool = False,
    recipe: Recipe | None = None,
    num_experts: int | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Apply the experts that a router chose: ``y[t] = sum over k of p[t, k] expert_(t, k)(x[t])``.

    An expert is ``W2 act(W1 x + b1) + b2``. The function is what ``grouped.nn.MoE`` does after its
    router, and has its bits. It is differentiable in x, the routing weights p, W and b.

    Nothing is read on the host, and all shapes depend on the number of tokens alone, so CUDA graphs
    capture a call. A pair of a token and an expert has a row only if the expert is one of ``w1``.
    No other pair is computed or contributes, even if its token or its weight is NaN. A token none
    of whose experts are in ``w1`` has an output of zeros.

    The result is deterministic. In BF16, NVFP4RowScaled, MXFP8 and FP8Block, the bits of a token's
    output depend on no other token. In NVFP4 and FP8Current the tokens of an expert share a scale.

    Args:
        x: (T, H) bf16, fp16 or fp32. Under autocast the experts compute in its dtype.
        expert_ids: (T, k) int32 or int64. Experts of each token. An id outside [0, num_experts),
            such as -1, is no expert. A token may have the same expert twice.
        weights: (T, k) fp32, bf16 or fp16. The routing weights p. None for ones.
        w1: (E, 2 I, H) for a gated activation, else (E, I, H). A plain tensor with any strides, or
            a GroupedTensor, prepacked or not. Pass a weight that is stored as (E, H, 2 I) as
            ``weight.mT``.
        w2: (E, H, I). A plain tensor or a GroupedTensor.
        b1: (E, 2 I) or (E, I). Optional.
        b2: (E, H). Optional.
        activation: Name such as ``"swiglu"``, or a ``grouped.Activation``, which has the limit and
            the alpha of gpt-oss: ``grouped.Activation("clamped_swiglu", alpha=1.702, limit=7.0)``.
        interleaved: False if the rows of ``w1`` are halves [gate, up], as vLLM stores them. True if
            they alternate, gate first, as in gpt-oss.
        recipe: Formats of the products. The default is BF16. Plain weights are quantized in every
            call if the recipe quantizes. GroupedTensors are used as they are: with bf16 activations
            under BF16 (W4A16 for NVFP4), else with activations in the recipe's input format. To
            serve, quantize the weights once, with ``grouped.quantize`` or ``grouped.prepare``.
        num_experts: Number of experts that ids count, over all ranks. The default is the length of
            ``expert_map``, or E. Without a map, ids in [E, num_experts) are experts of other ranks.
        expert_map: (num_experts,) int32. Position in ``w1`` of each expert, or -1 for an expert of
            another rank. None maps each id to itself.
        apply_router_weight_on_input: True multiplies x by p instead of the outputs, as Llama 4
            does. The product is in fp32, rounded once to the dtype of x.
        out: (T, H) tensor to write the result into, row-major, of any of the dtypes of x. It may be
            ``x``. All rows are written. The result is not differentiable then.

    Returns:
        (T, H) in the dtype of ``out`` or ``x``. The sum over k is in fp32, in ascending k, with one
        cast at the end.

    Raises:
        TypeError: An argument has the wrong type, or a tensor has the wrong dtype or is a DTensor.
        ValueError: A shape, a device or an option is invalid. Or the recipe has delayed scaling.
        RuntimeError: A GroupedTensor lacks a copy that a product or a gradient reads. Or ``out`` is
            given and an operand requires a gradient. Or a second or forward-mode derivative, or a
            transform of ``torch.func``, is requested.
        cute_kernels.UnsupportedError: This backend lacks a product.
    """
    check_is_tensor("x", x)
    if out is not None:
        check_is_tensor("out", out)
    call = ExpertsCall(
        x,
        expert_ids,
        weights,
        w1,
        b1,
        w2,
        b2,
        _BF16 if recipe is None else recipe,
        x.dtype if out is None else out.dtype,
        expert_map,
        activation.text if isinstance(activation, Activation) else activation,
        interleaved,
        apply_router_weight_on_input,
        num_experts,
    )
    call.check_types()
    kind = x.device.type
    # Torch 2.11 does not trace torch.amp.is_autocast_available.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        call = call._replace(x=x.to(torch.get_autocast_dtype(kind)))
    return call.run() if out is None else call.run_into(out)


class ExpertIdChecks:
    """Process-wide setting of ``grouped.inspect.check_expert_ids``.

    Attributes:
        recorder: Function that is called with the ids, the map, ``num_experts`` and the number of
            experts of w1 for each eager call, or None.
    """

    recorder: Callable[[Tensor, Tensor | None, int, int], object] | None = None


class ExpertsCall(NamedTuple):
    """The arguments of ``moe``, but ``out``, and the data type of the result.

    Fields without a description are the arguments of that name.

    Attributes:
        recipe: Recipe of both products.
        dtype: Data type of the result.
        activation: Text of the activation.
        weighs_input: True if x is multiplied by the routing weights.
    """

    x: Tensor
    expert_ids: Tensor
    weights: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    recipe: Recipe
    dtype: torch.dtype
    expert_map: Tensor | None = None
    activation: str = "swiglu"
    interleaved: bool = False
    weighs_input: bool = False
    num_experts: int | None = None

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Tensors that are no parameters of the experts."""
        return *self[:3], self.expert_map

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything but tensors and the recipe that the result depends on."""
        return self.dtype, *self[10:]

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Return the tensors by name."""
        return dict(zip(_TENSORS, (*self[:7], self.expert_map), strict=True))

    def run(self) -> Tensor:
        """Return the result, replayed if gradients are disabled. Types must be checked before."""
        if ExpertIdChecks.recorder is not None:
            self.record_ids()
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.compute()
        return replay_inference(("moe", self.key), self.inputs, self.layers_key(), self.compute)

    def run_into(self, out: Tensor) -> Tensor:
        """Write the result into ``out`` and return it. Types must be checked before."""
        if ExpertIdChecks.recorder is not None:
            self.record_ids()
        named = (*self.tensors.items(), ("out", out))
        refuse_derivatives("grouped.moe(out=)", named, "leave out= away")
        if torch.compiler.is_compiling():
            _check_out(out, self.x, self.w2)
            return out.copy_(self.compute())
        layers_key, tensors = self.layers_key()
        # One tensor must not occur twice among the inputs of a replayed function.
        target = None if out is self.x else out
        replayed(
            ("moe into", self.key, layers_key),
            [*self.inputs, target, *tensors],
            lambda _: ([self.compute_into(out)], None),
            REPLAYED_TENSOR_TYPES,
        )
        increment_version(out)
        return out

    def record_ids(self) -> None:
        """Check the arguments, and give ids and map to the recorder of ``ExpertIdChecks``."""
        ids, expert_map, recorder = self.expert_ids, self.expert_map, ExpertIdChecks.recorder
        if recorder is None or torch.compiler.is_compiling() or ids.is_meta:
            return
        self.check()
        count = self.w1.shape[0]
        total = count if expert_map is None else expert_map.shape[0]
        recorder(ids, expert_map, self.num_experts or total, count)

    def compute(self) -> Tensor:
        """Return the result."""
        self.check()
        x, p, routing, row = self.route()
        is_unweighted = p is None
        if p is None and torch.is_grad_enabled():
            p = x.new_ones(routing.row.shape, dtype=torch.float32)
        options = self.options(self.dtype if row is None else x.dtype, is_unweighted)
        y = experts(x, p, routing, *self.layers(), options)
        if row is None:
            return y
        # Each pair was a token of its own: their outputs are rows of h, and zeros.
        index = torch.arange(row.numel(), dtype=torch.int32, device=row.device).view(row.shape)
        return ops.moe_combine(y, index, out_dtype=self.dtype)

    def compute_into(self, out: Tensor) -> Tensor:
        """Write the result into ``out``, without gradients."""
        self.check()
        _check_out(out, self.x, self.w2)
        x, p, routing, row = self.route()
        h = products(x, routing, self.layers(), self.options(x.dtype)).y
        index = routing.row if row is None else row
        torch.ops.cute_kernels.moe_combine_out(h, index, p, self.dtype, y=out)
        return out

    def route(self) -> tuple[Tensor, Tensor | None, Routing, Tensor | None]:
        """Return the tokens, what multiplies their outputs, and their routing.

        If x is multiplied by the weights of several experts, each pair becomes a token of its own.
        Then the last result is the row of each pair (T, k), else None.
        """
        routing = compute_routing(self.expert_ids, self.w1.shape[0], self.expert_map)
        p = None if self.weights is None else self.weights.float()
        if p is None or not self.weighs_input:
            return self.x, p, routing, None
        x = _weigh(self.x, p, routing.row)
        if p.shape[1] == 1:
            return x, None, routing, None
        offs, _, pair, row = routing
        return x, None, Routing(offs, pair, pair, row.reshape(-1, 1)), row

    def options(self, dtype: torch.dtype, is_unweighted: bool = False) -> ExpertsOptions:
        """Return the options of the experts for a result of ``dtype``."""
        return ExpertsOptions(self.activation, self.interleaved, False, dtype, is_unweighted)

    def layers(self) -> tuple[Layer, Layer]:
        """Return the two layers."""
        return Layer([self.w1], self.b1, self.recipe), Layer([self.w2], self.b2, self.recipe)

    def layers_key(self) -> ReplayKey:
        """Return the replay key of the two layers."""
        if type(self.w1) is type(self.w2) is GroupedTensor:
            biases, weights = (self.b1, self.b2), (self.w1, self.w2)
            return key_of_quantized_layers(weights, biases, self.recipe)
        key = key_of_layers(self.layers())
        assert key is not None  # The layers have no observers.
        return key

    def check_types(self) -> None:
        """Raise TypeError for wrong types, which no guard of a replay notices."""
        x, ids, weights, w1, b1, w2, b2, recipe, _, expert_map, *_ = self
        if (
            _REQUIRED_TYPES.issuperset(map(type, (x, ids, w1, w2)))
            and _OPTIONAL_TYPES.issuperset(map(type, (weights, b1, b2, expert_map)))
            and isinstance(recipe, Recipe)
            and type(self.activation) is str
            and type(self.interleaved) is type(self.weighs_input) is bool
            and (self.num_experts is None or type(self.num_experts) is int)
        ):
            return
        check_recipe(self.recipe)
        for name, value in self.tensors.items():
            if value is not None or name not in _OPTIONAL:
                check_is_tensor(name, value)
        if not isinstance(self.activation, str):
            raise TypeError(
                "activation must be a name such as 'swiglu' or a grouped.Activation, got "
                f"{self.activation!r}"
            )
        check_kind(
            bool, interleaved=self.interleaved, apply_router_weight_on_input=self.weighs_input
        )
        if self.num_experts is not None:
            check_kind(int, num_experts=self.num_experts)

    def check(self) -> None:
        """Raise for invalid metadata of the tensors. Replayed calls have valid ones."""
        tensors = self.tensors
        for name, value in tensors.items():
            if is_distributed(value):
                raise TypeError(f"{name} is a DTensor: pass a rank's part, its to_local()")
        if not torch.compiler.is_compiling():
            _refuse_transforms(tensors.values())
        if isinstance(self.x, GroupedTensor):
            raise TypeError("x must be a plain tensor: the recipe says how it is quantized")
        if self.recipe.takes_scales:
            raise ValueError(
                f"{self.recipe} has scales that last from step to step: use FP8Current, or "
                "grouped.nn.MoE"
            )
        if not torch.compiler.is_compiling():
            parse_activation(self.activation)
        is_gated_activation = is_gated(self.activation)
        if self.interleaved and not is_gated_activation:
            raise ValueError(
                f"interleaved=True needs a gated activation; {self.activation} has no gate"
            )
        self._check_weights(1 + is_gated_activation)
        check_tensor("x", self.x, dtypes=INPUT_DTYPES, ndim=(2,))
        tokens, width = self.x.shape
        if width != self.w1.shape[2]:
            raise ValueError(
                f"x (T, H) and w1 (E, N, H) must share H, got {tuple(self.x.shape)} and "
                f"{tuple(self.w1.shape)}: a weight stored (E, H, N) is given as w1.mT"
            )
        check_tensor(
            "expert_ids", self.expert_ids, dtypes=(torch.int32, torch.int64), shape=(tokens, None)
        )
        if self.weights is not None:
            check_tensor("weights", self.weights, dtypes=INPUT_DTYPES, shape=self.expert_ids.shape)
        check_dtype("out", self.dtype, INPUT_DTYPES)
        same_device("x", self.x.device, **tensors)
        self._check_num_experts()

    def _check_weights(self, factor: int) -> None:
        """Check weights and biases for ``factor`` rows of w1 for each column of w2."""
        for name, weight in (("w1", self.w1), ("w2", self.w2)):
            check_tensor(name, weight, dtypes=INPUT_DTYPES, ndim=(3,))
        experts, rows, width = self.w1.shape
        if not experts:
            raise ValueError(f"w1 must have at least one expert, got shape {tuple(self.w1.shape)}")
        if rows != factor * self.w2.shape[2]:
            times = "2 I" if factor == 2 else "I"
            raise ValueError(
                f"w1 (E, {times}, H) and w2 (E, H, I) must share I for activation "
                f"{self.activation!r}, got {tuple(self.w1.shape)} and {tuple(self.w2.shape)}"
            )
        check_tensor("w2", self.w2, shape=(experts, width, None))
        if self.b1 is not None:
            check_tensor("b1", self.b1, dtypes=INPUT_DTYPES, shape=(experts, rows))
        if self.b2 is not None:
            check_tensor("b2", self.b2, dtypes=INPUT_DTYPES, shape=(experts, width))

    def _check_num_experts(self) -> None:
        """Check ``num_experts`` and ``expert_map``."""
        num_experts, expert_map, count = self.num_experts, self.expert_map, self.w1.shape[0]
        if expert_map is not None:
            shape = (num_experts,)
            check_tensor("expert_map", expert_map, dtypes=(torch.int32,), shape=shape)
        elif num_experts is not None and num_experts < count:
            raise ValueError(
                f"num_experts must be at least {count}, the experts of w1, got {num_experts}"
            )


#: Names of the tensors of a call.
_TENSORS = ("x", "expert_ids", "weights", "w1", "b1", "w2", "b2", "expert_map")
_REQUIRED_TYPES = REPLAYED_TENSOR_TYPES
_OPTIONAL_TYPES = REPLAYED_TENSOR_TYPES | {type(None)}
#: Arguments that may be None.
_OPTIONAL = frozenset({"weights", "expert_map", "b1", "b2"})


def _refuse_transforms(tensors: Iterable[Tensor | None]) -> None:
    """Raise in transforms of ``torch.func``, and for tensors with tangents."""
    if torch._C._functorch.peek_interpreter_stack():
        raise RuntimeError("grouped.moe has no torch.func transforms")
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError("grouped.moe has no forward-mode derivative; use reverse mode")


def _weigh(x: Tensor, p: Tensor, row: Tensor) -> Tensor:
    """Return ``p[t, k] x[t]`` (T k, H), rounded once to the dtype of ``x``."""
    tokens, factors = x.unsqueeze(1), p.unsqueeze(2)
    if torch.is_grad_enabled() and (x.requires_grad or p.requires_grad):
        # A NaN in a pair without a row, times 0, would be a NaN in a gradient.
        has_row = (row >= 0).unsqueeze(2)
        tokens, factors = torch.where(has_row, tokens, 0), torch.where(has_row, factors, 0)
    return (tokens * factors).to(x.dtype).flatten(0, 1)


def _check_out(out: Tensor, x: Tensor, w2: Tensor) -> None:
    """Raise unless the result fits ``out``."""
    check_tensor("out", out, dtypes=INPUT_DTYPES, shape=(x.shape[0], w2.shape[1]))
    same_device("x", x.device, out=out)
    if not out.is_contiguous():
        raise ValueError(f"out must be row-major without gaps, got strides {out.stride()}")
