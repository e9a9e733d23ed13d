"""Host time of op calls, with and without their launches."""

import contextlib
import functools
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cute_kernels
from cute_kernels.ops import op as op_module
from cute_kernels.ops.checks import unchecked_end_rows
from cute_kernels.runtime.launch import launcher
from cute_kernels.runtime.plan_cache import clear_plan_cache

from ..contender import Contender, Run
from .base import Measurement, Meter, spread_of

_ROUNDS, _CALLS = 25, 100
_QUICK_ROUNDS, _QUICK_CALLS = 3, 10
#: Emulated GPU on machines without one.
_ARCH, _SMS = "sm_90a", 132


class _Recorder:
    """A launcher that records the launches of a call.

    Args:
        arch: Architecture of the kernels.
        num_sms: Number of SMs.
        launch: Launcher that runs the kernels; None leaves them out.
    """

    def __init__(self, arch: str, num_sms: int, launch: Any = None) -> None:
        self.arch, self.num_sms, self._launch = arch, num_sms, launch
        self.bandwidth = launch and launch.bandwidth
        self.launches: list[Callable[[], object]] | None = None

    def kernel(self, spec: Any) -> Callable[..., object]:
        """Return the launch of a kernel, which is recorded while ``launches`` is set."""
        kernel = self._launch.kernel(spec) if self._launch else lambda *arguments: None
        launches = self.launches
        if launches is None:
            return kernel

        def run(*arguments: Any) -> None:
            launches.append(functools.partial(kernel, *arguments))
            kernel(*arguments)

        return run


class HostMeter(Meter):
    """Measures calls back to back without synchronization, too few to fill the launch queue.

    On a GPU, the compiled host code of the kernels is also measured alone, called again with the
    same arguments. Without a GPU the kernels are left out, and only the Python above a launch is
    measured.
    """

    def __init__(self, backend: str = "", quick: bool = False) -> None:
        self.quick = quick
        self._rounds = _QUICK_ROUNDS if quick else _ROUNDS
        self._calls = _QUICK_CALLS if quick else _CALLS
        if torch.cuda.is_available() and backend in ("", "cuda"):
            self.kind, self.backend = "gpu", "cuda"
            self.device = torch.device("cuda", torch.cuda.current_device())
            launch = launcher(cute_kernels.active_backend(self.device), self.device)
            self._recorder = _Recorder(launch.arch, launch.num_sms, launch)
        else:
            self.kind, self.backend = "cpu", f"emulated:{_ARCH}"
            self.device = torch.device("cpu")
            self._recorder = _Recorder(_ARCH, _SMS)
        self.arch = self._recorder.arch

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Enter the context in which contenders are called."""
        if self.kind == "gpu":
            yield
            return
        with cute_kernels.backend(self.backend), self._recording():
            yield

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Replace the launcher by the recorder."""
        # Without kernels, offs hold no values that a check could read.
        patched_launcher = unittest.mock.patch.object(
            op_module, "launcher", lambda backend, device: self._recorder
        )
        with patched_launcher, unchecked_end_rows():
            clear_plan_cache()
            yield
        clear_plan_cache()

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """Measure the host time of a call, the number of launches, and their host time."""
        launches = self._launches(run)
        with self.active():
            run()
            measurements = [self._time(run, contender.quantity)]
            if contender.is_ours:
                protocol = measurements[0].protocol
                measurements.append(Measurement("launches", len(launches), "1", protocol))
            if self.kind == "gpu" and launches:
                quantity = f"{contender.quantity} of launches"
                measurements.append(self._time(lambda: [launch() for launch in launches], quantity))
        return measurements

    def _launches(self, run: Run) -> list[Callable[[], object]]:
        """Call once and return its launches."""
        launches = self._recorder.launches = []
        with cute_kernels.backend(self.backend), self._recording():
            run()
        self._recorder.launches = None
        return launches

    def _time(self, run: Run, quantity: str) -> Measurement:
        """Return the smallest of several medians of the time of a call."""
        medians = []
        for _ in range(self._rounds):
            times = []
            for _ in range(self._calls):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            if self.kind == "gpu":
                torch.cuda.synchronize()
            medians.append(statistics.median(times) * 1e6)
        protocol = f"smallest of {self._rounds} medians of {self._calls} calls"
        if self.kind == "cpu":
            protocol += ", no launches"
        return Measurement(
            quantity=quantity,
            value=round(min(medians), 2),
            unit="us",
            protocol=protocol,
            spread=round(spread_of(medians), 2),
            repeats=self._rounds,
        )
