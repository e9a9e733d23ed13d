"""Compiling and launching kernels: the only part that calls ``cute.compile`` and holds caches.

Importing it needs no CuTe DSL; the DSL is imported when the first kernel is compiled or loaded.
"""

from cute_kernels.runtime.arch import Architecture, architecture, device_architecture
from cute_kernels.runtime.compile import compile_kernel, forget_kernels
from cute_kernels.runtime.dsl import dsl_unavailable, require_dsl
from cute_kernels.runtime.launch import Launcher, launcher
from cute_kernels.runtime.plan import PlanCache
from cute_kernels.runtime.spec import KernelSpec

__all__ = [
  "Architecture",
  "KernelSpec",
  "Launcher",
  "PlanCache",
  "architecture",
  "compile_kernel",
  "device_architecture",
  "dsl_unavailable",
  "forget_kernels",
  "launcher",
  "require_dsl",
]
