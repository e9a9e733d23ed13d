"""Activations of SGLang's experts."""

from collections.abc import Mapping
from typing import Any

from cute_kernels.formats.activations import Activation

from ..serving.activations import ExpertsActivation

#: By name and ``is_gated`` of SGLang's ``MoeRunnerConfig``. Its ``gelu`` is the exact one, which
#: no kernel computes; ``gelu_tanh`` is the package's GELU.
ACTIVATIONS: Mapping[tuple[str, bool], Activation] = {
    ("silu", True): Activation("swiglu"),
    ("gelu_tanh", True): Activation("geglu"),
    ("silu", False): Activation("silu"),
    ("relu2", False): Activation("srelu"),
}


def find_activation(config: Any, prefix: str, omit: str) -> ExpertsActivation:
    """Return the activation of a layer of experts.

    Args:
        config: SGLang's ``MoeRunnerConfig``.
        prefix: Name of the layer.
        omit: Advice that gives SGLang's own kernels.

    Raises:
        ValueError: No kernel computes it.
    """
    gates = "gated" if config.is_gated else "not gated"
    activation = ACTIVATIONS.get((config.activation, config.is_gated))
    if activation is None:
        names = ", ".join(name for name, gated in ACTIVATIONS if gated == config.is_gated)
        raise ValueError(
            f"{prefix} has the activation {config.activation!r} ({gates}), but the experts of "
            f"grouped-kernels have only {names}: {omit}"
        )
    options = {
        name: getattr(config, name)
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
        if getattr(config, name) is not None
    }
    if not options:
        return ExpertsActivation(activation)
    has_clamped_form = (config.activation, config.is_gated) == ("silu", True)
    beta = options.pop("gemm1_beta", 1.0)
    if (
        not has_clamped_form
        or beta != 1.0
        or options.keys() != {"gemm1_alpha", "gemm1_clamp_limit"}
    ):
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(
            f"{prefix} has the activation {config.activation!r} ({gates}) with {text}, "
            f"gemm1_beta={beta}; kernels of grouped-kernels clamp only SiLU with a gate, with "
            f"gemm1_alpha, gemm1_clamp_limit and gemm1_beta=1: {omit}"
        )
    alpha, limit = float(options["gemm1_alpha"]), float(options["gemm1_clamp_limit"])
    clamped = Activation("clamped_swiglu", alpha=alpha, limit=limit)
    return ExpertsActivation(clamped, interleaved=bool(config.gate_up_interleaved))
