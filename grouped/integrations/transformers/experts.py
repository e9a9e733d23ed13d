"""Experts implementations for transformers, and ``prepare`` for its models."""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe as hf

from cute_kernels import ops
from cute_kernels.formats import Format
from ptx_emulator.host.suggestions import did_you_mean

from ... import recipes
from ...functional.experts import compute_routing
from ...functional.linear_autograd import linear
from ...functional.moe import ExpertsCall
from ...nn.cached_weight import lookup, warn_if_captured
from ...preparation import (
    SOURCES,
    Source,
    Weight,
    check_product,
    expert_layers,
    is_foreign_experts,
    reorder,
)
from ...preparation import prepare as prepare_model
from ...recipes import Recipe, check_recipe
from ...tensor.grouped_tensor import GroupedTensor

Forward: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

#: Recipes by the name of their experts implementation.
RECIPES: dict[str, Recipe] = {
    "grouped_bf16": recipes.BF16(),
    "grouped_nvfp4": recipes.NVFP4(),
    "grouped_nvfp4_row_scaled": recipes.NVFP4RowScaled(),
    "grouped_mxfp8": recipes.MXFP8(),
    "grouped_fp8_block": recipes.FP8Block(),
    "grouped_fp8_current": recipes.FP8Current(),
}
#: Functions that ``register`` adds to transformers, by the same names.
_FORWARDS: dict[str, Forward] = {}
#: Functions of other modules that ``register`` also calls.
EXTENSIONS: list[Callable[[], None]] = []


def register(**more: Recipe) -> tuple[str, ...]:
    """Add experts implementations to transformers: those of ``RECIPES`` and the arguments.

    It also adds the quantizer of ``GroupedConfig``. Without one, ``from_pretrained`` of a ModelOpt
    folder then raises, since transformers has no quantizer for it.

    Args:
        more: Further recipes by the name of their implementation.

    Returns:
        All names that ``experts_implementation`` and ``set_experts_implementation`` now accept.

    Raises:
        TypeError: A value is not a recipe.
        ValueError: transformers has an implementation of that name, or a recipe uses delayed
            scaling, whose scales transformers' experts cannot hold.
    """
    for name, recipe in more.items():
        check_recipe(recipe)
        if name not in RECIPES and name in (*hf.ALL_EXPERTS_FUNCTIONS, "eager"):
            raise ValueError(
                f"{name} is an experts implementation of transformers: choose another name"
            )
        if recipe.takes_scales:
            raise ValueError(
                f"{name}: {recipe} has scales that last from step to step, which transformers' "
                "experts cannot hold: use FP8Current, or grouped.nn.GroupedMLP"
            )
    RECIPES.update(more)
    for name, recipe in RECIPES.items():
        _FORWARDS[name] = _forward_in(recipe)
        hf.ALL_EXPERTS_FUNCTIONS.register(name, _FORWARDS[name])
    for extension in EXTENSIONS:
        extension()
    return tuple(RECIPES)


def is_registered() -> bool:
    """Return True if transformers has the implementations of all recipes."""
    return set(RECIPES) <= set(hf.ALL_EXPERTS_FUNCTIONS)


def prepare(
    model: nn.Module,
    fmt: Format | None = None,
    *,
    trainable: bool = False,
    columnwise: bool | None = None,
    masters: MutableMapping[Tensor, Tensor] | None = None,
) -> int:
    """Quantize the expert weights of a transformers model once, in place.

    This is ``grouped.prepare`` for models of transformers. Each weight becomes a GroupedTensor
    (G, N, K), which the implementations of this module multiply directly: ``grouped_bf16`` with
    bf16 activations (W4A16 for NVFP4), the others with activations that they quantize. By default
    the weights do not require gradients, and gradients do not pass through the layers. Call the
    model under ``torch.no_grad()``, or pass ``columnwise=True`` to train other layers.

    Afterwards ``get_memory_footprint`` counts the bytes of the quantized weights.
    ``save_pretrained`` raises, since it writes plain weights only: save before, or with
    ``grouped.checkpoint.save``. ``set_experts_implementation`` raises for implementations that
    cannot multiply these weights.

    Args:
        model: A model, or its experts alone, on the device where it will run.
        fmt: Format of the weights. None takes that of the recipe of the current implementation.
        trainable: As in ``grouped.prepare``.
        columnwise: As in ``grouped.prepare``.
        masters: As in ``grouped.prepare``.

    Returns:
        Number of expert layers that were prepared.

    Raises:
        ValueError: ``model`` has no transformers experts, its implementation is not one of this
            module, or ``grouped.prepare`` raises.
    """
    if not any(experts_of(model)):
        raise ValueError(f"{type(model).__name__} has no experts that use transformers' interface")
    return prepare_model(model, fmt, trainable=trainable, columnwise=columnwise, masters=masters)


def guard_methods(model: nn.Module) -> None:
    """Replace methods of transformers models that expect plain weights."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(experts_of(module)):
            for method in (save_pretrained, get_memory_footprint, set_experts_implementation):
                # A partial can be pickled; a bound function cannot.
                setattr(module, method.__name__, functools.partial(method, module))
    for experts in experts_of(model):
        if isinstance(experts.down_proj, GroupedTensor) and "forward" not in vars(experts):
            experts.forward = functools.partial(_prepared_forward, experts)


def save_pretrained(
    self: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
) -> Any:
    """Run ``save_pretrained``, or raise ValueError if a weight is quantized."""
    state = self.state_dict() if state_dict is None else state_dict
    name = next((name for name, t in state.items() if isinstance(t, GroupedTensor)), None)
    if name is not None:
        raise ValueError(
            f"save_pretrained writes plain weights, but {name} is quantized: save before prepare()"
            ", or save the quantized weights by grouped.checkpoint.save(model, folder, layout=...)"
        )
    return type(self).save_pretrained(self, *args, state_dict=state_dict, **kwargs)


def set_experts_implementation(self: Any, experts_implementation: Any) -> None:
    """Run ``set_experts_implementation``. Raise ValueError if it cannot multiply the weights.

    If it raises, the model is unchanged.
    """
    configs = [m.config for m in self.modules() if isinstance(m, PreTrainedModel)]
    before = [config._experts_implementation for config in configs]
    type(self).set_experts_implementation(self, experts_implementation)
    try:
        weights = [weight for layer in expert_layers(self) for weight in layer if weight.is_foreign]
        for weight in weights:
            if isinstance(quantized := weight.parameter.detach(), GroupedTensor):
                check_product(quantized, weight.recipe, quantized.device, needs_dx=False)
    except (TypeError, ValueError, NotImplementedError) as error:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation_internal = name
        raise ValueError(
            f"experts_implementation={experts_implementation!r} cannot multiply the quantized "
            f"weights of the model: {error}"
        ) from None
    for weight in weights:
        reorder(weight)


def get_memory_footprint(self: Any, return_buffers: bool = True) -> int:
    """Return the bytes of a model; transformers' method would count the logical dtype."""
    return sum(t.nbytes for t in (*self.parameters(), *(self.buffers() if return_buffers else ())))


def experts_of(model: nn.Module) -> Iterator[Any]:
    """Yield the experts under ``model`` that use transformers' interface."""
    return filter(is_foreign_experts, model.modules())


def _foreign_weights(module: Any) -> list[Weight] | None:
    """Return the two weights of transformers experts, or None for another module."""
    if not is_foreign_experts(module):
        return None
    recipe = recipe_in_use(module)
    return [
        Weight(module, name, recipe, bool(module.is_transposed)) for name in weight_names(module)
    ]


SOURCES.append(Source(_foreign_weights, guard_methods, RECIPES))


def recipe_in_use(experts: Any) -> Recipe:
    """Return the recipe of the implementation in the experts' config."""
    name = experts.config._experts_implementation
    if name not in RECIPES:
        known = name in hf.ALL_EXPERTS_FUNCTIONS or name == "eager"
        raise ValueError(
            f"the model uses experts_implementation={name!r}: choose one of {', '.join(RECIPES)} "
            "by set_experts_implementation first" + ("" if known else did_you_mean(name, RECIPES))
            # A name of transformers itself is no misspelling.
        )
    return RECIPES[name]


def weight_names(experts: Any) -> tuple[str, str]:
    """Return the names of the experts' two weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _linear_weight(experts: Any, weight: Tensor) -> Tensor:
    """Return a weight of the experts as (G, N, K)."""
    return weight.transpose(1, 2) if experts.is_transposed else weight


def _forward_in(recipe: Recipe) -> Forward:
    """Return the experts implementation that computes in ``recipe``."""

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Compute the experts of one layer, as transformers calls them."""
        up_name, down_name = weight_names(self)
        if recipe.is_quantized and not torch.is_grad_enabled():
            warn_if_captured(lookup(self, up_name), recipe)
        has_norm = getattr(self, "has_post_expert_norm", False)  # Since 5.18 or later.
        if _is_swiglu(self) and not has_norm:
            (w1, b1), (w2, b2) = _operands(self, up_name), _operands(self, down_name)
            dtype = hidden_states.dtype
            x = hidden_states if dtype == w1.dtype else hidden_states.to(w1.dtype)
            arguments = (x, top_k_index, top_k_weights, w1, b1, w2, b2)
            # Ids may contain the sentinel of expert parallelism, the id after the last expert.
            return ExpertsCall(*arguments, recipe, dtype, num_experts=self.num_experts + 1).run()
        # The sentinels of expert parallelism are not ids of experts and get no rows.
        routing = compute_routing(top_k_index, self.num_experts)
        offs, token, _, row = routing
        hidden = _linear(self, ops.moe_gather(hidden_states, token, row), up_name, offs, recipe)
        rows = _linear(self, _activate(self, hidden), down_name, offs, recipe)
        if has_norm:
            rows = self.post_expert_norm(rows)
        return ops.moe_combine(rows, row, top_k_weights.float(), hidden_states.dtype)

    return forward


def _prepared_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the forward pass of prepared experts without transformers' look-up of implementations.

    Decoding is limited by the host, and the look-up takes a tenth of the host time of the experts.
    """
    arguments = (self, hidden_states, top_k_index, top_k_weights)
    if not torch.compiler.is_compiling():
        # self.config.x would call Python functions of two classes.
        config = object.__getattribute__(self.config, "__dict__")
        name = config.get("_experts_implementation_internal")
        if (
            name in _FORWARDS
            and hf.ALL_EXPERTS_FUNCTIONS._global_mapping.get(name) is _FORWARDS[name]
        ):
            return _FORWARDS[name](*arguments)
    return type(self).forward(*arguments)


def _operands(experts: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return _linear_weight(experts, lookup(experts, name)), bias


def _linear(experts: Any, x: Tensor, name: str, offs: Tensor, recipe: Recipe) -> Tensor:
    weight, bias = _operands(experts, name)
    return linear(x.to(weight.dtype), weight, bias, offs, recipe)


def _is_swiglu(experts: Any) -> bool:
    is_silu = isinstance(experts._modules.get("act_fn"), (nn.SiLU, SiLUActivation))
    return bool(
        experts.has_gate and is_silu and type(experts)._apply_gate is hf._default_apply_gate
    )


def _activate(experts: Any, hidden: Tensor) -> Tensor:
    """Apply the activation or the gate of the experts."""
    return experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
