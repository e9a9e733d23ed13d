"""Experts of Hugging Face transformers (5.x) on grouped kernels.

Quantize the weights of a model once, or load a folder with quantized weights::

    register()
    prepare(model)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=GroupedConfig())

This works with every model that uses transformers' experts interface. Weights may be transposed,
layers may have biases, other gates (interleaved, clamped) or no gate, and ids may contain the
sentinels of transformers' expert parallelism.
"""

from . import quantizer as _quantizer  # noqa: F401  # ``register`` registers it.
from .config import GroupedConfig
from .experts import RECIPES, prepare, register

__all__ = ["RECIPES", "GroupedConfig", "prepare", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
