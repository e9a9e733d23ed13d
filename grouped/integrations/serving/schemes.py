"""Schemes: formats in which engines serve experts on grouped kernels."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cute_kernels.formats import NVFP4, Format, FP8Block

from ... import recipes
from ...checkpoint.layouts import LAYOUTS, Layout
from ...recipes import Recipe, check_recipe


class Scheme(NamedTuple):
    """Formats of the experts' operands.

    Attributes:
        name: Name that the user of an engine writes.
        recipe: Recipe of the products; it decides the format of the activations. None takes the
            recipe that the checkpoint asks for, which is ``BF16`` for a plain checkpoint.
        weight: Format that plain weights are quantized to. None leaves them plain.
    """

    name: str
    recipe: Recipe | None
    weight: Format | None


class LoadedFormat(NamedTuple):
    """Formats of a layer's experts after a scheme has met a checkpoint.

    Attributes:
        recipe: Recipe of the products.
        weight: Format of the weights in memory. None if they stay plain.
        layout: Layout of quantized weights in the checkpoint. None if they are plain there.
    """

    recipe: Recipe
    weight: Format | None
    layout: Layout | None

    @property
    def is_batch_invariant(self) -> bool:
        """True if the output of a token does not depend on the other tokens of the batch."""
        activation = self.recipe.input
        level = None if activation is None else activation.global_scale
        return level is None or level.per == "row"


def _recipe_scheme(name: str, recipe: Recipe) -> Scheme:
    """Return the scheme whose weights have the format of the recipe."""
    return Scheme(name, recipe, recipe.weight)


_FP8_WEIGHT = FP8Block(block=(128, 128))

#: Schemes by name. ``register`` of an engine's plug-in adds to them.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("grouped", None, None),
        _recipe_scheme("grouped_bf16", recipes.BF16()),
        Scheme("grouped_w4a16", recipes.BF16(), NVFP4()),
        Scheme("grouped_w8a16", recipes.BF16(), _FP8_WEIGHT),
        Scheme("grouped_w4a8", recipes.FP8Block(), NVFP4()),
        _recipe_scheme("grouped_nvfp4", recipes.NVFP4()),
        _recipe_scheme("grouped_nvfp4_row_scaled", recipes.NVFP4RowScaled()),
        _recipe_scheme("grouped_fp8_block", recipes.FP8Block()),
        _recipe_scheme("grouped_fp8_current", recipes.FP8Current()),
        _recipe_scheme("grouped_mxfp8", recipes.MXFP8()),
    )
}

#: For each layout of a checkpoint: the recipe if it asks for quantized activations, and if not.
_RECIPES: Mapping[str, tuple[Recipe, Recipe]] = {
    "modelopt": (recipes.NVFP4RowScaled(), recipes.BF16()),
    "compressed-tensors": (recipes.NVFP4RowScaled(), recipes.BF16()),
    "deepseek": (recipes.FP8Block(), recipes.FP8Block()),
    "fp8-block": (recipes.FP8Block(), recipes.BF16()),
    "gpt-oss": (recipes.BF16(), recipes.BF16()),
}


def add_schemes(more: Mapping[str, Recipe], is_taken: Callable[[str], bool], kind: str) -> None:
    """Add recipes of the user to the schemes.

    Args:
        more: Recipes by name.
        is_taken: Returns True if a name means something else to the engine.
        kind: Name of such a thing, for messages.

    Raises:
        TypeError: A value is not a recipe.
        ValueError: A name is taken, or a recipe uses delayed scaling.
    """
    for name, recipe in more.items():
        check_recipe(recipe)
        if name not in SCHEMES and is_taken(name):
            raise ValueError(f"{name} is {kind}: choose another name")
        if recipe.takes_scales:
            raise ValueError(
                f"{name}: {recipe} has scales that last from step to step, which a server does "
                "not have: use FP8Current"
            )
        SCHEMES[name] = _recipe_scheme(name, recipe)


def load_format(
    scheme: Scheme, layout_name: str | None, has_inputs: bool, option: str = "--quantization"
) -> LoadedFormat:
    """Return the formats of experts that a checkpoint stores in a layout.

    Args:
        scheme: The scheme that the user chose.
        layout_name: Name of the layout in ``LAYOUTS``. None for plain weights.
        has_inputs: True if the checkpoint asks for quantized activations.
        option: Option of the engine by which the user chose the scheme.

    Raises:
        ValueError: The scheme has weights of another kind than the checkpoint.
    """
    if layout_name is None:
        return LoadedFormat(scheme.recipe or recipes.BF16(), scheme.weight, None)
    layout = LAYOUTS[layout_name]
    if scheme.recipe is None:
        quantized, plain = _RECIPES[layout_name]
        return LoadedFormat(quantized if has_inputs else plain, layout.fmt, layout)
    if type(scheme.weight) is not type(layout.fmt):
        names = [s.name for s in SCHEMES.values() if type(s.weight) is type(layout.fmt)]
        weight = "plain weights" if scheme.weight is None else f"weights in {scheme.weight}"
        raise ValueError(
            f"{option} {scheme.name} has {weight}, but the experts of this checkpoint are "
            f"{layout.fmt}: use {option} grouped, or one of {', '.join(names)}"
        )
    return LoadedFormat(scheme.recipe, layout.fmt, layout)
