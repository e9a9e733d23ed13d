"""Times of kernels, by a few coefficients that are fitted to records.

::

    time = launches * launch + ((memory * bytes)^q + core^q)^(1/q)
    core = multiply * products + decode * instructions + fill * waves

The times ``bytes``, ``products`` and ``instructions`` are at the rate of a copy, of a large dense
product and of instruction issue. So most coefficients are near 1 on every GPU. The exponent q says
how well memory and core overlap (1: not at all). Every coefficient has an assumed value, from which
records pull it away. Without a record it keeps that value.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .gpus import Gpu
from .work import Kernel

#: Assumed values, by the longest beginning of a coefficient's name. ``launch`` and ``fill`` are
#: microseconds, ``decode`` is instructions per element, ``overlap`` is q - 1.
_ASSUMED = {
    "memory": 1.05,
    "memory elementwise": 1.2,
    "multiply": 1.05,
    "multiply fp8, fp8": 1.18,  # torch's products with one scale per row
    "multiply fp8, fp8_block": 1.09,  # DeepGEMM's products
    "decode": 2.5,
    "instruction": 0.7,  # a PTX instruction; most overlap with memory accesses
    "fill": 1.5,
    "launch": 2.0,
    "launch quantize": 6.0,
    "overlap": 2.0,
}
#: Standard deviation of the logarithm of a coefficient around the assumed one, and the weight of
#: that assumption relative to a record.
_DOUBT, _PRIOR = 0.25, 0.5
#: A relative error beyond this counts linearly: some records are of kernels that no longer exist.
_OUTLIER = 0.05
_STEPS = 200
_TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class Observation:
    """A measured time, and the kernels that ran one after the other in it."""

    kernels: Sequence[Kernel]
    microseconds: float
    gpu: Gpu
    suite: str


def _assumed(name: str) -> float:
    return _ASSUMED[max((key for key in _ASSUMED if name.startswith(key)), key=len)]


def _names(kernel: Kernel) -> tuple[str, ...]:
    """Return the coefficients of a kernel in the order of ``_times``; ``""`` for an unused one."""
    kind = kernel.kind
    return (
        f"launch {kind}",
        f"memory {kind}",
        f"overlap {kind}",
        kernel.multiply,
        kernel.decode,
        f"fill {kind}" if kernel.waves > 0 else "",
    )


def _units(kernel: Kernel, gpu: Gpu, position: float = 0.0) -> tuple[float, ...]:
    """Return launches; microseconds of memory, products and instructions at full rate; waves."""
    dense = gpu.dense[kernel.mma_type].interpolate(position) * 1e6 if kernel.mma_type else 1.0
    return (
        kernel.launches,
        kernel.bytes / gpu.copy.interpolate(position) * 1e-6,
        kernel.flops / dense,
        kernel.instructions / gpu.issue * 1e6,
        kernel.waves,
    )


def _times(units: Tensor, values: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the microseconds of kernels, and their terms.

    Args:
        units: (5, kernels), see ``_units``.
        values: (6, kernels) coefficients, in the order of ``_names``.
    """
    launch, memory, overlap, multiply, decode, fill = values
    coefficients = (launch, memory, multiply, decode, fill)
    terms = [unit * value for unit, value in zip(units, coefficients, strict=True)]
    q = 1 + overlap
    core = terms[2] + terms[3] + terms[4]
    power_sum: Tensor = terms[1].clamp_min(_TINY) ** q + core.clamp_min(_TINY) ** q
    return terms[0] + power_sum ** (1 / q), terms


class _Problem:
    """Errors of observations as a function of the logarithms of the coefficients ``names``."""

    def __init__(self, observed: Sequence[Observation]) -> None:
        kernels = [(kernel, o.gpu) for o in observed for kernel in o.kernels]
        names = [_names(kernel) for kernel, _ in kernels]
        self.names = sorted({name for row in names for name in row if name})
        index = {name: i for i, name in enumerate([*self.names, ""])}
        self._coefficients = torch.tensor([[index[name] for name in row] for row in names]).T
        self._units = torch.tensor([_units(*pair) for pair in kernels], dtype=torch.float64).T
        owner = [i for i, o in enumerate(observed) for _ in o.kernels]
        self._owner = torch.tensor(owner)
        self._measured = torch.tensor([o.microseconds for o in observed], dtype=torch.float64)

    def errors(self, logs: Tensor) -> Tensor:
        """Return the logarithms of predicted over measured times."""
        values = torch.cat([logs.exp(), logs.new_zeros(1)])
        times, _ = _times(self._units, values[self._coefficients])
        sums = torch.zeros_like(self._measured).index_add(0, self._owner, times)
        return (sums / self._measured).log()


@dataclasses.dataclass(frozen=True)
class Model:
    """Fitted coefficients of the kernels of this package.

    Attributes:
        values: Coefficients by name.
        count: Number of observations.
        error: Median relative error of held-out observations.
        spread: Relative error that nine in ten of the held-out observations stay below.
    """

    values: Mapping[str, float]
    count: int
    error: float
    spread: float

    def is_known(self, kernel: Kernel) -> bool:
        """Return True if all coefficients of a kernel are fitted."""
        return all(name in self.values for name in _names(kernel) if name)

    def _value(self, name: str, position: float) -> float:
        """Return a coefficient; an assumed one is shifted by its doubt towards ``position``."""
        if not name:
            return 0.0
        value = self.values.get(name) or _assumed(name)
        is_sure = name in self.values or name.startswith("overlap")
        return value if is_sure else value * math.exp(-position * _DOUBT)

    def time(
        self, kernel: Kernel, gpu: Gpu, position: float = 0.0
    ) -> tuple[float, dict[str, float]]:
        """Return the microseconds of a kernel, and the terms that may bound it.

        Args:
            kernel: The kernel.
            gpu: The GPU.
            position: -1 for the slow end of the unknown rates and coefficients, 1 for the fast end.

        Returns:
            The time, and its terms by name. The largest term is the bound.
        """
        units = torch.tensor([_units(kernel, gpu, position)], dtype=torch.float64).T
        values = [[self._value(name, position)] for name in _names(kernel)]
        total, terms = _times(units, torch.tensor(values, dtype=torch.float64))
        launch, memory, multiply, decode, fill = (float(term) for term in terms)
        bounds = {"launch": launch, "memory": memory, "issue rate": decode}
        # Full tiles would take less time at the clock of the data sheet: power is the bound.
        is_full = kernel.useful > kernel.flops / 2
        if is_full and kernel.flops / gpu.peak[kernel.mma_type] * 1e-6 < multiply:
            return float(total), bounds | {"power": multiply, "tensor core": fill}
        return float(total), bounds | {"tensor core": multiply + fill}

    def range(self, kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
        """Return the bounds of a kernel's time, from unknown rates and the error of the model."""
        middle, _ = self.time(kernel, gpu)
        doubts = math.log1p(self.spread), math.log1p(gpu.doubt)
        low, high = (
            math.hypot(math.log(self.time(kernel, gpu, position)[0] / middle), *doubts)
            for position in (1.0, -1.0)
        )
        return middle * math.exp(-low), middle * math.exp(high)


def _solve(observed: Sequence[Observation]) -> dict[str, float]:
    """Return the coefficients that fit observations best, pulled towards the assumed ones."""
    problem = _Problem(observed)
    start = torch.tensor([_assumed(name) for name in problem.names]).double().log()
    shift = torch.zeros_like(start, requires_grad=True)
    solver = torch.optim.LBFGS([shift], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        """Return the Huber loss of the errors plus the penalty of shifts."""
        solver.zero_grad()
        scaled = problem.errors(start + shift) / _OUTLIER
        total = torch.nn.functional.huber_loss(scaled, torch.zeros_like(scaled), reduction="sum")
        value: Tensor = total + _PRIOR * (shift / _DOUBT).square().sum()
        value.backward()
        return value

    solver.step(loss)
    return dict(zip(problem.names, (start + shift.detach()).exp().tolist(), strict=True))


def errors(values: Mapping[str, float], observed: Sequence[Observation]) -> list[float]:
    """Return the logarithms of predicted over measured times of observations."""
    problem = _Problem(observed)
    coefficients = [values.get(name) or _assumed(name) for name in problem.names]
    return problem.errors(torch.tensor(coefficients).double().log()).tolist()


def fit(ours: Sequence[Observation]) -> Model:
    """Return the model of observations, and its error on held-out ones.

    For the error, each half (every other observation) is predicted by the coefficients of the
    other.
    """
    even, odd = ours[::2], ours[1::2]
    unseen = [abs(e) for e in (*errors(_solve(even), odd), *errors(_solve(odd), even))]
    return Model(
        values=_solve(ours),
        count=len(ours),
        error=statistics.median(unseen),
        spread=statistics.quantiles(unseen, n=10)[-1],
    )
