"""Counts of kernels on the emulator."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

import cute_kernels
import ptx_emulator as emulator

from ..contender import Contender, Run
from ..environment import environment
from .base import Measurement, Meter

#: Keys of ``ptx_emulator.stats`` by quantity. Instructions are PTX instructions: a division counts
#: as one, and takes about ten in machine code. A wait counts once, however long it lasts.
COUNTS = {
    "thread instructions": "thread_insns",
    "warp instructions": "warp_insns",
    "bytes read": "ld_global_bytes",
    "bytes read by TMA": "tma_load_bytes",
    "bytes written": "st_global_bytes",
    "bytes written by TMA": "tma_store_bytes",
    "sectors written": "st_global_sectors",
    "shared wavefronts": "smem_wavefronts",
    "shared accesses": "smem_accesses",
    "MMA operations": "mma_flops",
}
_DEFAULT_SMS = 4


def count(run: Run) -> dict[str, int]:
    """Return the counts of the kernels that ``run`` launches on the emulator.

    Raises:
        RuntimeError: It launched no kernel.
    """
    emulator.reset_stats()
    run()
    stats: Mapping[str, int] = emulator.stats()
    if not stats["warp_insns"]:
        raise RuntimeError("nothing ran on the emulator")
    return {quantity: int(stats[key]) for quantity, key in COUNTS.items()}


def bind_compiler(arch: str) -> None:
    """Bind the CuTe DSL of this process to the emulator, by compiling for it first.

    The DSL binds everything that it compiles to the first CUDA runtime that it meets. This package
    compiles kernels for a real runtime, to cache them on disk. Peers that run from sources on the
    emulator would get that one.
    """
    from cutlass import cute

    @cute.jit
    def nothing() -> None:
        pass

    with installed(arch, _DEFAULT_SMS):
        cute.compile(nothing)


@contextlib.contextmanager
def installed(arch: str, num_sms: int) -> Iterator[None]:
    """Let the CuTe DSL compile for the emulator and run on it inside the block."""
    emulator.install(arch, num_sms=num_sms)
    try:
        yield
    finally:
        emulator.uninstall()


class EmulatorMeter(Meter):
    """Counts the instructions of one call of each contender, the call whose result is checked."""

    kind = "emulator"

    def __init__(self, backend: str, **options: Any) -> None:
        self.backend = backend
        self.device = torch.device("cpu")
        self.arch = backend.removeprefix("emulated:")
        self._options = {"num_sms": _DEFAULT_SMS, **options}
        self.num_sms = int(self._options["num_sms"])
        #: Counts of the calls that were checked.
        self._counted: dict[Run, dict[str, int]] = {}

    def active(self) -> AbstractContextManager[None]:
        """Return the context of the emulated backend."""
        return cute_kernels.backend(self.backend, **self._options)

    def call(self, run: Run) -> Any:
        """Call once, count, and return the result."""
        returned: list[Any] = []
        with self.active():
            self._counted[run] = count(lambda: returned.append(run()))
        return returned[0]

    def environment(self) -> dict[str, Any]:
        """Return the fields of ``Record`` about machine, versions and emulated GPU."""
        return environment("emulator", f"{self.arch}, {self.num_sms} SMs")

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """Return the counts of the checked call."""
        if run not in self._counted:
            self.call(run)
        return [
            Measurement(name, value, "1", "counted", 0.0, 1)
            for name, value in self._counted.pop(run).items()
        ]
