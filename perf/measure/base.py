"""What all meters are."""

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
    """The fields of ``Record`` that a meter finds."""

    quantity: str
    value: float
    unit: str
    protocol: str
    spread: float | None = None
    repeats: int | None = None
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    power: Mapping[str, float] = dataclasses.field(default_factory=dict)


def spread_of(values: Sequence[float]) -> float:
    return max(values) - min(values)


def of_times(times: Sequence[float], quantity: str, protocol: str, **more: Any) -> Measurement:
    rounded = (round(statistics.median(times), 2), round(spread_of(times), 2))
    return Measurement(quantity, rounded[0], "us", protocol, rounded[1], len(times), **more)


class Meter:
    """Measures contenders.

    Attributes:
        kind: one of ``records.KINDS``.
        backend: what the contenders of this package run on.
        device: where operands lie.
        arch: whose kernels run, as ``cute_kernels.support`` takes it.
        quick: whether this run is to see that everything runs.
    """

    kind: str
    backend: str
    device: torch.device
    arch: str
    quick: bool = False

    def active(self) -> AbstractContextManager[None]:
        """What calls of contenders happen in; operands are made outside of it."""
        return cute_kernels.backend(self.backend)

    def call(self, run: Run) -> Any:
        """What one call returns, to be checked before it is measured."""
        with self.active():
            return run()

    def copies(self, smallest: float) -> int:
        """How many sets of operands of ``smallest`` bytes a cache must not hold."""
        return 1

    def ceilings(self) -> dict[str, float]:
        """Rates that nothing exceeds, measured now; see ``Record.ceilings``."""
        return {}

    def room(self) -> float:
        """Bytes that contenders of a task may take together; those that do not fit wait."""
        return math.inf

    @contextlib.contextmanager
    def weighing(self) -> Iterator[list[float]]:
        """Gives a list, and adds to it the bytes that what happens inside takes at most."""
        yield [0.0]

    def environment(self) -> dict[str, Any]:
        return environment(self.kind)

    def measure(
        self, contenders: Sequence[Contender], runs: Sequence[Sequence[Run]]
    ) -> list[list[Measurement]]:
        """What is found of contenders, measured together, by calls of each for each set of
        operands.
        """
        return [self.measure_one(one, run) for one, (run, *_) in zip(contenders, runs, strict=True)]

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """What is found of one, where they are not measured together."""
        raise NotImplementedError
