"""Running compiled kernels on ``cute_kernels.emulator``.

The emulator serves the CUDA calls of a kernel's host code and interprets the kernel's PTX. The host
code comes from an object file like any other. The PTX is kept beside it and handed over here, with
the cubin in the object file, by which the emulator tells kernels of the same name apart.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.runtime.arch import Architecture

__all__ = ["EmulatedKernel", "install_emulator"]

_DL_CUDA = 2  # kDLCUDA


@functools.cache
def install_emulator(arch: Architecture) -> None:
    """Have this process run kernels on the emulator; before the CuTe DSL is first imported."""
    from cute_kernels import emulator

    emulator.install(arch=arch.name)


class EmulatedKernel:
    """A compiled kernel on the emulator: takes CPU tensors and numbers, runs before it returns.

    Args:
        function: the kernel's host function.
        ptx: the PTX of every kernel that it launches.
        cubin: what its host code gives to the CUDA runtime in place of that PTX.
    """

    def __init__(self, function: Callable[..., object], ptx: str, cubin: bytes) -> None:
        import tvm_ffi

        from cute_kernels import emulator

        self._function = function
        self._device_code: tuple[str, bytes] | None = (ptx, cubin)
        self._emulator = emulator
        self._from_dlpack = tvm_ffi.from_dlpack

    def __call__(self, *args: Any) -> object:
        """Run the kernel.

        Raises:
            EmulatorError: the kernel did what a GPU would fault on, hang on or get wrong.
        """
        if self._device_code is not None:
            # Parsing takes 0.06 s for a quantizer; a process that loads many kernels runs few.
            self._emulator.load_ptx(*self._device_code)
            self._device_code = None
        views = (
            self._from_dlpack(_DeviceView(arg)) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        )
        try:
            return self._function(*views)
        except RuntimeError as error:
            raise self._emulator.EmulatorError(str(error)) from None


class _DeviceView:
    """A CPU tensor that DLPack consumers take for a CUDA tensor: the emulator's device memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def __dlpack__(self, **kwargs: Any) -> object:
        capsule = self._tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # An unversioned DLManagedTensor begins with its DLTensor: void* data, then the device type.
        tensor = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + ctypes.sizeof(ctypes.c_void_p)).value = _DL_CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DL_CUDA, 0)
