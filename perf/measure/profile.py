"""Eager time and memory of a pass on a GPU.

Memory is the peak above parameters, rows and their gradients, which exist before and after the
pass.
"""

import timeit
from collections.abc import Callable
from typing import Any

import torch

from .base import Measurement, time_measurement
from .memory import peak_of

_REPEATS, _SECONDS = 5, 0.05


def step_details(run: Callable[[], Any]) -> list[Measurement]:
    """Return the eager time and the peak memory of a pass."""
    return [
        time_measurement(_eager(run), "eager time", "back to back, host included"),
        Measurement("peak memory", peak_of(run), "byte", "allocated, eager", 0.0, 1),
    ]


def _eager(run: Callable[[], Any]) -> list[float]:
    """Return the microseconds of a call, measured over many calls without a graph."""

    def seconds(calls: int) -> float:
        torch.cuda.synchronize()
        return timeit.timeit(run, number=calls) + timeit.timeit(torch.cuda.synchronize, number=1)

    calls = 1
    while seconds(calls) < _SECONDS:
        calls *= 2
    return [seconds(calls) / calls * 1e6 for _ in range(_REPEATS)]
