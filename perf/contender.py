"""What a suite hands to a meter: a task, and who competes in it."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

#: What does a task once; and what makes operands of its own and gives that.
Run = Callable[[], Any]
Prepare = Callable[[], Run]


@dataclasses.dataclass
class Contender:
    """One way to do a task; what is not said here is as in ``Record``.

    Attributes:
        prepare: may raise whatever its library raises: that is reported, and nobody else is
            disturbed.
        error: relative error of what a call returned; NaN is as wrong as anything.
        bound: the largest error that is right.
        capturable: whether it can be captured in a CUDA graph.
        is_step: whether it is a whole pass of a layer, of which eager time and memory are kept
            beside the time.
        versions: of the contender's packages; those of a peer ``Options.competing`` adds.
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
        return self.name.startswith("ours")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.format, self.quantity


def unchecked(name: str, text: str, run: Run, quantity: str = "time") -> Contender:
    """One of whose result nothing is to be checked: it is measured for something else."""
    return Contender(name, text, lambda: run, lambda got: 0.0, quantity=quantity)


def always(found: list[Contender]) -> Callable[[int], list[Contender]]:
    """Contenders of a task whose operands no cache holds."""
    return lambda copy: found


@dataclasses.dataclass
class Task:
    """One case of a ``Record``, and who can do it.

    ``contenders`` gives those who compete, on operands that the number tells apart: 0, 1, ... as
    many as a cache must not hold.
    """

    suite: str
    case: dict[str, Any]
    contenders: Callable[[int], list[Contender]]

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.case.items())
        return f"{self.suite} {facts}"

    def matches(self, pattern: str) -> bool:
        return re.search(pattern, str(self)) is not None


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; 0 where both are nothing."""
    norm = float(want.float().norm())
    difference = float((got.float() - want.float()).norm())
    return difference / norm if norm else difference
