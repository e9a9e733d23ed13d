"""Times of kernels: a few coefficients, fitted to records.

  time = launches * launch + (memory^q + core^q)^(1/q)
  core = multiply * products + decode * instructions + fill * waves

``memory`` is what the bytes take at the rate of a copy, ``products`` what the operations take at
that of a large dense product, ``instructions`` at the rate of issue, each times a coefficient; q
says how well they overlap (1: not at all). So a coefficient is near 1, whatever the GPU. Each has
a value that is assumed, from which records pull it away: one that no record knows keeps it.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .gpus import Gpu
from .work import Kernel

#: What is assumed, by the beginning of a coefficient's name, the longest first. ``launch`` and
#: ``fill`` are microseconds, ``decode`` instructions an element, ``overlap`` is q - 1.
_ASSUMED = {
    "memory": 1.05,
    "memory elementwise": 1.2,
    "multiply": 1.05,
    "multiply fp8, fp8": 1.18,  # Of torch's products, with scales of rows.
    "multiply fp8, fp8_block": 1.09,  # Of DeepGEMM's.
    "decode": 2.5,
    "instruction": 0.7,  # An instruction of PTX; most hide behind memory.
    "fill": 1.5,
    "launch": 2.0,
    "launch quantize": 6.0,
    "overlap": 2.0,
}
#: Standard deviation of the logarithm of a coefficient around that, and its weight beside a record.
_DOUBT, _PRIOR = 0.25, 0.5
#: Beyond this a relative error counts linearly: some records are of kernels that have gone.
_OUTLIER = 0.05
_STEPS = 200
_TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class Observation:
    """A time, and the kernels that took it one after the other."""

    kernels: Sequence[Kernel]
    microseconds: float
    gpu: Gpu
    suite: str


def _assumed(name: str) -> float:
    return _ASSUMED[max((key for key in _ASSUMED if name.startswith(key)), key=len)]


def _names(kernel: Kernel) -> tuple[str, ...]:
    """Coefficients of a kernel, in the order of ``_times``; empty where it needs none."""
    kind, fill = kernel.kind, f"fill {kernel.kind}" * (kernel.waves > 0)
    named = (f"launch {kind}", f"memory {kind}", f"overlap {kind}")
    return (*named, kernel.multiply, kernel.decode, fill)


def _units(kernel: Kernel, gpu: Gpu, where: float = 0.0) -> tuple[float, ...]:
    """Launches; microseconds of memory, products and instructions at the GPU's rates; waves."""
    dense = gpu.dense[kernel.multiplied].at(where) * 1e6 if kernel.multiplied else 1.0
    rest = (kernel.flops / dense, kernel.instructions / gpu.issue * 1e6, kernel.waves)
    return (kernel.launches, kernel.bytes / gpu.copy.at(where) * 1e-6, *rest)


def _times(units: Tensor, values: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Microseconds of kernels, and their parts, of (5, kernels) units and (6, kernels) values."""
    launch, memory, overlap, *core = values
    parts = [u * c for u, c in zip(units, (launch, memory, *core), strict=True)]
    q = 1 + overlap
    core = parts[2] + parts[3] + parts[4]
    slower: Tensor = parts[1].clamp_min(_TINY) ** q + core.clamp_min(_TINY) ** q
    return parts[0] + slower ** (1 / q), parts


class _Problem:
    def __init__(self, observed: Sequence[Observation]) -> None:
        kernels = [(kernel, o.gpu) for o in observed for kernel in o.kernels]
        names = [_names(kernel) for kernel, _ in kernels]
        self.names = sorted({name for each in names for name in each if name})
        index = {name: i for i, name in enumerate([*self.names, ""])}
        self._of = torch.tensor([[index[name] for name in each] for each in names]).T
        self._units = torch.tensor([_units(*each) for each in kernels], dtype=torch.float64).T
        owner = [i for i, o in enumerate(observed) for _ in o.kernels]
        self._owner = torch.tensor(owner)
        self._wanted = torch.tensor([o.microseconds for o in observed], dtype=torch.float64)

    def errors(self, logs: Tensor) -> Tensor:
        times, _ = _times(self._units, torch.cat([logs.exp(), logs.new_zeros(1)])[self._of])
        sums = torch.zeros_like(self._wanted).index_add(0, self._owner, times)
        return (sums / self._wanted).log()


@dataclasses.dataclass(frozen=True)
class Model:
    """Coefficients that our kernels were seen with, of ``count`` observations.

    ``error`` is the median relative error of what was held out, ``spread`` what 9 in 10 are below.
    """

    values: Mapping[str, float]
    count: int
    error: float
    spread: float

    def is_known(self, kernel: Kernel) -> bool:
        return all(name in self.values for name in _names(kernel) if name)

    def _value(self, name: str, where: float) -> float:
        if not name:
            return 0.0
        value = self.values.get(name) or _assumed(name)
        is_sure = name in self.values or name.startswith("overlap")
        return value if is_sure else value * math.exp(-where * _DOUBT)

    def time(self, kernel: Kernel, gpu: Gpu, where: float = 0.0) -> tuple[float, dict[str, float]]:
        """Microseconds of a kernel, and by what they are bounded: the largest of the second.

        ``where`` is -1 for the slow end of what is not known, 1 for the fast one.
        """
        units = torch.tensor([_units(kernel, gpu, where)], dtype=torch.float64).T
        values = [[self._value(name, where)] for name in _names(kernel)]
        total, found = _times(units, torch.tensor(values, dtype=torch.float64))
        launch, memory, multiply, decode, fill = (float(part) for part in found)
        by = {"launch": launch, "memory": memory, "issue rate": decode}
        # Where tiles are full, at the clock of the data sheet they would take less.
        is_full = kernel.useful > kernel.flops / 2
        if is_full and kernel.flops / gpu.peak[kernel.multiplied] * 1e-6 < multiply:
            return float(total), by | {"power": multiply, "tensor core": fill}
        return float(total), by | {"tensor core": multiply + fill}

    def range(self, kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
        """Between what its time is expected: by what is not known, and by the model's error."""
        middle, _ = self.time(kernel, gpu)
        doubts = math.log1p(self.spread), math.log1p(gpu.doubt)
        low, high = (
            math.hypot(math.log(self.time(kernel, gpu, where)[0] / middle), *doubts)
            for where in (1.0, -1.0)
        )
        return middle * math.exp(-low), middle * math.exp(high)


def _solve(observed: Sequence[Observation]) -> dict[str, float]:
    problem = _Problem(observed)
    start = torch.tensor([_assumed(name) for name in problem.names]).double().log()
    moved = torch.zeros_like(start, requires_grad=True)
    solver = torch.optim.LBFGS([moved], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = problem.errors(start + moved) / _OUTLIER
        total = torch.nn.functional.huber_loss(found, torch.zeros_like(found), reduction="sum")
        value: Tensor = total + _PRIOR * (moved / _DOUBT).square().sum()
        value.backward()
        return value

    solver.step(loss)
    return dict(zip(problem.names, (start + moved.detach()).exp().tolist(), strict=True))


def errors(values: Mapping[str, float], observed: Sequence[Observation]) -> list[float]:
    problem = _Problem(observed)
    known = [values.get(name) or _assumed(name) for name in problem.names]
    return problem.errors(torch.tensor(known).double().log()).tolist()


def fit(ours: Sequence[Observation]) -> Model:
    """The model of records, and its error where it has not seen them.

    The error is that of each half of ``ours``, every other one, by the coefficients of the other.
    """
    halves = ours[::2], ours[1::2]
    found = [*errors(_solve(halves[0]), halves[1]), *errors(_solve(halves[1]), halves[0])]
    unseen = [abs(error) for error in found]
    return Model(
        _solve(ours), len(ours), statistics.median(unseen), statistics.quantiles(unseen, n=10)[-1]
    )
