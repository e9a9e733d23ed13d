"""Hooks into SGLang: layers of experts get the plug-in's method.

A runner core alone is not enough. SGLang 0.5.23 asks a layer's quantization method for the runner,
and its methods choose their own kernels if they do not know the name of a backend.
"""

import inspect
from typing import Any

from ..serving.schemes import SCHEMES
from .method import GroupedExpertsMethod
from .symbols import (
    FusedMoE,
    HookRegistry,
    HookType,
    _initialize_model,
    get_flags,
    get_moe_runner_backend,
    get_parallel,
)

_INIT = FusedMoE.__init__
_hooked: list[str] = []


def find_scheme_name() -> str | None:
    """Return the scheme that the user chose, or None for a backend of SGLang."""
    name: str = get_moe_runner_backend().value
    return name if name in SCHEMES else None


def choose_method(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the plug-in's method to the arguments of ``FusedMoE()``, if the user chose a scheme.

    Raises:
        ValueError: The model has chosen a method itself.
    """
    name = find_scheme_name()
    if name is None:
        return None
    arguments = inspect.signature(_INIT).bind(*args, **named).arguments
    if arguments.get("quant_method") is not None:
        method = type(arguments["quant_method"]).__name__
        raise ValueError(
            f"--moe-runner-backend {name} cannot serve {arguments.get('prefix') or 'experts'}: the "
            f"model runs them with its own {method}: omit --moe-runner-backend"
        )
    return args, named | {"quant_method": GroupedExpertsMethod(name)}


def check_model(model: Any, *args: Any, **named: Any) -> None:
    """Raise ValueError if the user chose a scheme, but no layer of a model runs in it.

    A draft model and a stage of a pipeline may have no experts.

    Args:
        model: The model, before its weights are loaded.
        args: Arguments of SGLang's function.
        named: Its keyword arguments.
    """
    name = find_scheme_name()
    if name is None or get_flags().moe.in_speculative_scope or get_parallel().pp_size > 1:
        return
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    if not any(isinstance(method, GroupedExpertsMethod) for method in methods):
        raise ValueError(
            f"--moe-runner-backend {name} cannot serve {type(model).__name__}: it has no experts "
            "of SGLang's class FusedMoE: omit --moe-runner-backend"
        )


def register() -> None:
    """Register both hooks. SGLang applies them after it has loaded all plug-ins."""
    if _hooked:
        return
    for function, hook, kind in (
        (_INIT, choose_method, HookType.BEFORE),
        (_initialize_model, check_model, HookType.AFTER),
    ):
        _hooked.append(f"{function.__module__}.{function.__qualname__}")
        HookRegistry.register(_hooked[-1], hook, kind)
