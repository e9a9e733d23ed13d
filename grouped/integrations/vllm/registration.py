"""Registration of the schemes as quantization methods of vLLM."""

import logging

from ...recipes import Recipe
from ..serving.schemes import SCHEMES, add_schemes


def register(**more: Recipe) -> tuple[str, ...]:
    """Add the schemes to vLLM's quantization methods: those of ``SCHEMES`` and the arguments.

    vLLM calls this function in each of its processes. Call it yourself only to add recipes, from a
    plug-in of your own, so that it runs in each process too.

    Args:
        more: Further recipes by the value of ``--quantization``.

    Returns:
        All names that ``--quantization`` now accepts.

    Raises:
        ImportError: vLLM is missing, or lacks a symbol that the plug-in uses.
        TypeError: A value is not a recipe.
        ValueError: vLLM has a method of that name, or a recipe uses delayed scaling.
    """
    from . import config
    from .symbols import QUANTIZATION_METHODS

    add_schemes(more, QUANTIZATION_METHODS.__contains__, "a quantization method of vLLM")
    for scheme in SCHEMES.values():
        config.register_scheme(scheme)
    return tuple(SCHEMES)


def load_plugin() -> None:
    """Register the schemes, or warn: vLLM calls this function when it starts, whoever uses it."""
    try:
        register()
    except ImportError as error:
        logging.getLogger("vllm.grouped").warning("--quantization grouped is off: %s", error)
