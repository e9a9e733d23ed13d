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

	def run(x: Tensor, index: Tensor, out: Tensor) -> None:
		of_x, of_out = (t.flatten().view(kind).view(len(t), -1) for t in (readable(x), out))
		kernel(of_x, dense(index), of_out, launch.num_sms)

	return run
