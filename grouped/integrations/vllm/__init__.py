"""Experts of vLLM on grouped kernels: a plug-in that vLLM loads by itself.

    pip install 'grouped-kernels[vllm]'
    vllm serve Qwen/Qwen3-30B-A3B --quantization grouped_nvfp4_row_scaled

The package's entry point ``vllm.general_plugins`` calls ``load_plugin``. It adds the schemes of
``SCHEMES`` to the values of ``--quantization``. A scheme quantizes the experts of a plain
checkpoint while vLLM loads it, or takes over experts that the checkpoint has quantized. All other
layers keep vLLM's own methods. See ``docs/guide/vllm.md``.

Importing this package imports neither vLLM nor its modules.
"""

from ..serving.schemes import SCHEMES, Scheme
from .registration import load_plugin, register

__all__ = ["SCHEMES", "Scheme", "load_plugin", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
