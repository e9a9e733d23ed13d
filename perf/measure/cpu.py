"""Times of the reference backend on a CPU."""

import timeit
from collections.abc import Sequence

import torch

from ..contender import Contender, Run
from .base import Measurement, Meter, time_measurement

_REPEATS, _QUICK_REPEATS = 7, 2
_LEAST_SECONDS = 0.02


class CpuMeter(Meter):
    """Meter that alternates between contenders. A repeat consists of calls that take 20 ms."""

    kind = "cpu"
    arch = "reference"

    def __init__(self, backend: str, quick: bool = False) -> None:
        self.backend = backend
        self.device = torch.device("cpu")
        self.quick = quick

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        """Measure the median time of each contender."""
        times: list[list[float]] = [[] for _ in contenders]
        with self.active():
            calls = [max(1, round(_LEAST_SECONDS / _seconds(copies[0], 1))) for copies in runs]
            for _ in range(_QUICK_REPEATS if self.quick else _REPEATS):
                for (run, *_), count, samples in zip(runs, calls, times, strict=True):
                    samples.append(_seconds(run, count) * 1e6)
        protocol = f"{self.backend}, warm"
        return [
            [time_measurement(samples, contender.quantity, protocol)]
            for contender, samples in zip(contenders, times, strict=True)
        ]


def _seconds(run: Run, calls: int) -> float:
    return max(1e-9, timeit.timeit(run, number=calls)) / calls
