"""Times on a GPU: CUDA graphs by turns, nothing warm in L2."""

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
from .base import Measurement, Meter, of_times
from .power import PowerMeter
from .profile import details_of

#: At the clock to which its power limit brings a busy GPU, and at that of one that was idle.
PROTOCOLS = ("sustained", "burst")
_REPLAYS, _QUICK_REPLAYS = 7, 3
_REPLAY_SECONDS, _QUICK_SECONDS = 0.04, 0.002
#: Of replays before those that count: until clocks have settled.
_WARM_UP_SECONDS = 0.4
_BURST_CALLS, _IDLE_SECONDS = 10, 0.5
#: Operands of one turn are this many times what L2 holds.
_CACHES = 3
_MOST_COPIES, _QUICK_COPIES = 64, 4
#: Share of the free memory that contenders fill; a graph keeps what its calls take.
_ROOM = 0.5
_COPY_ELEMENTS, _DENSE = 1 << 29, 8192


class GpuMeter(Meter):
    """Medians of replays of CUDA graphs of many calls.

    All contenders of a task replay by turns, in changing order: what ran before leaves more or less
    power. Calls go through as many sets of operands as L2 cannot hold.
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
        wanted = math.ceil(_CACHES * self._l2 / max(1.0, smallest))
        return min(_QUICK_COPIES if self.quick else _MOST_COPIES, max(1, wanted))

    def room(self) -> float:
        # What is kept for later graphs, and what others hold, is not free.
        gc.collect()
        torch.cuda.empty_cache()
        return _ROOM * torch.cuda.mem_get_info()[0]

    @contextlib.contextmanager
    def weighing(self) -> Iterator[list[float]]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found: list[float] = []
        yield found
        found.append(float(torch.cuda.max_memory_allocated() - before))

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        timers = [
            (_Graph if contender.capturable else _Eager)(mine, self._calls)
            for contender, mine in zip(contenders, runs, strict=True)
        ]
        times, meters = self._replay(timers)
        return [
            [
                of_times(mine, c.quantity, self._name(timer), **power.result()),
                *(details_of(run) if c.is_step else ()),
            ]
            for c, timer, mine, power, (run, *_) in zip(
                contenders, timers, times, meters, runs, strict=True
            )
        ]

    def ceilings(self) -> dict[str, float]:
        elements = _COPY_ELEMENTS >> (5 if self.quick else 0)
        size = _DENSE >> (2 if self.quick else 0)
        found: dict[str, float] = {}
        for name, (run, work) in (
            ("copy", _copy(elements)),
            ("bfloat16", _dense(size)),
            ("fp8", _dense_fp8(size)),
        ):
            times, _ = self._replay([_Graph([run], self._calls)])
            found[name] = round(work / sorted(times[0])[len(times[0]) // 2] * 1e-6, 4)
            torch.cuda.empty_cache()
        return found

    def _name(self, timer: "_Timer") -> str:
        return f"{self._protocol}, L2-cold{timer.suffix}{', quick' if self.quick else ''}"

    def _calls(self, one: float) -> int:
        if self._protocol == "burst":
            return _BURST_CALLS
        seconds = _QUICK_SECONDS if self.quick else _REPLAY_SECONDS
        return max(3, math.ceil(seconds / one))

    def _replay(self, timers: "Sequence[_Timer]") -> tuple[list[list[float]], list[PowerMeter]]:
        """Microseconds of a call, by timer and replay, and what the GPU drew."""
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
    """Runs calls of sets of operands in turn; ``calls_for`` of a call's seconds are a replay."""

    suffix = ""

    def __init__(self, runs: Sequence[Run], calls_for: Callable[[float], int]) -> None:
        for run in runs:
            run()
        torch.cuda.synchronize()
        self._runs = runs
        self._make(max(3, len(runs)))
        wanted = calls_for(self.microseconds() * 1e-6)
        # Whole cycles, so that each set is as cold as the others.
        self._make(math.ceil(wanted / len(runs)) * len(runs))

    def _cycle(self, calls: int) -> None:
        for run in itertools.islice(itertools.cycle(self._runs), calls):
            run()

    def _make(self, calls: int) -> None:
        self._count = calls

    def _go(self) -> None:
        self._cycle(self._count)

    def microseconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._go()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._count


class _Eager(_Timer):
    """For what cannot be captured; the host's time is in it where the GPU waits."""

    suffix = ", eager"


class _Graph(_Timer):
    def _make(self, calls: int) -> None:
        super()._make(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._cycle(calls)

    def _go(self) -> None:
        self._graph.replay()


def _copy(elements: int) -> tuple[Run, float]:
    """A kernel that reads and writes; ``copy_`` would become a slower memory copy in a graph."""
    source = torch.zeros(elements, dtype=torch.bfloat16, device="cuda")
    return functools.partial(torch.neg, source, out=torch.empty_like(source)), 4.0 * elements


def _dense(size: int) -> tuple[Run, float]:
    # Random numbers: constant ones draw less power and run faster.
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return functools.partial(torch.mm, a, b.t(), out=torch.empty_like(a)), 2.0 * size**3


def _dense_fp8(size: int) -> tuple[Run, float]:
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return functools.partial(torch._scaled_mm, a, b.t(), scale, scale, **options), 2.0 * size**3
