"""Running compiled kernels on ``cute_kernels.emulator``.

The emulator serves the CUDA calls of a kernel's host code and interprets the kernel's PTX. The host
code comes from an object file like any other. The PTX is kept beside it and handed over here, with
the cubin in the object file, by which the emulator tells kernels of the same name apart.

The DSL's own loader looks CUDA's functions up by name in the whole process, where the library that
was loaded first wins, be it the real runtime or the emulator's. So that both kinds of kernels can
live in one process, in any order, emulated host code is linked into a shared library of its own,
which prefers the emulator's functions (RTLD_DEEPBIND).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["EmulatedKernel", "load_emulated", "real_device"]


@contextlib.contextmanager
def real_device() -> Iterator[None]:
    """Keep what is compiled or loaded inside the block from ``emulator.install``'s hooks."""
    emulator = sys.modules.get("cute_kernels.emulator")
    arch = emulator.installed() if emulator is not None else None
    if emulator is None or arch is None:
        yield
        return
    num_sms = emulator.engine.num_sms()
    emulator.uninstall()
    try:
        yield
    finally:
        emulator.install(arch, num_sms=num_sms)


def load_emulated(object_file: Path, symbol: str, code: Mapping[str, bytes]) -> EmulatedKernel:
    """Load a kernel's host code, bound to the emulator.

    Args:
        object_file: what the DSL exported.
        symbol: the name that it was exported under.
        code: the device code: ``"ptx"``, of every kernel that the host code launches, and
            ``"cubin"``, what the host code gives to the CUDA runtime.
    """
    import tvm_ffi

    from cute_kernels import emulator

    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as folder:
        library = str(Path(folder) / "kernel.so")
        needed = [str(emulator.build()), tvm_ffi.libinfo.find_libtvm_ffi()]
        # binutils is there: the emulator is built by g++.
        subprocess.run(["ld", "-shared", "-o", library, str(object_file), *needed], check=True)
        ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        # Finds the library loaded, and bound, already.
        function = tvm_ffi.load_module(library)[symbol]
    return EmulatedKernel(function, code["ptx"].decode(), code["cubin"])


class EmulatedKernel:
    """A compiled kernel on the emulator: takes CPU tensors and numbers, runs before it returns.

    Attributes:
        ptx: the PTX of every kernel that it launches.
        cubin: what its host code gives to the CUDA runtime: the machine code.
    """

    def __init__(self, function: Callable[..., object], ptx: str, cubin: bytes) -> None:
        from cute_kernels import emulator

        self._function = function
        self.ptx = ptx
        self.cubin = cubin
        self._is_loaded = False
        self._emulator = emulator

    def __call__(self, *args: Any) -> object:
        """Run the kernel.

        Raises:
            ValueError: a tensor is not on the CPU.
            EmulatorError: the kernel did what a GPU would fault on, hang on or get wrong.
        """
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
                raise ValueError(f"emulated kernels take CPU tensors, got one on {arg.device}")
        if not self._is_loaded:
            # Parsing takes 0.06 s for a quantizer; a process that loads many kernels runs few.
            self._emulator.load_ptx(self.ptx, self.cubin)
            self._is_loaded = True
        return self._emulator.call(self._function, *args)
