"""What else is worth knowing of a pass on a GPU: eager time, kernels by kind, memory.

Memory is the most above parameters, rows and their gradients, which are there before and after.
"""

from __future__ import annotations

import collections
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.gemm.problem import GemmConfig
from cute_kernels.gemm.sm90.fp4.config import ExpandConfig
from cute_kernels.runtime.aot import declared_specs
from cute_kernels.runtime.arch import device_architecture
from cute_kernels.runtime.spec import short_name
from perf.measure.base import Measurement, of_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["details_of", "kind_of_kernel"]

_REPEATS, _SECONDS, _STEPS = 5, 0.05, 3


def details_of(run: Callable[[], Any]) -> list[Measurement]:
    """Eager time, GPU time by kind of kernel, and memory."""
    eager = of_times(_eager(run), "eager time", "back to back, host included")
    return [eager, *_by_kind(run), _peak(run)]


def _eager(run: Callable[[], Any]) -> list[float]:
    """Microseconds of a call among many without a graph."""
    calls = 1
    times: list[float] = []
    while len(times) < _REPEATS:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        if elapsed < _SECONDS:
            calls *= 2
        else:
            times.append(elapsed / calls * 1e6)
    return times


def _by_kind(run: Callable[[], Any]) -> Iterable[Measurement]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_STEPS):
            run()
        torch.cuda.synchronize()
    total: dict[str, float] = collections.defaultdict(float)
    for event in profile.key_averages():
        total[kind_of_kernel(event.key, _kinds())] += event.device_time_total / _STEPS
    for kind, us in sorted(total.items()):
        if us:
            yield Measurement(f"GPU time of {kind}", round(us, 1), "us", "profiled", None, _STEPS)


@functools.cache
def _kinds() -> dict[str, str]:
    """What the kernels of this package are for, by the names that profiles have."""
    kinds = {}
    for spec in declared_specs(device_architecture(torch.cuda.current_device())):
        kind = "quantize"
        if isinstance(spec, GemmConfig):
            kind = "GEMM fprop, dgrad" if spec.grouping == "m_grouped" else "GEMM wgrad"
        elif isinstance(spec, ExpandConfig):
            kind = "expand"
        kinds[short_name(spec)] = kind
    return kinds


def kind_of_kernel(name: str, kinds: dict[str, str]) -> str:
    """What a kernel is for, by its name in a profile.

    Args:
        name: of the kernel.
        kinds: by parts of the names of this package's kernels.
    """
    for part, kind in kinds.items():
        if part in name:
            # A quantizer that finds the amaxes itself launches three kernels.
            is_amax = "_cutlass_reduce_" in name or "_cutlass_clear_" in name
            return "amax" if is_amax else kind
    is_product = "gemm" in name.lower() or "cutlass" in name
    return "GEMM of others" if is_product else "elementwise"


def _peak(run: Callable[[], Any]) -> Measurement:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    return Measurement("peak memory", peak, "byte", "allocated, eager", 0.0, 1)
