"""Activations of vLLM's experts."""

from collections.abc import Mapping
from typing import Any

from cute_kernels.formats.activations import Activation

from ..serving.activations import ExpertsActivation

#: By the value of vLLM's ``MoEActivation``. GELU is the tanh form.
ACTIVATIONS: Mapping[str, ExpertsActivation] = {
    "silu": ExpertsActivation(Activation("swiglu")),
    "gelu_tanh": ExpertsActivation(Activation("geglu")),
    "relu2": ExpertsActivation(Activation("sreglu")),
    "silu_no_mul": ExpertsActivation(Activation("silu")),
    "gelu_tanh_no_mul": ExpertsActivation(Activation("gelu")),
    "relu2_no_mul": ExpertsActivation(Activation("srelu")),
    "swigluoai": ExpertsActivation(Activation("clamped_swiglu"), interleaved=True),
}


def find_activation(layer: Any, prefix: str) -> ExpertsActivation:
    """Return the activation of a layer of experts.

    Raises:
        ValueError: No kernel computes it.
    """
    name = layer.activation.value
    experts_activation = ACTIVATIONS.get(name)
    if experts_activation is None:
        raise ValueError(
            f"{prefix} has the activation {name!r}, but the experts of grouped-kernels have only "
            f"{', '.join(ACTIVATIONS)}: omit --quantization to use vLLM's own kernels"
        )
    alpha, beta, limit = (
        getattr(layer, f"swiglu_{option}", None) for option in ("alpha", "beta", "limit")
    )
    if not experts_activation.activation.is_clamped:
        if limit is not None:
            raise ValueError(
                f"{prefix} clamps the input of {name} at {limit}, which no kernel of "
                "grouped-kernels does: omit --quantization to use vLLM's own kernels"
            )
        return experts_activation
    if beta not in (None, 1.0):
        raise ValueError(
            f"{prefix} adds {beta} to the up projection of {name}; kernels of grouped-kernels add 1"
        )
    values = {"alpha": alpha, "limit": limit}
    options = {key: float(value) for key, value in values.items() if value is not None}
    return experts_activation._replace(activation=Activation("clamped_swiglu", **options))
