"""Experts of SGLang on grouped kernels: a plug-in that SGLang loads by itself.

    pip install 'grouped-kernels[sglang]'
    sglang serve --model-path Qwen/Qwen3-30B-A3B --moe-runner-backend grouped_nvfp4_row_scaled

The package's entry point ``sglang.srt.plugins`` calls ``load_plugin``. It adds the schemes of
``SCHEMES`` to the values of ``--moe-runner-backend``. A scheme quantizes the experts of a plain
checkpoint after SGLang has loaded it, or takes over experts that the checkpoint has quantized. All
other layers keep SGLang's own methods. See ``docs/guide/sglang.md``.

Importing this package imports neither SGLang nor its modules.
"""

from ..serving.schemes import SCHEMES, Scheme
from .registration import load_plugin, register

__all__ = ["SCHEMES", "Scheme", "load_plugin", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
