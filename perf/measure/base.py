"""Base class of meters."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import cute_kernels

from ..contender import Contender, Run
from ..environment import environment


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Fields of ``Record`` that a meter measures."""

    quantity: str
    value: float
    unit: str
    protocol: str
    spread: float | None = None
    repeats: int | None = None
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    power: Mapping[str, float] = dataclasses.field(default_factory=dict)


def spread_of(values: Sequence[float]) -> float:
    """Return the largest minus the smallest value."""
    return max(values) - min(values)


def time_measurement(
    times: Sequence[float], quantity: str, protocol: str, **fields: Any
) -> Measurement:
    """Return the median of repeated times in microseconds, with more ``fields``."""
    return Measurement(
        quantity=quantity,
        value=round(statistics.median(times), 2),
        unit="us",
        protocol=protocol,
        spread=round(spread_of(times), 2),
        repeats=len(times),
        **fields,
    )


class Meter:
    """Base class of meters, which measure contenders.

    Attributes:
        kind: One of ``records.KINDS``.
        backend: Backend of this package's contenders.
        device: Device of the operands.
        arch: Architecture of the kernels, as ``cute_kernels.support`` takes it.
        quick: True for a run that only checks that everything runs.
    """

    kind: str
    backend: str
    device: torch.device
    arch: str
    quick: bool = False

    def active(self) -> AbstractContextManager[None]:
        """Return the context in which contenders are called; operands are made outside of it."""
        return cute_kernels.backend(self.backend)

    def call(self, run: Run) -> Any:
        """Call once and return the result, which is checked before anything is measured."""
        with self.active():
            return run()

    def copies(self, smallest: float) -> int:
        """Return how many sets of operands of ``smallest`` bytes exceed the cache."""
        return 1

    def ceilings(self) -> dict[str, float]:
        """Measure the rates that nothing exceeds, see ``Record.ceilings``."""
        return {}

    def free_memory(self) -> float:
        """Return the bytes that contenders of a batch may take together."""
        return math.inf

    @contextlib.contextmanager
    def peak_memory(self) -> Iterator[list[float]]:
        """Yield a list, which gets the peak bytes that the block took when it ends."""
        yield [0.0]

    def environment(self) -> dict[str, Any]:
        """Return the fields of ``Record`` about machine and versions."""
        return environment(self.kind)

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        """Measure contenders together.

        Args:
            contenders: The contenders.
            runs: The calls of each contender, one per set of operands.

        Returns:
            The measurements of each contender.
        """
        return [
            self.measure_one(contender, run)
            for contender, (run, *_) in zip(contenders, runs, strict=True)
        ]

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """Measure one contender, for meters that measure them one by one."""
        raise NotImplementedError
