"""Rows of a matrix by an index, for the ops that need them in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...moe.config import GatherConfig
from ...runtime.launch import Launcher
from ..arguments import dense, readable


def gatherer(x: Tensor, launch: Launcher) -> Callable[[Tensor, Tensor, Tensor], None]:
	"""What writes the rows of a matrix like ``x`` that an index names: (x, index, out)."""
	config = GatherConfig.choose(x.shape[1] * x.itemsize)
	kernel = launch.kernel(config)
	kind = torch.int16 if config.width == 2 else torch.int32
	# One row may have any stride, which a view of another dtype asks to be whole.
	is_one = x.shape[0] == 1

	def run(x: Tensor, index: Tensor, out: Tensor) -> None:
		x = readable(x)
		words = x.view(-1).view(kind).view(1, -1) if is_one else x.view(kind)
		kernel(words, dense(index), out.view(kind), launch.num_sms)

	return run
