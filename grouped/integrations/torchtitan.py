"""Experts of torchtitan (0.3) in the recipes of this package.

  converters = [GroupedExpertsConverter.Config(recipe="FP8Block", skip=("layers.0.",))]

Groups need no padding, so the token dispatcher stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchtitan.components.quantization import QuantizationConverter, float8
from torchtitan.config import override
from torchtitan.config.override import _REGISTRY as _OVERRIDES
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

import grouped
from grouped import recipes

from ..recipes import Recipe, check_recipe

__all__ = ["GroupedExpertsConverter", "grouped_experts"]


class GroupedExpertsConverter(QuantizationConverter):  # type: ignore[misc]
    """A model converter: the products of ``GroupedExperts`` by ``grouped.linear``.

    Of every class of experts that multiplies by ``_grouped_mm``, gpt-oss's among them. torchtitan's
    ``has_quantization`` is then true, unless the recipe is BF16, so that it reports no MFU by the
    peak of BF16. The log says which experts were converted and which were not.

    Overrides of torchtitan run later, and those of experts pass over converted ones: use
    ``grouped_experts`` instead of this converter beside them.

    Raises:
        ValueError: the recipe's name is not known, it has delayed scaling, or what is skipped
            is negative or leaves no experts to convert.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """What to convert.

        Attributes:
            recipe: a recipe of ``grouped.recipes``, or its name.
            skip: parts of names of layers whose experts stay as they are, such as
                ``"layers.0."``.
            skip_first: so many layers with experts from the first on stay as they are.
            skip_last: and so many at the end, as NVIDIA trains in NVFP4.
        """

        recipe: str | Recipe = "BF16"
        skip: tuple[str, ...] = ()
        skip_first: int = 0
        skip_last: int = 0

    def __init__(self, config: Config) -> None:
        self.config, self.recipe = config, _as_recipe(config.recipe)
        for name in ("skip_first", "skip_last"):
            if getattr(config, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")

    def convert(self, model_config: Any) -> Any:
        """Replace the configurations of experts; returns the model's, or another root."""
        found = list(model_config.traverse(GroupedExperts.Config))
        options = self.config
        chosen = found[options.skip_first : len(found) - options.skip_last]
        chosen = [f for f in chosen if not any(part in f[0] for part in options.skip)]
        if not chosen:
            skips = ", ".join(
                f"{name}={getattr(options, name)}" for name in ("skip", "skip_first", "skip_last")
            )
            raise ValueError(
                f"no experts to convert: {skips} pass over all of {[name for name, *_ in found]}"
            )
        for _, config, parent, attribute in chosen:
            new = _converted(config, self.recipe)
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        names = [name for name, *_ in chosen]
        others = [name for name, *_ in found if name not in names]
        logger.info(
            f"Converted experts to {self.recipe}: {_listed(names)}; others: {_listed(others)}"
        )
        return model_config


@override(target=GroupedExperts.Config, description="Products of experts by grouped.linear")  # type: ignore[untyped-decorator]
def grouped_experts(config: Any, recipe: str | Recipe = "BF16", after: str | None = None) -> Any:
    """Override of torchtitan that does to all experts what ``GroupedExpertsConverter`` does.

      --override.imports 'grouped.integrations.torchtitan.grouped_experts={"recipe": "FP8Block"}'

    Args:
        config: the configuration of experts.
        recipe: a recipe of ``grouped.recipes``, or its name.
        after: an override of experts that is applied first, as ``"module.function"``;
            torchtitan takes one of each node.

    Raises:
        ValueError: the recipe is not known or has delayed scaling; or ``after`` names no
            override or leaves the experts as they are.
    """
    if after is not None:
        module, _, function = after.rpartition(".")
        importlib.import_module(module)
        if after not in _OVERRIDES:
            raise ValueError(
                f"after must name an override of experts as 'module.function', got {after!r}: {function!r} is none"
            )
        before, fields = config, dataclasses.replace(config)
        config = _OVERRIDES[after].factory(config)
        if config is before and config == fields:
            raise ValueError(
                f"after={after!r} does not take {type(before)._owner.__name__}, and left it as it is"
            )
    return _converted(config, _as_recipe(recipe))


def _as_recipe(recipe: Any) -> Recipe:
    """The recipe itself or of this name; raises for one that torchtitan's experts cannot run."""
    if isinstance(recipe, str):
        if recipe not in recipes.NAMES:
            raise ValueError(f"recipe must be one of {', '.join(recipes.NAMES)}, got {recipe!r}")
        recipe = getattr(recipes, recipe)()
    check_recipe(recipe)
    if recipe.takes_scales:
        raise ValueError(
            f"recipe: {recipe} keeps scales from step to step, for which torchtitan's experts have no place: use FP8Current"
        )
    return recipe  # type: ignore[no-any-return]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"


def _converted(config: Any, recipe: Recipe) -> Any:
    """The configuration of the same experts in ``recipe``; of converted ones the recipe is
    exchanged.
    """
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    owner = type(config)._owner
    if "recipe" in given:
        owner = owner.__bases__[0]  # A later converter's recipe counts.
    return _class_of(owner, recipe.is_quantized).Config(**given | {"recipe": recipe})


@functools.cache
def _class_of(parent: Any, is_quantized: bool) -> Any:
    """The subclass of a class of experts that multiplies by ``grouped.linear``."""

    class Experts(parent):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(parent.Config):  # type: ignore[misc]
            recipe: Recipe

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.recipe = config.recipe
            _warn_of_overrides(parent.Config)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return grouped.linear(A, B_t.transpose(-2, -1), None, offs, self.recipe)

    Experts.__name__ = Experts.__qualname__ = f"Cute{parent.__name__}"
    if is_quantized:
        # torchtitan's ``has_quantization`` looks for these classes.
        float8._float8_experts_cache[Experts] = Experts
    return Experts


@functools.cache
def _warn_of_overrides(config: Any) -> None:
    """Say once that overrides of experts, which are known to torchtitan by now, pass over converted
    ones.
    """
    names = [
        name
        for name, each in _OVERRIDES.items()
        if issubclass(each.target_cls, GroupedExperts.Config)
        and issubclass(config, each.target_cls)
        and each.factory is not grouped_experts
    ]
    # Classes that an override made are of other modules.
    if names and config.__module__.startswith("torchtitan.models."):
        logger.warning(
            f"Overrides of experts ({', '.join(names)}) have no effect on experts that GroupedExpertsConverter converted. If "
            "one of them is active, use grouped.integrations.torchtitan.grouped_experts, an override, with after=<the other> "
            "instead of the converter"
        )
