"""Kernels compiled for the emulator, with what the compiler made of them."""

import dataclasses
from collections.abc import Callable

from cute_kernels.runtime.arch import architecture
from cute_kernels.runtime.compile import compile_kernel
from cute_kernels.runtime.emulated import EmulatedKernel
from cute_kernels.runtime.spec import KernelSpec


@dataclasses.dataclass
class Compiled:
	"""A kernel's PTX and machine code; ``run`` takes CPU tensors and numbers, as the variant's kernel says."""

	run: Callable[..., object]
	ptx: str
	cubin: bytes


def compile_for_emulator(config: KernelSpec, arch: str = "sm_100a") -> Compiled:
	"""The kernel of ``config`` on the emulator; compiled, or from the disk cache."""
	kernel = compile_kernel(config, architecture(f"emulated:{arch}"))
	assert isinstance(kernel, EmulatedKernel)
	return Compiled(kernel, kernel.ptx, kernel.cubin)
