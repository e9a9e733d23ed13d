"""Experts of torchtitan (0.3) in the recipes of this package.

  converters = [GroupedExpertsConverter.Config(recipe="FP8Block", skip=("layers.0.",))]

Groups need no padding, so the token dispatcher stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.moe import GroupedExperts

import grouped
from grouped import recipes

from ..recipes import Recipe, check_recipe


class GroupedExpertsConverter(QuantizationConverter):  # type: ignore[misc]
	"""A model converter: the products of ``GroupedExperts`` by ``grouped.linear``.

	Of every class of experts that multiplies by ``_grouped_mm``, gpt-oss's among them.

	Raises:
		ValueError: the recipe's name is not known, it has delayed scaling, or what is skipped is
			negative or leaves no experts to convert.
	"""

	@dataclasses.dataclass(kw_only=True, slots=True)
	class Config(QuantizationConverter.Config):  # type: ignore[misc]
		"""What to convert.

		Attributes:
			recipe: a recipe of ``grouped.recipes``, or its name.
			skip: parts of names of layers whose experts stay as they are, such as ``"layers.0."``.
			skip_first: so many layers with experts from the first on stay as they are.
			skip_last: and so many at the end, as NVIDIA trains in NVFP4.
		"""

		recipe: str | Recipe = "BF16"
		skip: tuple[str, ...] = ()
		skip_first: int = 0
		skip_last: int = 0

	def __init__(self, config: Config) -> None:
		recipe: Any = config.recipe
		if isinstance(recipe, str):
			if recipe not in recipes.NAMES:
				raise ValueError(f"recipe must be one of {', '.join(recipes.NAMES)}, got {recipe!r}")
			recipe = getattr(recipes, recipe)()
		check_recipe(recipe)
		for name in ("skip_first", "skip_last"):
			if getattr(config, name) < 0:
				raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")
		if recipe.takes_scales:
			raise ValueError(
				f"recipe: {recipe} keeps scales from step to step, for which torchtitan's experts have no place: use FP8Current"
			)
		self.config, self.recipe = config, recipe

	def convert(self, model_config: Any) -> Any:
		"""Replace the configurations of experts; returns the model's, or another root."""
		found = list(model_config.traverse(GroupedExperts.Config))
		options = self.config
		chosen = found[options.skip_first : len(found) - options.skip_last]
		chosen = [f for f in chosen if not any(part in f[0] for part in options.skip)]
		if not chosen:
			skips = ", ".join(f"{name}={getattr(options, name)}" for name in ("skip", "skip_first", "skip_last"))
			raise ValueError(f"no experts to convert: {skips} pass over all of {[name for name, *_ in found]}")
		for _, config, parent, attribute in chosen:
			given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
			owner = type(config)._owner
			kind = owner if "recipe" in given else _class_of(owner)  # A later converter's recipe counts.
			new = kind.Config(**given | {"recipe": self.recipe})
			if parent is None:
				model_config = new
			elif isinstance(parent, list):
				parent[attribute] = new
			else:
				setattr(parent, attribute, new)
		return model_config


@functools.cache
def _class_of(parent: Any) -> Any:

	class Experts(parent):  # type: ignore[misc]
		@dataclasses.dataclass(kw_only=True, slots=True)
		class Config(parent.Config):  # type: ignore[misc]
			recipe: Recipe

		def __init__(self, config: Config) -> None:
			super().__init__(config)
			self.recipe = config.recipe

		def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
			return grouped.linear(A, B_t.transpose(-2, -1), None, offs, self.recipe)

	Experts.__name__ = Experts.__qualname__ = f"Cute{parent.__name__}"
	return Experts
