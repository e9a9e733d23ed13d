"""``GroupedConfig``: the ``quantization_config`` of models with quantized experts."""

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from cute_kernels.formats import Format, parse
from ptx_emulator.host.suggestions import did_you_mean

from ...recipes import Recipe
from .experts import RECIPES, is_registered, register

#: ``quant_method`` of the config and name of the quantizer.
METHOD = "grouped"
_PREFIX = "grouped_"


class GroupedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of ``from_pretrained`` for quantized experts.

    For a folder whose experts are quantized in a layout of ``grouped.checkpoint``, pass it without
    arguments. It replaces the quantizer that ``config.json`` names. The experts become
    GroupedTensors with the bytes of the files. Other quantized weights are decoded to the model's
    dtype. ``experts_implementation`` follows from the folder: the recipe of the weights' format if
    the folder declares quantized activations, else ``"grouped_bf16"``. ``recipe`` or the argument
    ``experts_implementation`` chooses another one.

    For a plain folder, ``recipe`` or ``weight`` is the target: each layer's experts are quantized
    when they are read, expert by expert. If the files have other names of the experts, which
    transformers joins, they are quantized a layer at a time. The result equals ``prepare`` of a
    plain model to the bit.

    The files are checked as by ``grouped.checkpoint.load`` before a weight is read. ``register``
    is called if it was not.

    Args:
        recipe: Name of an experts implementation, with or without ``grouped_``, or a recipe of
            ``RECIPES``.
        weight: Format of the quantized weights, or its text, for a plain folder. None takes that
            of the recipe. ``recipe="bf16", weight=grouped.NVFP4()`` is W4A16.

    Raises:
        TypeError: An argument has another type.
        ValueError: There is no such recipe or format.
    """

    def __init__(
        self, recipe: str | Recipe | None = None, weight: str | Format | None = None, **other: Any
    ) -> None:
        if not is_registered():
            register()
        method = other.pop("quant_method", METHOD)
        if other or method != METHOD:
            name, value = next(iter(other.items()), ("quant_method", method))
            raise ValueError(
                f"GroupedConfig has no option {name}={value!r}: it has recipe and weight, and the "
                "folder's own config says the rest"
            )
        self.quant_method: Any = METHOD
        #: Name of the experts implementation, or None.
        self.recipe = None if recipe is None else _implementation(recipe)
        #: Text of the format of the weights, or None.
        self.weight = None if weight is None else _format(weight).text

    @property
    def format(self) -> Format | None:
        """Format that plain weights are quantized to, or None."""
        if self.weight is not None:
            return parse(self.weight)
        return None if self.recipe is None else RECIPES[self.recipe].weight


def _implementation(recipe: str | Recipe) -> str:
    """Return the name in ``RECIPES`` of a recipe or of a name without the prefix."""
    if isinstance(recipe, Recipe):
        name = next((name for name, known in RECIPES.items() if known == recipe), None)
        if name is None:
            raise ValueError(f"recipe={recipe} has no name: register it by register(mine=recipe)")
        return name
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a name or a recipe, got {type(recipe).__name__}")
    name = recipe if recipe in RECIPES else _PREFIX + recipe
    if name not in RECIPES:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)}, with or without {_PREFIX}, got "
            f"{recipe!r}{did_you_mean(name, RECIPES)}"
        )
    return name


def _format(weight: str | Format) -> Format:
    """Return the format of a text, or the format itself."""
    if isinstance(weight, Format):
        return weight
    if not isinstance(weight, str):
        raise TypeError(f"weight must be a format or its text, got {type(weight).__name__}")
    return parse(weight)
