"""Compiling and launching kernels: the only part that calls ``cute.compile`` and holds caches.

Importing it needs no CuTe DSL; the DSL is imported when the first kernel is compiled or loaded.
"""

from .arch import Architecture, architecture, device_architecture
from .compile import compile_kernel, forget_kernels
from .dsl import dsl_unavailable, require_dsl
from .launch import Launcher, launcher
from .plan import PlanCache
from .spec import KernelSpec

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
