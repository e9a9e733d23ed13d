"""What the programs in this folder share: times on a GPU, and what a record must say."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import random
import statistics
import subprocess
from typing import TYPE_CHECKING, Any

import torch

from perf.power import PowerMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["commit", "machine_facts", "median_us", "relative_error", "sustained"]

_REPLAYS = 7
_REPLAY_SECONDS = 0.04
#: Of replays before those that count: until clocks have settled.
_WARM_UP_SECONDS = 0.4


def _graph_of(run: Callable[[], object], seconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of many calls, and how many."""
    run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def capture(calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
        return graph

    probe = capture(3)
    probe.replay()
    calls = max(3, int(seconds * 1e6 / (_replay_us(probe) / 3)) + 1)
    return capture(calls), calls


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def sustained(runs: list[Callable[[], object]]) -> list[tuple[float, dict[str, int]]]:
    """Median microseconds of one call of each, and clock and power.

    Graphs are replayed by turns in changing order: what ran before leaves more or less power.
    """
    graphs = [_graph_of(run, _REPLAY_SECONDS) for run in runs]
    order = list(range(len(runs)))
    shuffle = random.Random(0).shuffle
    for index in order * math.ceil(_WARM_UP_SECONDS / _REPLAY_SECONDS / len(runs)):
        _replay_us(graphs[index][0])
    times: list[list[float]] = [[] for _ in runs]
    meters = [PowerMeter() for _ in runs]
    for _ in range(_REPLAYS):
        shuffle(order)
        for index in order:
            graph, calls = graphs[index]
            with meters[index]:
                times[index].append(_replay_us(graph) / calls)
    return [
        (statistics.median(mine), meter.result()) for mine, meter in zip(times, meters, strict=True)
    ]


def median_us(run: Callable[[], object], seconds: float = _REPLAY_SECONDS) -> float:
    """Sustained microseconds of one call in a CUDA graph of many: the median of seven replays.

    Args:
        run: what to time; it must be capturable.
        seconds: the least that a replay takes. A GPU that is limited by power needs many calls to
            settle.
    """
    graph, calls = _graph_of(run, seconds)
    _replay_us(graph)
    return statistics.median(_replay_us(graph) for _ in range(_REPLAYS)) / calls


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN fails every comparison."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def commit() -> str:
    """The commit of the code; the environment variable COMMIT names it where git cannot."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return (
        os.environ.get("COMMIT")
        or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    )


def machine_facts() -> dict[str, Any]:
    """What a result depends on beside the code: machine, clocks of this moment, versions."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "commit": commit(),
    }
    if not torch.cuda.is_available():
        return facts
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    clocks = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"gpu": torch.cuda.get_device_name(), query: clocks.splitlines()[0], **facts}
