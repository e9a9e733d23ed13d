"""Memory of a training step of an MLP of experts, in each recipe."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..cases import MODELS
from ..contender import Contender, Task, unchecked
from ..measure.base import Measurement, Meter
from ..measure.memory import Sizes, bytes_of_step
from .base import Options, Suite
from .layer import recipes

_TOKENS = 512


class _MemoryMeter(Meter):
	"""Adds up storages of fake tensors; on a GPU the peak is the allocator's."""

	def __init__(self, backend: str, quick: bool) -> None:
		is_gpu = torch.cuda.is_available() and backend in ("", "cuda")
		self.kind = "gpu" if is_gpu else "cpu"
		self.device = torch.device("cuda" if is_gpu else "cpu")
		self.backend = "cuda" if is_gpu else "reference"
		self.arch = self.backend
		self.quick = quick

	def measure(
		self, contenders: Sequence[Contender], runs: Sequence[Sequence[Callable[[], Any]]]
	) -> list[list[Measurement]]:
		protocol = "allocated" if self.kind == "gpu" else "fake tensors"
		del contenders
		with self.active():
			found = [run() for run, *_ in runs]
		return [[Measurement(name, n, "byte", protocol, 0.0, 1) for name, n in of.items()] for of in found]


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
	model = MODELS["DeepSeek-V3"]
	experts = model.shape("up").experts
	sizes = Sizes(experts, model.hidden, model.intermediate, _TOKENS)
	if options.quick:
		sizes = Sizes(4, 128, 64, 16)
	facts = dataclasses.asdict(sizes)
	rows = facts.pop("tokens") * sizes.experts
	case = {"layer": "mlp", "model": "small" if options.quick else model.name, **facts}

	def contenders(copy: int) -> list[Contender]:
		del copy
		runs = {
			name: functools.partial(bytes_of_step, recipe, sizes, meter.device.type) for name, recipe in recipes().items()
		}
		return [unchecked("ours", name, run) for name, run in runs.items()]

	yield Task("memory", {**case, "rows": rows, "pass": "forward+backward"}, contenders)


def _meters(options: Options) -> list[Meter]:
	return [_MemoryMeter(options.backend, options.quick)]


SUITE = Suite("memory", "memory of a training step", _tasks, _meters)
