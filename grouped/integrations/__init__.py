"""Grouped kernels in other libraries' models. Each module imports the library that it is for."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["torchtitan", "transformers"]

if TYPE_CHECKING:
    from . import torchtitan, transformers
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
