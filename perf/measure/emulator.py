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

#: What is kept of ``emulator.stats``: its name there, by ours. Instructions are of PTX: a division
#: counts as one, and is about ten in machine code. A wait counts once, however long it lasts.
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
    """What the kernels that ``run`` launches on the emulator execute and move.

    Raises:
        RuntimeError: it launched none.
    """
    emulator.reset_stats()
    run()
    stats: Mapping[str, int] = emulator.stats()
    if not stats["warp_insns"]:
        raise RuntimeError("nothing ran on the emulator")
    return {name: int(stats[theirs]) for name, theirs in COUNTS.items()}


def claim(arch: str) -> None:
    """Compile for the emulator before anything else is compiled in this process.

    The CuTe DSL binds what it compiles to the CUDA runtime that it meets first, and kernels of this
    package are compiled for a real one, to be kept on disk. What runs from sources would meet that.
    """
    from cutlass import cute

    @cute.jit
    def nothing() -> None:
        pass

    with installed(arch, _DEFAULT_SMS):
        cute.compile(nothing)


@contextlib.contextmanager
def installed(arch: str, num_sms: int) -> Iterator[None]:
    """Whatever the CuTe DSL compiles and runs inside the block is on the emulator."""
    emulator.install(arch, num_sms=num_sms)
    try:
        yield
    finally:
        emulator.uninstall()


class EmulatorMeter(Meter):
    """Counts one call of each contender, the one that is checked."""

    kind = "emulator"

    def __init__(self, backend: str, **options: Any) -> None:
        self.backend = backend
        self.device = torch.device("cpu")
        self.arch = backend.removeprefix("emulated:")
        self._options = {"num_sms": _DEFAULT_SMS, **options}
        self.num_sms = int(self._options["num_sms"])
        #: Of calls that were checked, and so counted.
        self._counted: dict[Run, dict[str, int]] = {}

    def active(self) -> AbstractContextManager[None]:
        return cute_kernels.backend(self.backend, **self._options)

    def call(self, run: Run) -> Any:
        returned: list[Any] = []
        with self.active():
            self._counted[run] = count(lambda: returned.append(run()))
        return returned[0]

    def environment(self) -> dict[str, Any]:
        return environment("emulator", f"{self.arch}, {self.num_sms} SMs")

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        if run not in self._counted:
            self.call(run)
        return [
            Measurement(name, value, "1", "counted", 0.0, 1)
            for name, value in self._counted.pop(run).items()
        ]
