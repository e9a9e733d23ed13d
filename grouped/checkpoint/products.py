"""Check that the recipes of a module multiply the quantized weights of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.formats import Format
from cute_kernels.records import UnsupportedError

from .. import recipes
from ..functional.quantization import quantize
from ..nn.linear import GroupedLinear
from ..preparation import SOURCES, check_product
from ..recipes import Recipe
from ..tensor.dtensor_parts import local_part
from .plans import Plan
from .weights import ExpertWeight


def check_products(plans: list[Plan], device_of: Callable[[Tensor], torch.device]) -> None:
    """Raise unless each quantized weight has a product under the recipe of its module.

    Args:
        plans: Plans of all weights.
        device_of: Returns the device of a parameter after loading.

    Raises:
        ValueError: A recipe or an experts implementation does not multiply the weights.
        UnsupportedError: The device has no kernel for them.
    """
    checked = set[tuple[Any, ...]]()
    for plan in plans:
        if plan.layout is None or (recipe_choice := _recipe_of(plan.weight)) is None:
            continue
        recipe, choices = recipe_choice
        parameter = local_part(plan.weight.parameter)
        case = (plan.weight.shape[1:], plan.layout.fmt, parameter.dtype, device_of(parameter))
        if (recipe, *case) in checked:
            continue
        error = _find_error(recipe, *case)
        if error is not None:
            kind = UnsupportedError if isinstance(error, UnsupportedError) else ValueError
            raise kind(
                f"{plan.weight.key} is {plan.layout.fmt} in the checkpoint ({plan.layout.name}), "
                f"which {_name_of(recipe, choices)} does not multiply: {error}. "
                f"{_advice(choices, case)}"
            ) from None
        checked.add((recipe, *case))


def _recipe_of(weight: ExpertWeight) -> tuple[Recipe, Mapping[str, Recipe]] | None:
    """Return the recipe of a weight's module, and the recipes that it may have, by name.

    Raises:
        ValueError: Experts of transformers have another library's implementation.
    """
    owner: nn.Module = weight.owner
    if isinstance(owner, GroupedLinear):
        return owner.recipe, {f"{name}()": getattr(recipes, name)() for name in recipes.NAMES}
    if not hasattr(owner, "config"):
        return None  # Experts of nobody's interface: their forward pass is unknown.
    for source in SOURCES:
        weights = source.find_weights(owner)
        if weights is not None:
            return weights[0].recipe, source.recipes
    raise ValueError(
        f"{weight.path} are experts of transformers, which does not multiply the quantized weights "
        "of the checkpoint: call grouped.integrations.transformers.register() and choose one of "
        "its implementations, such as model.set_experts_implementation('grouped_bf16')"
    )


def _find_error(
    recipe: Recipe,
    matrix: tuple[int, ...],
    fmt: Format,
    dtype: torch.dtype,
    device: torch.device,
) -> Exception | None:
    """Return the error of a product with a weight of this shape and format, or None."""
    try:
        # No byte is read, so the weight needs no memory.
        weight = quantize(torch.empty(1, *matrix, dtype=dtype, device="meta"), fmt)
        check_product(weight, recipe, device, needs_dx=False)
    except (TypeError, ValueError, UnsupportedError) as error:
        return error
    return None


def _name_of(recipe: Recipe, choices: Mapping[str, Recipe]) -> str:
    """Return the name of a recipe among the choices, or its text."""
    names: Iterator[str] = (name for name, choice in choices.items() if choice == recipe)
    return next(names, str(recipe))


def _advice(choices: Mapping[str, Recipe], case: tuple[Any, ...]) -> str:
    """Return a sentence that names the recipes with a product."""
    names = [name for name, recipe in choices.items() if _find_error(recipe, *case) is None]
    return f"Use one of {', '.join(names)}" if names else "No recipe does on this device"
