"""Compilation and launching of kernels.

No other package calls ``cute.compile`` or has caches. Importing it needs no CuTe DSL. The DSL is
imported when the first kernel is compiled or loaded.
"""

from .arch import Architecture, architecture, device_architecture
from .compile import compile_kernel, forget_kernels
from .launch import launcher

__all__ = [
    "Architecture",
    "architecture",
    "compile_kernel",
    "device_architecture",
    "forget_kernels",
    "launcher",
]
