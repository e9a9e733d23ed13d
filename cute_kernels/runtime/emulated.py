"""Running compiled kernels on ``cute_kernels.emulator``.

The emulator serves the CUDA calls of a kernel's host code and interprets the kernel's PTX. The host
code comes from an object file like any other. The PTX is kept beside it and handed over here, with
the cubin in the object file, by which the emulator tells kernels of the same name apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cute_kernels.runtime.arch import Architecture

__all__ = ["EmulatedKernel", "device_of"]

_DL_CUDA = 2  # kDLCUDA


@contextlib.contextmanager
def device_of(arch: Architecture) -> Iterator[None]:
    """Bind what is compiled or loaded inside the block to the emulator, or to the real device."""
    if not arch.emulated and "cute_kernels.emulator" not in sys.modules:
        yield
        return
    from cute_kernels import emulator
    from cute_kernels.emulator import engine

    def install(name: str | None) -> None:
        if name is None:
            emulator.uninstall()
        else:
            emulator.install(name, num_sms=engine.num_sms())

    before, wanted = emulator.installed(), arch.name if arch.emulated else None
    if wanted == before:
        yield
        return
    install(wanted)
    try:
        yield
    finally:
        install(before)


class EmulatedKernel:
    """A compiled kernel on the emulator: takes CPU tensors and numbers, runs before it returns.

    Args:
        function: the kernel's host function.
        ptx: the PTX of every kernel that it launches.
        cubin: what its host code gives to the CUDA runtime in place of that PTX.
    """

    def __init__(self, function: Callable[..., object], ptx: str, cubin: bytes) -> None:
        import tvm_ffi

        from cute_kernels.emulator import EmulatorError, engine

        self._function = function
        self._device_code: tuple[str, bytes] | None = (ptx, cubin)
        self._engine = engine
        self._error = EmulatorError
        self._from_dlpack = tvm_ffi.from_dlpack

    def __call__(self, *args: Any) -> object:
        """Run the kernel.

        Raises:
            EmulatorError: the kernel did what a GPU would fault on, hang on or get wrong.
        """
        if self._device_code is not None:
            # Parsing takes 0.06 s for a quantizer; a process that loads many kernels runs few.
            self._engine.load_ptx(*self._device_code)
            self._device_code = None
        views = (
            self._from_dlpack(_DeviceView(arg)) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        )
        self._engine.clear_error()
        try:
            return self._function(*views)
        except RuntimeError:
            if message := self._engine.last_error():
                raise self._error(message) from None
            raise


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
