"""Memory of a training step of a mixture of experts, in each recipe."""

import dataclasses
import functools
from collections.abc import Iterator

import torch

from ..contender import Contender, Run, Task, always, unchecked
from ..measure.base import Measurement, Meter
from ..measure.memory import Sizes, bytes_of_step
from .base import Options, Suite
from .layer import PASSES, recipes
from .moe import SLICES, TINY, MoEShape

_TOKENS = 4096
#: Recipes that are also measured where the backward pass makes the first product again.
RECOMPUTED = ("BF16", "FP8Block")


class _MemoryMeter(Meter):
    """Adds up storages of fake tensors; on a GPU the peak is the allocator's."""

    def __init__(self, backend: str, quick: bool) -> None:
        is_gpu = torch.cuda.is_available() and backend in ("", "cuda")
        self.kind = "gpu" if is_gpu else "cpu"
        self.device = torch.device("cuda" if is_gpu else "cpu")
        self.backend = "cuda" if is_gpu else "reference"
        self.arch = self.backend
        self.quick = quick

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        protocol = "allocated" if self.kind == "gpu" else "fake tensors"
        return [
            Measurement(name, n, "byte", protocol, 0.0, 1) for name, n in self.call(run).items()
        ]


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    for model in ("tiny",) if options.quick else SLICES:
        shape = TINY if options.quick else MoEShape.of(model)
        sizes = Sizes(shape.experts, shape.hidden, shape.intermediate, _TOKENS, shape.top_k)
        case = {"layer": "moe", "model": model, **dataclasses.asdict(sizes), "pass": PASSES[1]}
        found = [
            unchecked(
                "ours" + ", recompute" * again,
                name,
                functools.partial(bytes_of_step, recipe, sizes, meter.device.type, again),
            )
            for name, recipe in recipes().items()
            for again in (False, True)[: 1 + (name in RECOMPUTED)]
        ]
        yield Task("memory", case, always(found))


def _meters(options: Options) -> list[Meter]:
    return [_MemoryMeter(options.backend, options.quick)]


SUITE = Suite(_tasks, _meters)
