"""Times of the reference backend on a CPU."""

import timeit
from collections.abc import Sequence

import torch

from ..contender import Contender, Run
from .base import Measurement, Meter, of_times

_REPEATS, _QUICK_REPEATS = 7, 2
_LEAST_SECONDS = 0.02


class CpuMeter(Meter):
    """Calls by turns; each repeat is as many calls as take 20 ms."""

    kind = "cpu"
    arch = "reference"

    def __init__(self, backend: str, quick: bool = False) -> None:
        self.backend = backend
        self.device = torch.device("cpu")
        self.quick = quick

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        times: list[list[float]] = [[] for _ in contenders]
        with self.active():
            calls = [max(1, round(_LEAST_SECONDS / _seconds(mine[0], 1))) for mine in runs]
            for _ in range(_QUICK_REPEATS if self.quick else _REPEATS):
                for (run, *_), count, mine in zip(runs, calls, times, strict=True):
                    mine.append(_seconds(run, count) * 1e6)
        protocol = f"{self.backend}, warm"
        return [
            [of_times(mine, contender.quantity, protocol)]
            for contender, mine in zip(contenders, times, strict=True)
        ]


def _seconds(run: Run, calls: int) -> float:
    return max(1e-9, timeit.timeit(run, number=calls)) / calls
