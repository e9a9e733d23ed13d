"""Times on a GPU: alternating CUDA graphs, with a cold L2."""

import contextlib
import functools
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cute_kernels.runtime.arch import device_architecture

from ..contender import Contender, Run
from .base import Measurement, Meter, time_measurement
from .power import PowerMeter
from .profile import step_details

#: ``sustained``: at the clock of a busy GPU at its power limit. ``burst``: at that of an idle one.
PROTOCOLS = ("sustained", "burst")
_REPLAYS, _QUICK_REPLAYS = 7, 3
_REPLAY_SECONDS, _QUICK_SECONDS = 0.04, 0.002
#: Duration of replays before those that count, until clocks have settled.
_WARM_UP_SECONDS = 0.4
_BURST_CALLS, _IDLE_SECONDS = 10, 0.5
#: Operands of one turn are this many times the size of L2.
_CACHES = 3
_MOST_COPIES, _QUICK_COPIES = 64, 4
#: Share of the free memory that contenders fill; a graph holds the memory of its calls.
_MEMORY_SHARE = 0.5
_COPY_ELEMENTS, _DENSE = 1 << 29, 8192


class GpuMeter(Meter):
    """Measures medians of replays of CUDA graphs of many calls.

    All contenders of a task alternate, in changing order, since the previous kernel decides
    how much power is left. Calls go through more sets of operands than L2 can hold.
    """

    kind = "gpu"
    backend = "cuda"

    def __init__(self, protocol: str = "sustained", quick: bool = False) -> None:
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.arch = device_architecture(self.device).name
        self.quick = quick
        self._protocol = protocol
        self._l2 = torch.cuda.get_device_properties(self.device).L2_cache_size

    def copies(self, smallest: float) -> int:
        """Return how many sets of operands of ``smallest`` bytes exceed L2."""
        wanted = math.ceil(_CACHES * self._l2 / max(1.0, smallest))
        return min(_QUICK_COPIES if self.quick else _MOST_COPIES, max(1, wanted))

    def free_memory(self) -> float:
        """Return the bytes that contenders of a batch may take together."""
        # Release memory that the allocator holds for later graphs.
        gc.collect()
        torch.cuda.empty_cache()
        return _MEMORY_SHARE * torch.cuda.mem_get_info()[0]

    @contextlib.contextmanager
    def peak_memory(self) -> Iterator[list[float]]:
        """Yield a list, which gets the peak bytes that the block allocated when it ends."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peak: list[float] = []
        yield peak
        peak.append(float(torch.cuda.max_memory_allocated() - before))

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        """Measure the median time of each contender, and of steps also eager time and memory."""
        timers = [
            (_Graph if contender.capturable else _Eager)(copies, self._calls)
            for contender, copies in zip(contenders, runs, strict=True)
        ]
        times, meters = self._replay(timers)
        return [
            [
                time_measurement(samples, c.quantity, self._name(timer), **power.result()),
                *(step_details(run) if c.is_step else ()),
            ]
            for c, timer, samples, power, (run, *_) in zip(
                contenders, timers, times, meters, runs, strict=True
            )
        ]

    def ceilings(self) -> dict[str, float]:
        """Measure the rates of a copy kernel and of dense products."""
        elements = _COPY_ELEMENTS >> (5 if self.quick else 0)
        size = _DENSE >> (2 if self.quick else 0)
        rates: dict[str, float] = {}
        for name, (run, work) in (
            ("copy", _copy(elements)),
            ("bfloat16", _dense(size)),
            ("fp8", _dense_fp8(size)),
        ):
            times, _ = self._replay([_Graph([run], self._calls)])
            rates[name] = round(work / sorted(times[0])[len(times[0]) // 2] * 1e-6, 4)
            torch.cuda.empty_cache()
        return rates

    def _name(self, timer: "_Timer") -> str:
        """Return the protocol of a timer, as in ``Record``."""
        return f"{self._protocol}, L2-cold{timer.suffix}{', quick' if self.quick else ''}"

    def _calls(self, call_seconds: float) -> int:
        """Return the number of calls of a replay."""
        if self._protocol == "burst":
            return _BURST_CALLS
        seconds = _QUICK_SECONDS if self.quick else _REPLAY_SECONDS
        return max(3, math.ceil(seconds / call_seconds))

    def _replay(self, timers: "Sequence[_Timer]") -> tuple[list[list[float]], list[PowerMeter]]:
        """Return the microseconds of a call by timer and replay, and clock and power by timer."""
        order = list(range(len(timers)))
        shuffle = random.Random(0).shuffle
        is_burst = self._protocol == "burst"
        if not is_burst:
            seconds = _QUICK_SECONDS if self.quick else _WARM_UP_SECONDS
            for index in order * math.ceil(seconds / _REPLAY_SECONDS / len(timers)):
                timers[index].microseconds()
        times: list[list[float]] = [[] for _ in timers]
        meters = [PowerMeter() for _ in timers]
        for _ in range(_QUICK_REPLAYS if self.quick else _REPLAYS):
            shuffle(order)
            for index in order:
                if is_burst:
                    torch.cuda.synchronize()
                    time.sleep(_IDLE_SECONDS)
                with meters[index]:
                    times[index].append(timers[index].microseconds())
        return times, meters


class _Timer:
    """Timer of calls that loop over sets of operands.

    Args:
        runs: A call per set of operands.
        calls_for: Returns the number of calls of a replay from the seconds of a call.
    """

    suffix = ""

    def __init__(self, runs: Sequence[Run], calls_for: Callable[[float], int]) -> None:
        for run in runs:
            run()
        torch.cuda.synchronize()
        self._runs = runs
        self._prepare_replay(max(3, len(runs)))
        wanted = calls_for(self.microseconds() * 1e-6)
        # Full cycles keep all sets equally cold.
        self._prepare_replay(math.ceil(wanted / len(runs)) * len(runs))

    def _cycle(self, calls: int) -> None:
        for run in itertools.islice(itertools.cycle(self._runs), calls):
            run()

    def _prepare_replay(self, calls: int) -> None:
        self._count = calls

    def _replay(self) -> None:
        self._cycle(self._count)

    def microseconds(self) -> float:
        """Replay, and return the time of a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._count


class _Eager(_Timer):
    """Times calls that cannot be captured, including the time for which the GPU waits."""

    suffix = ", eager"


class _Graph(_Timer):
    """Times replays of a CUDA graph."""

    def _prepare_replay(self, calls: int) -> None:
        """Capture a graph of so many calls."""
        super()._prepare_replay(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._cycle(calls)

    def _replay(self) -> None:
        self._graph.replay()


def _copy(elements: int) -> tuple[Run, float]:
    """Return a kernel that reads and writes, and its bytes.

    In a graph ``copy_`` would become a slower memory copy.
    """
    source = torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
    return functools.partial(torch.neg, source, out=torch.empty_like(source)), 4.0 * elements


def _dense(size: int) -> tuple[Run, float]:
    """Return a dense bf16 product, and its operations."""
    # Constant operands would draw less power and run faster.
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return functools.partial(torch.mm, a, b.t(), out=torch.empty_like(a)), 2.0 * size**3


def _dense_fp8(size: int) -> tuple[Run, float]:
    """Return a dense FP8 product, and its operations."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return functools.partial(torch._scaled_mm, a, b.t(), scale, scale, **options), 2.0 * size**3
