"""Running compiled kernels on ``cute_kernels.emulator``.

The emulator serves the CUDA calls of a kernel's host code and interprets the kernel's PTX. The host
code comes from an object file like any other. The PTX is kept beside it and handed over here, with
the cubin in the object file, by which the emulator tells kernels of the same name apart.

So that kernels of both runtimes can live in one process, in any order, which the DSL's own loader
prevents (``emulator.cutlass_hooks``), emulated host code is linked into a shared library of its
own, which prefers the emulator's functions (RTLD_DEEPBIND).
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ptx_emulator.host.locks import ForkSafeLock
from ptx_emulator.host.settings import warn_once

# Two threads that call a new kernel must not both load it. It is taken before the compiler's lock
# and the emulator's, never inside them.
_load_lock = ForkSafeLock()


@contextlib.contextmanager
def real_device() -> Iterator[None]:
    """Keep what is compiled or loaded inside the block from ``emulator.install``'s hooks."""
    emulator = sys.modules.get("cute_kernels.emulator")
    arch = emulator.installed() if emulator is not None else None
    if emulator is None or arch is None:
        yield
        return
    num_sms = emulator.engine.device_sms()
    emulator.uninstall()
    try:
        yield
    finally:
        emulator.install(arch, num_sms=num_sms)


def load_emulated(
    files: Mapping[str, bytes], symbol: str, renew: "Callable[[], EmulatedKernel] | None" = None
) -> "EmulatedKernel":
    """Load a kernel's host code, exported as ``symbol``, bound to the emulator.

    ``files`` are ``"o"``, the object file that the DSL exported, and the device code of every
    kernel that it
    launches: ``"ptx"``, and ``"cubin"``, what it gives to the CUDA runtime.

    Raises:
        ValueError: The object file gives another cubin to the CUDA runtime.
        OSError, subprocess.CalledProcessError, AttributeError: the object file is damaged.
    """
    import tvm_ffi

    import ptx_emulator as emulator

    if files["cubin"] not in files["o"]:
        raise ValueError("the cubin is not that of the object file")
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as folder:
        object_file, library = Path(folder) / "kernel.o", str(Path(folder) / "kernel.so")
        object_file.write_bytes(files["o"])
        needed = [str(emulator.build()), tvm_ffi.libinfo.find_libtvm_ffi()]
        # binutils is there: the emulator is built by g++.
        subprocess.run(
            ["ld", "-shared", "-o", library, str(object_file), *needed],
            check=True,
            capture_output=True,
        )
        with emulator.engine.exclusive():
            ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
            # Finds the library loaded, and bound, already.
            function = tvm_ffi.load_module(library)[symbol]
    return EmulatedKernel(function, files["ptx"].decode(), files["cubin"], renew)


class EmulatedKernel:
    """A compiled kernel on the emulator: takes CPU tensors and numbers, runs before it returns.

    ``renew`` compiles the kernel again. It is called once if the PTX turns out to be damaged, which
    is known when the kernel is first called. Without ``renew`` that is an error.

    Attributes:
        ptx: The PTX of every kernel that it launches.
        cubin: The machine code that the host code passes to the CUDA runtime.
    """

    def __init__(
        self,
        function: Callable[..., object],
        ptx: str,
        cubin: bytes,
        renew: "Callable[[], EmulatedKernel] | None" = None,
    ) -> None:
        import ptx_emulator as emulator

        self._function = function
        self.ptx = ptx
        self.cubin = cubin
        self._renew = renew
        self._is_loaded = False
        self._emulator = emulator

    def __call__(self, *args: Any) -> object:
        """Run the kernel.

        Raises:
            ValueError: A tensor is not on the CPU.
            EmulatorError: The kernel did what a GPU would fault on, hang on or get wrong.
        """
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
                raise ValueError(f"emulated kernels take CPU tensors, got one on {arg.device}")
        if not self._is_loaded:
            # Parsing takes 0.06 s for a quantizer; a process that loads many kernels runs few.
            self._load()
        return self._emulator.call(self._function, *args)

    def _load(self) -> None:
        with _load_lock:
            if self._is_loaded:
                return
            try:
                self._load_ptx()
            except Exception as error:  # whatever the parser trips over
                if self._renew is None:
                    raise
                warn_once(f"a cached kernel is compiled again, its PTX does not load: {error!r}")
                new = self._renew()
                self._function, self.ptx, self.cubin = new._function, new.ptx, new.cubin
                self._renew = None
                self._load_ptx()
            self._is_loaded = True

    def _load_ptx(self) -> None:
        names = self._emulator.load_ptx(self.ptx, self.cubin)
        if not names or not all(name.encode() in self.cubin for name in names):
            raise ValueError(f"the PTX has kernels {names}, the cubin has others")
