"""Grouped kernels in other libraries' models. Each module imports the library that it is for."""

from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

__all__ = ["sglang", "torchtitan", "transformers", "vllm"]

if TYPE_CHECKING:
    from . import sglang, torchtitan, transformers, vllm
else:
    __getattr__ = module_attributes(__name__, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)
