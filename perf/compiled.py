"""Kernels compiled for the emulator, with what the compiler made of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Compiled", "compile_for_emulator"]


@dataclasses.dataclass
class Compiled:
    """One compiled variant.

    Attributes:
        run: takes CPU tensors and numbers, as the variant's ``entry`` says.
        ptx: its PTX.
        cubin: its machine code.
    """

    run: Callable[..., object]
    ptx: str
    cubin: bytes


@functools.cache
def compile_for_emulator(config: Any, arch: str = "sm_100a") -> Compiled:
    """Compile the variant that ``config`` describes, once a process.

    The emulator must have been installed for ``arch``.
    """
    from cutlass import cute

    entry, args = config.entry()
    # The emulator knows kernels by name: give those of each variant one of their own.
    members = [member for cls in type(entry).__mro__ for member in vars(cls).values()]
    for member in members:
        if hasattr(member, "set_name_prefix"):
            member.set_name_prefix(f"{arch}_{len(_names)}")
    _names.append(config)
    options = cute.GPUArch(arch), cute.EnableTVMFFI(True), cute.KeepPTX(True), cute.KeepCUBIN(True)
    kernel = cute.compile[options](entry, *args)
    return Compiled(kernel, kernel.artifacts.PTX, kernel.artifacts.CUBIN)


_names: list[Any] = []
