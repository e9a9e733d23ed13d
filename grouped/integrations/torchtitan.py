"""Experts of torchtitan (0.3) in the recipes of ``grouped``.

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

from ptx_emulator.host.suggestions import did_you_mean

from .. import recipes
from ..functional.linear_autograd import linear
from ..recipes import Recipe, check_recipe

__all__ = ["GroupedExpertsConverter", "grouped_experts"]


def __dir__() -> list[str]:
    return sorted(__all__)


class GroupedExpertsConverter(QuantizationConverter):  # type: ignore[misc]
    """A model converter that computes the products of ``GroupedExperts`` by ``grouped.linear``.

    It converts every class of experts that multiplies by ``_grouped_mm``, including those of
    gpt-oss. Unless the recipe is BF16, torchtitan's ``has_quantization`` is then true, so that it
    reports no MFU relative to the peak of BF16. The log names the experts that were converted and
    those that were not.

    torchtitan applies overrides later, and overrides of experts skip converted ones. Use
    ``grouped_experts`` instead of this converter if there are such overrides.

    Raises:
        ValueError: The recipe's name is unknown, it uses delayed scaling, a number of skipped
            layers is negative, or no experts are left to convert.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """Options of the conversion.

        Attributes:
            recipe: A recipe of ``grouped.recipes``, or its name.
            skip: Substrings in names of layers. Layers with them are not converted, such as
                ``"layers.0."``.
            skip_first: Number of expert layers at the start that are not converted.
            skip_last: Number of expert layers at the end that are not converted. NVIDIA skips some
                when training in NVFP4.
        """

        recipe: str | Recipe = "BF16"
        skip: tuple[str, ...] = ()
        skip_first: int = 0
        skip_last: int = 0

    def __init__(self, config: Config) -> None:
        self.config, self.recipe = config, _parse_recipe(config.recipe)
        for name in ("skip_first", "skip_last"):
            if getattr(config, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")

    def convert(self, model_config: Any) -> Any:
        """Replace the configurations of experts and return the model's configuration."""
        nodes = list(model_config.traverse(GroupedExperts.Config))
        options = self.config
        selected = nodes[options.skip_first : len(nodes) - options.skip_last]
        selected = [n for n in selected if not any(text in n[0] for text in options.skip)]
        if not selected:
            skips = ", ".join(
                f"{name}={getattr(options, name)}" for name in ("skip", "skip_first", "skip_last")
            )
            raise ValueError(
                f"no experts to convert: {skips} skip all of {[name for name, *_ in nodes]}"
            )
        for _, config, parent, attribute in selected:
            new = _convert_config(config, self.recipe)
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        names = [name for name, *_ in selected]
        skipped = [name for name, *_ in nodes if name not in names]
        logger.info(
            f"Converted experts to {self.recipe}: {_summary(names)}; others: {_summary(skipped)}"
        )
        return model_config


@override(target=GroupedExperts.Config, description="Products of experts by grouped.linear")  # type: ignore[untyped-decorator]
def grouped_experts(config: Any, recipe: str | Recipe = "BF16", after: str | None = None) -> Any:
    """Convert all experts as ``GroupedExpertsConverter`` does.

    This is an override of torchtitan. Its command line option is:

        --override.imports 'grouped.integrations.torchtitan.grouped_experts={"recipe": "FP8Block"}'

    Args:
        config: The configuration of experts.
        recipe: A recipe of ``grouped.recipes``, or its name.
        after: An override of experts that is applied before, as ``"module.function"``. torchtitan
            allows one override per node.

    Raises:
        ValueError: The recipe is unknown or uses delayed scaling, or ``after`` names no override or
            does not change the experts.
    """
    if after is not None:
        module, _, function = after.rpartition(".")
        importlib.import_module(module)
        if after not in _OVERRIDES:
            raise ValueError(
                f"after must name an override of experts as 'module.function', got {after!r}: "
                f"{function!r} is none"
            )
        original, fields = config, dataclasses.replace(config)
        config = _OVERRIDES[after].factory(config)
        if config is original and config == fields:
            raise ValueError(
                f"after={after!r} does not apply to {type(original)._owner.__name__}, and left it "
                "unchanged"
            )
    return _convert_config(config, _parse_recipe(recipe))


def _parse_recipe(recipe: Any) -> Recipe:
    """Return a recipe by itself or by name. Raise if torchtitan's experts cannot run it."""
    if isinstance(recipe, str):
        if recipe not in recipes.NAMES:
            raise ValueError(
                f"recipe must be one of {', '.join(recipes.NAMES)}, got {recipe!r}"
                + did_you_mean(recipe, recipes.NAMES)
            )
        recipe = getattr(recipes, recipe)()
    check_recipe(recipe)
    if recipe.takes_scales:
        raise ValueError(
            f"recipe: {recipe} has scales that last from step to step, which torchtitan's experts "
            "cannot hold: use FP8Current"
        )
    return recipe  # type: ignore[no-any-return]


def _summary(names: Sequence[str]) -> str:
    """Return the number of names, and up to three of them."""
    shown = ", ".join(name or "the model" for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"


def _convert_config(config: Any, recipe: Recipe) -> Any:
    """Return the configuration of the same experts in ``recipe``.

    If the experts are converted already, their recipe is replaced.
    """
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    owner = type(config)._owner
    if "recipe" in fields:
        owner = owner.__bases__[0]  # A later converter's recipe counts.
    return _experts_class(owner, recipe.is_quantized).Config(**fields | {"recipe": recipe})


@functools.cache
def _experts_class(parent: Any, is_quantized: bool) -> Any:
    """Return a subclass of a class of experts that multiplies by ``grouped.linear``."""

    class Experts(parent):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(parent.Config):  # type: ignore[misc]
            recipe: Recipe

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.recipe = config.recipe
            _warn_of_overrides(parent.Config)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return linear(A, B_t.transpose(-2, -1), None, offs, self.recipe)

    Experts.__name__ = Experts.__qualname__ = f"Cute{parent.__name__}"
    if is_quantized:
        # torchtitan's ``has_quantization`` looks for these classes.
        float8._float8_experts_cache[Experts] = Experts
    return Experts


@functools.cache
def _warn_of_overrides(config: Any) -> None:
    """Warn once that overrides of experts do not apply to converted ones.

    torchtitan knows all overrides at this point.
    """
    names = [
        name
        for name, entry in _OVERRIDES.items()
        if issubclass(entry.target_cls, GroupedExperts.Config)
        and issubclass(config, entry.target_cls)
        and entry.factory is not grouped_experts
    ]
    # Classes that an override created belong to other modules.
    if names and config.__module__.startswith("torchtitan.models."):
        logger.warning(
            f"Overrides of experts ({', '.join(names)}) have no effect on experts that "
            "GroupedExpertsConverter converted. If one of them is active, use the override "
            "grouped.integrations.torchtitan.grouped_experts with after=<the other> instead of the "
            "converter"
        )
