"""Grouped low-precision kernels on plain tensors: quantize, dequantize and GEMM of ragged groups.

Importing this package registers the ops ``torch.ops.cute_kernels.*``. Modules, parameters and
recipes are in ``grouped``. If torch is not installed, only the emulator works.
"""

import importlib.util
from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

from . import emulator  # an alias of ptx_emulator

__all__ = ["__version__", "emulator"]

#: pyproject.toml takes it from here.
__version__ = "0.1.0"

if importlib.util.find_spec("torch") is not None:
    from cute_kernels import formats, ops

    from .capability import support
    from .layout.prepack import prepack, unpack
    from .layout.shapes import scale_offset
    from .records import UnsupportedError
    from .runtime.aot import precompile
    from .runtime.backend import Backend, active_backend, backend

    __all__ += [
        "Backend",
        "UnsupportedError",
        "active_backend",
        "backend",
        "formats",
        "ops",
        "precompile",
        "prepack",
        "scale_offset",
        "support",
        "unpack",
    ]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
