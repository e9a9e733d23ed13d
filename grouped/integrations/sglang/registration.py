"""Registration of the schemes as runner backends of SGLang's experts."""

import logging

from ...recipes import Recipe
from ..serving.schemes import SCHEMES, add_schemes

#: Names that are registered: SGLang's registries take a name once.
_registered: set[str] = set()


def register(**more: Recipe) -> tuple[str, ...]:
    """Add the schemes to SGLang's runner backends: those of ``SCHEMES`` and the arguments.

    SGLang calls this function in each of its processes. Call it yourself only to add recipes, from
    a plug-in of your own, so that it runs in each process too.

    Args:
        more: Further recipes by the value of ``--moe-runner-backend``.

    Returns:
        All names that ``--moe-runner-backend`` now accepts for grouped kernels.

    Raises:
        ImportError: SGLang is missing, or lacks a symbol that the plug-in uses.
        TypeError: A value is not a recipe.
        ValueError: SGLang has a backend of that name, or a recipe uses delayed scaling.
    """
    from . import hooks
    from .method import make_runner_core
    from .symbols import add_moe_runner_backend_choices, register_moe_runner_core

    add_schemes(more, _is_backend, "a runner backend of SGLang")
    for name in SCHEMES:
        if name not in _registered:
            register_moe_runner_core(name, make_runner_core)
            add_moe_runner_backend_choices([name])
            _registered.add(name)
    hooks.register()
    return tuple(SCHEMES)


def _is_backend(name: str) -> bool:
    """Return True if SGLang knows a runner backend."""
    from .symbols import resolve_moe_runner_backend

    try:
        resolve_moe_runner_backend(name)
    except ValueError:
        return False
    return True


def load_plugin() -> None:
    """Register the schemes, or warn: SGLang calls this function when it starts, whoever uses it."""
    try:
        register()
    except ImportError as error:
        logging.getLogger("sglang.grouped").warning(
            "--moe-runner-backend grouped is off: %s", error
        )
