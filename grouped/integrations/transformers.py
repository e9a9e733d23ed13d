"""Experts of Hugging Face transformers (5.x) on grouped kernels.

  from grouped.integrations.transformers import prepare, register

  register()
  model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="grouped_bf16")
  model.set_experts_implementation("grouped_fp8_block")  # trains in this recipe
  prepare(model.eval())  # to serve: the weights are quantized once

Every model whose experts go through transformers' experts interface takes them: with transposed
weights, biases, gates of its own (interleaved, clamped), without a gate, and with the sentinels of
its expert parallelism.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe as hf

import grouped
from cute_kernels import ops
from cute_kernels.formats import Format
from grouped import recipes

from ..functional.experts import (
    ExpertsOptions,
    Layer,
    compute_routing,
    run_inference,
    run_quantized_inference,
)
from ..functional.experts import experts as mixture
from ..nn.cached_weight import lookup, warn_if_captured
from ..preparation import (
    SOURCES,
    Source,
    Weight,
    check_product,
    expert_layers,
    is_foreign_experts,
    reorder,
)
from ..recipes import Recipe, check_recipe
from ..tensor.grouped_tensor import GroupedTensor

Forward: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

#: Names of experts implementations, and the recipe of each.
RECIPES: dict[str, Recipe] = {
    "grouped_bf16": recipes.BF16(),
    "grouped_nvfp4": recipes.NVFP4(),
    "grouped_nvfp4_row_scaled": recipes.NVFP4RowScaled(),
    "grouped_mxfp8": recipes.MXFP8(),
    "grouped_fp8_block": recipes.FP8Block(),
    "grouped_fp8_current": recipes.FP8Current(),
}
#: Functions that ``register`` gives transformers, by the same names.
_FORWARDS: dict[str, Forward] = {}


def register(**more: Recipe) -> tuple[str, ...]:
    """Add experts implementations to transformers: those of ``RECIPES`` and those that are given.

    Args:
        more: recipes by the name of the implementation.

    Returns:
        All names that ``experts_implementation`` and ``set_experts_implementation`` now take.

    Raises:
        TypeError: a value is no recipe.
        ValueError: a name that transformers has, or a recipe with delayed scaling, for which
            its experts keep no scales.
    """
    for name, recipe in more.items():
        check_recipe(recipe)
        if name not in RECIPES and name in (*hf.ALL_EXPERTS_FUNCTIONS, "eager"):
            raise ValueError(
                f"{name} is an experts implementation of transformers: take another name"
            )
        if recipe.takes_scales:
            raise ValueError(
                f"{name}: {recipe} keeps scales from step to step, for which transformers' experts "
                "have no place: use FP8Current, or grouped.nn.GroupedMLP"
            )
    RECIPES.update(more)
    for name, recipe in RECIPES.items():
        _FORWARDS[name] = _forward_of(recipe)
        hf.ALL_EXPERTS_FUNCTIONS.register(name, _FORWARDS[name])
    return tuple(RECIPES)


def prepare(
    model: nn.Module,
    fmt: Format | None = None,
    *,
    trainable: bool = False,
    columnwise: bool | None = None,
    masters: MutableMapping[Tensor, Tensor] | None = None,
) -> int:
    """``grouped.prepare`` of a model of transformers: quantize the experts' weights once, in place.

    Each becomes a GroupedTensor (G, N, K). Implementations of this module use them as they are:
    ``grouped_bf16`` beside bf16 activations (W4A16 of NVFP4), quantized ones beside activations
    that they quantize. By default they take no gradient, and the layers call for none of their
    input: call the model under ``torch.no_grad()``, or pass ``columnwise=True`` to train other
    layers. ``get_memory_footprint`` then counts the bytes that are there. ``save_pretrained``
    writes plain weights only and raises: save before, or by ``grouped.checkpoint.save``.
    ``set_experts_implementation`` takes implementations that multiply these weights, and raises for
    others.

    Args:
        model: a model, or experts alone, on the device where it will run.
        fmt: the format of the weights; None for that of the recipe of the implementation in
            use.
        trainable: as in ``grouped.prepare``.
        columnwise: as in ``grouped.prepare``.
        masters: as in ``grouped.prepare``.

    Returns:
        How many layers of experts were prepared.

    Raises:
        ValueError: ``model`` has no experts of transformers, or an implementation that is not
            of this module; and what ``grouped.prepare`` raises.
    """
    if not any(experts_of(model)):
        raise ValueError(f"{type(model).__name__} has no experts that use transformers' interface")
    return grouped.prepare(model, fmt, trainable=trainable, columnwise=columnwise, masters=masters)


def guard_methods(model: nn.Module) -> None:
    """Have methods of transformers' models that expect plain weights know prepared ones."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(experts_of(module)):
            instead: Any = module
            for method in (save_pretrained, get_memory_footprint, set_experts_implementation):
                setattr(
                    instead, method.__name__, functools.partial(method, module)
                )  # pickles, unlike a method
    for experts in experts_of(model):
        if isinstance(experts.down_proj, GroupedTensor) and "forward" not in vars(experts):
            experts.forward = functools.partial(_forward_of_prepared, experts)


def save_pretrained(
    self: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
) -> Any:
    """``save_pretrained`` of a model whose experts hold no plain weights."""
    given = self.state_dict() if state_dict is None else state_dict
    name = next((name for name, t in given.items() if isinstance(t, GroupedTensor)), None)
    if name is not None:
        raise ValueError(
            f"save_pretrained writes plain weights, but prepare() quantized {name}: save before it, or save the quantized "
            "weights by grouped.checkpoint.save(model, folder, layout=...)"
        )
    return type(self).save_pretrained(self, *args, state_dict=state_dict, **kwargs)


def set_experts_implementation(self: Any, experts_implementation: Any) -> None:
    """``set_experts_implementation`` of a model with quantized weights; nothing changes where it
    raises.
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
            f"experts_implementation={experts_implementation!r} cannot multiply the weights that prepare() quantized: {error}"
        ) from None
    for weight in weights:
        reorder(weight)


def get_memory_footprint(self: Any, return_buffers: bool = True) -> int:
    """``get_memory_footprint``, which takes the size of an element for that of its dtype."""
    return sum(t.nbytes for t in (*self.parameters(), *(self.buffers() if return_buffers else ())))


def experts_of(model: nn.Module) -> Iterator[Any]:
    """Yield the experts under ``model`` that use transformers' interface."""
    return filter(is_foreign_experts, model.modules())


def _weights_of(module: Any) -> list[Weight] | None:
    if not is_foreign_experts(module):
        return None
    recipe = recipe_in_use(module)
    return [
        Weight(module, name, recipe, bool(module.is_transposed)) for name in weight_names(module)
    ]


SOURCES.append(Source(_weights_of, guard_methods))


def recipe_in_use(experts: Any) -> Recipe:
    """Return the recipe of the implementation that the experts' config names."""
    name = experts.config._experts_implementation
    if name not in RECIPES:
        raise ValueError(
            f"the model uses experts_implementation={name!r}: choose one of {', '.join(RECIPES)} "
            "by set_experts_implementation first"
        )
    return RECIPES[name]


def weight_names(experts: Any) -> tuple[str, str]:
    """Return the names of the experts' two weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _as_linear(experts: Any, weight: Tensor) -> Tensor:
    return weight.transpose(1, 2) if experts.is_transposed else weight


def _forward_of(recipe: Recipe) -> Forward:

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        first, second = weight_names(self)
        if recipe.is_quantized and not torch.is_grad_enabled():
            warn_if_captured(lookup(self, first), recipe)
        dtype, experts = hidden_states.dtype, self.num_experts
        has_norm = getattr(self, "has_post_expert_norm", False)  # Since 5.18 or later.
        if _is_swiglu(self) and not has_norm:
            options = ExpertsOptions("swiglu", False, False, dtype)
            key, given = (experts, options), (hidden_states, top_k_index, top_k_weights)

            def run(layers: tuple[Layer, Layer]) -> Tensor:
                x, routing = (
                    hidden_states.to(layers[0].weights[0].dtype),
                    compute_routing(top_k_index, experts),
                )
                return mixture(x, top_k_weights.float(), routing, *layers, options)

            weights = (lookup(self, first), lookup(self, second))
            if type(weights[0]) is type(weights[1]) is GroupedTensor and not (
                self.has_bias or self.is_transposed
            ):
                return run_quantized_inference(key, given, weights, recipe, vars(self), run)
            layers = (_layer(self, first, recipe), _layer(self, second, recipe))
            return run_inference(key, given, layers, lambda: run(layers))
        # The sentinels of expert parallelism are no expert's ids: they have no rows.
        routing = compute_routing(top_k_index, experts)
        offs, token, _, row = routing
        hidden = _linear(self, ops.moe_gather(hidden_states, token, row), first, offs, recipe)
        rows = _linear(self, _activated(self, hidden), second, offs, recipe)
        if has_norm:
            rows = self.post_expert_norm(rows)
        return ops.moe_combine(rows, row, top_k_weights.float(), dtype)

    return forward


def _forward_of_prepared(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``forward`` of prepared experts, without transformers' look-up of the implementation in use.

    A decode step waits for the host, and that look-up takes a tenth of its time in the experts.
    """
    arguments = (self, hidden_states, top_k_index, top_k_weights)
    if not torch.compiler.is_compiling():
        # Not self.config.x, which asks Python functions of two classes.
        name = object.__getattribute__(self.config, "__dict__").get(
            "_experts_implementation_internal"
        )
        if (
            name in _FORWARDS
            and hf.ALL_EXPERTS_FUNCTIONS._global_mapping.get(name) is _FORWARDS[name]
        ):
            return _FORWARDS[name](*arguments)
    return type(self).forward(*arguments)


def _operands(experts: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return _as_linear(experts, lookup(experts, name)), bias


def _layer(experts: Any, name: str, recipe: Recipe) -> Layer:
    weight, bias = _operands(experts, name)
    return Layer([weight], bias, recipe)


def _linear(experts: Any, x: Tensor, name: str, offs: Tensor, recipe: Recipe) -> Tensor:
    weight, bias = _operands(experts, name)
    return grouped.linear(x.to(weight.dtype), weight, bias, offs, recipe)


def _is_swiglu(experts: Any) -> bool:
    is_silu = isinstance(experts._modules.get("act_fn"), (nn.SiLU, SiLUActivation))
    return bool(
        experts.has_gate and is_silu and type(experts)._apply_gate is hf._default_apply_gate
    )


def _activated(experts: Any, hidden: Tensor) -> Tensor:
    return experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
