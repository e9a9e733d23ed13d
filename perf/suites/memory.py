"""Memory of a training step of a mixture of experts, in each recipe."""

import dataclasses
import functools
from collections.abc import Iterator

import torch

from ..contender import Contender, Run, Task, same_for_all_copies, unchecked
from ..measure.base import Measurement, Meter
from ..measure.memory import Sizes, bytes_of_step
from .base import Options, Suite
from .layer import PASSES, recipes
from .moe import SLICES, TINY, MoEShape

_TOKENS = 4096
#: Recipes that are also measured with ``recompute``.
RECOMPUTED = ("BF16", "FP8Block")


class _MemoryMeter(Meter):
    """Adds up storages of fake tensors; on a GPU the peak is that of the allocator."""

    def __init__(self, backend: str, quick: bool) -> None:
        is_gpu = torch.cuda.is_available() and backend in ("", "cuda")
        self.kind = "gpu" if is_gpu else "cpu"
        self.device = torch.device("cuda" if is_gpu else "cpu")
        self.backend = "cuda" if is_gpu else "reference"
        self.arch = self.backend
        self.quick = quick

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """Run a step and return the bytes of its saved tensors and its peak."""
        protocol = "allocated" if self.kind == "gpu" else "fake tensors"
        return [
            Measurement(name, n, "byte", protocol, 0.0, 1) for name, n in self.call(run).items()
        ]


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    for model in ("tiny",) if options.quick else SLICES:
        shape = TINY if options.quick else MoEShape.from_model(model)
        sizes = Sizes(shape.experts, shape.hidden, shape.intermediate, _TOKENS, shape.top_k)
        case = {"layer": "moe", "model": model, **dataclasses.asdict(sizes), "pass": PASSES[1]}
        contenders = [
            unchecked(
                "ours, recompute" if recompute else "ours",
                name,
                functools.partial(bytes_of_step, recipe, sizes, meter.device.type, recompute),
            )
            for name, recipe in recipes().items()
            for recompute in ((False, True) if name in RECOMPUTED else (False,))
        ]
        yield Task("memory", case, same_for_all_copies(contenders))


def _meters(options: Options) -> list[Meter]:
    return [_MemoryMeter(options.backend, options.quick)]


SUITE = Suite(_tasks, _meters)
