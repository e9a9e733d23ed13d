"""Tasks and contenders, which suites hand to meters."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

#: Does a task once.
Run = Callable[[], Any]
#: Makes operands of its own, and returns a call that uses them.
Prepare = Callable[[], Run]


@dataclasses.dataclass
class Contender:
    """One implementation of a task. Other fields are as in ``Record``.

    Attributes:
        prepare: Makes operands and returns the call. It may raise anything that its library raises.
            The exception is reported, and other contenders go on.
        error: Returns the relative error of a result. NaN counts as wrong.
        bound: Largest relative error of a correct result.
        capturable: True if the call can be captured in a CUDA graph.
        is_step: True for a whole pass of a layer, whose eager time and memory are also measured.
        versions: Versions of the contender's packages. ``Options.competing`` adds those of a peer.
    """

    name: str
    format: str
    prepare: Prepare
    error: Callable[[Any], float]
    bound: float = 0.0
    bytes: float | None = None
    flops: float | None = None
    quantity: str = "time"
    capturable: bool = True
    is_step: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} [{self.format}]"

    @property
    def is_ours(self) -> bool:
        """True for a contender of this package."""
        return self.name.startswith("ours")

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity among the contenders of a task."""
        return self.name, self.format, self.quantity


def unchecked(name: str, text: str, run: Run, quantity: str = "time") -> Contender:
    """Return a contender whose result is not checked."""
    return Contender(name, text, lambda: run, lambda result: 0.0, quantity=quantity)


def same_for_all_copies(contenders: list[Contender]) -> Callable[[int], list[Contender]]:
    """Return the ``contenders`` of a task whose operands need no copies against a cache."""
    return lambda copy: contenders


@dataclasses.dataclass
class Task:
    """One case of a suite, and its contenders.

    Attributes:
        suite: Name of the suite.
        case: Field ``case`` of the records.
        contenders: Returns the contenders on one set of operands. Its argument is the number of
            the set: 0, 1, ..., as many as a cache must not hold.
    """

    suite: str
    case: dict[str, Any]
    contenders: Callable[[int], list[Contender]]

    def __str__(self) -> str:
        case = " ".join(f"{name}={value}" for name, value in self.case.items())
        return f"{self.suite} {case}"

    def matches(self, pattern: str) -> bool:
        """Return True if a regular expression matches in the text of the task."""
        return re.search(pattern, str(self)) is not None


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``, or 0 if both are 0."""
    norm = float(expected.float().norm())
    difference = float((actual.float() - expected.float()).norm())
    return difference / norm if norm else difference
