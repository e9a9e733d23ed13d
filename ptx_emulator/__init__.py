"""Run GPU kernels from their PTX on the CPU, and look for faults.

    import ptx_emulator as emulator

    emulator.install("sm_100a", num_sms=4)
    compiled = cute.compile(host_function, *args)  # unchanged; --enable-tvm-ffi works too
    compiled(*args)                                # CPU tensors stand for device memory
    with emulator.options(mode="chaos", seed=7):   # late, reordered asynchronous work
        compiled(*args)
    with emulator.options(races=True):             # is every access ordered by barriers?
        compiled(*args)
    emulator.stats()                               # instructions, bytes, bank conflicts, MMA flops

``cute.compile`` needs no GPU. The engine interprets the PTX that it generates; a CUDA runtime whose
device is the engine replaces NVIDIA's under the compiled host code. PTX text also runs without the
DSL (``load_ptx``, ``launch``). The engine is C++, compiled once per source version and machine
(``build``). It needs g++ 12 or later and NumPy; torch and the CuTe DSL only if they are used.

``README.md`` lists the instructions that are modelled, the faults that are found, and the limits.
"""

from typing import TYPE_CHECKING

from .compilation import build
from .cutlass_hooks import call, install, installed, uninstall
from .engine import (
    launch,
    load_ptx,
    options,
    reset_stats,
    stats,
    tensor_map,
    unsupported,
    unwatch,
    watch,
)
from .errors import BuildError, EmulatorError
from .host.settings import warn_about_unknown_variables
from .host.suggestions import module_attributes
from .lexer import PtxError

__all__ = [
    "BuildError",
    "EmulatorError",
    "PtxError",
    "build",
    "call",
    "install",
    "installed",
    "launch",
    "load_ptx",
    "options",
    "reset_stats",
    "stats",
    "tensor_map",
    "uninstall",
    "unsupported",
    "unwatch",
    "watch",
]

warn_about_unknown_variables()

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
