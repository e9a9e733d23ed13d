"""Kernels compiled for the emulator."""

from cute_kernels.runtime.arch import architecture
from cute_kernels.runtime.compile import compile_kernel
from cute_kernels.runtime.emulated import EmulatedKernel
from cute_kernels.runtime.spec import KernelSpec


def compile_for_emulator(config: KernelSpec, arch: str = "sm_100a") -> EmulatedKernel:
    """Compile a kernel for the emulator."""
    kernel = compile_kernel(config, architecture(f"emulated:{arch}"))
    assert isinstance(kernel, EmulatedKernel)
    return kernel
