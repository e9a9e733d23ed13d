"""What else is worth knowing of a pass on a GPU: eager time and memory.

Memory is the most above parameters, rows and their gradients, which are there before and after.
"""

import timeit
from collections.abc import Callable
from typing import Any

import torch

from .base import Measurement, of_times
from .memory import peak_of

_REPEATS, _SECONDS = 5, 0.05


def details_of(run: Callable[[], Any]) -> list[Measurement]:
    return [
        of_times(_eager(run), "eager time", "back to back, host included"),
        Measurement("peak memory", peak_of(run), "byte", "allocated, eager", 0.0, 1),
    ]


def _eager(run: Callable[[], Any]) -> list[float]:
    """Microseconds of a call among many without a graph."""

    def seconds(calls: int) -> float:
        torch.cuda.synchronize()
        return timeit.timeit(run, number=calls) + timeit.timeit(torch.cuda.synchronize, number=1)

    calls = 1
    while seconds(calls) < _SECONDS:
        calls *= 2
    return [seconds(calls) / calls * 1e6 for _ in range(_REPEATS)]
