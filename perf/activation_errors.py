"""Errors of the exponential, the tangent and the sigmoid of the reference, in ulp of fp32.

    OMP_NUM_THREADS=1 python -m perf.activation_errors [--every 64] [--start 0]

Goes through the bits of all fp32 numbers, every ``--every``-th of them (1 for all 2^32: about half
an hour on a core), and through all bf16 and fp16 numbers, against long double. Prints the largest
error of each function and where it is. The sigmoid is within its bound above -87; below, e^-x is
near its overflow, so that results are subnormal or 0.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cute_kernels.reference.activations import exp, sigmoid, tanh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Extended: TypeAlias = np.ndarray[Any, Any]

#: The function, the true one, and the lowest argument that counts.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Extended], Extended], float]] = {
    "exp": (exp, np.exp, -np.inf),
    "tanh": (tanh, np.tanh, -np.inf),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + np.exp(-x)), -87.0),
}
_CHUNK = 1 << 22
#: From here on, fp32 rounds to infinity.
_OVERFLOW = 2.0**128 - 2.0**103


def largest_error(name: str, x: Tensor) -> tuple[float, float]:
    """The largest error in ulp of finite ``x``, and where it is."""
    function, true, lowest = FUNCTIONS[name]
    x = x[x.isfinite() & (x > lowest)]
    if not x.numel():
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        want = true(x.numpy().astype(np.longdouble))
        got = function(x).numpy().astype(np.longdouble)
        _, exponent = np.frexp(want)
        ulp = np.ldexp(np.ones_like(want), np.maximum(exponent - 24, -149))
        error = np.where((want >= _OVERFLOW) & np.isinf(got), 0.0, np.abs(got - want) / ulp)
    at = int(error.argmax())
    return float(error[at]), x[at].item()


def patterns(every: int, start: int) -> Iterator[Tensor]:
    """Every ``every``-th fp32 number in the order of their bits, in parts."""
    step = _CHUNK * every
    for first in range(-(1 << 31) + start, 1 << 31, step):
        bits = torch.arange(first, min(first + step, 1 << 31), every, dtype=torch.int64)
        yield bits.to(torch.int32).view(torch.float32)


def main() -> None:
    """Print the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=64, help="how many bit patterns to go on by")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    options = parser.parse_args()
    short = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    parts: dict[str, Callable[[], Iterator[Tensor]]] = {
        "bf16": lambda: iter([short.view(torch.bfloat16).float()]),
        "fp16": lambda: iter([short.view(torch.float16).float()]),
        f"fp32, every {options.every}": lambda: patterns(options.every, options.start),
    }
    for name in FUNCTIONS:
        for title, make in parts.items():
            error, at = max(largest_error(name, x) for x in make())
            print(f"{name} of {title}: {error:.4f} ulp at {at!r}", flush=True)


if __name__ == "__main__":
    main()
