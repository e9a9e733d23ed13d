"""Experts of Hugging Face transformers (5.x) on grouped kernels.

    from grouped.integrations.transformers import GroupedConfig, prepare, register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="grouped_bf16")
    model.set_experts_implementation("grouped_fp8_block")  # trains in this recipe
    prepare(model.eval())  # for serving: quantizes the weights once

    # A quantized folder, or a plain one whose experts are quantized while they are read:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=GroupedConfig())
    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=GroupedConfig(recipe="nvfp4_row_scaled")
    )

This works with every model that uses transformers' experts interface. Weights may be transposed,
layers may have biases, other gates (interleaved, clamped) or no gate, and ids may contain the
sentinels of transformers' expert parallelism.
"""

from .config import GroupedConfig
from .experts import RECIPES, prepare, register

__all__ = ["RECIPES", "GroupedConfig", "prepare", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
