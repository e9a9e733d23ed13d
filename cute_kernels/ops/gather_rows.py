"""Rows of a matrix by an index, for the ops that need them in memory, and in whose order they are
read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.moe.choose import choose_gather_config
from ..kernels.moe.config import GatherConfig, ScatterConfig
from ..runtime.launch import Launcher
from .arguments import dense, readable

#: Bytes of a matrix below which L2 gives each of its rows k times as fast as once: 512 rows of 4
#: KiB by 8 are gathered in 9.1 us by their index and in 10.8 by its inverse, of 14 KiB in 22.9 and
#: 22.1 (H200).
_MANY_BYTES = 2**22


def by_token(inverse: Tensor | None) -> bool:
    """Whether kernels go by the rows of x, and not by those that an index of k rows each makes of
    them.
    """
    return inverse is not None and inverse.shape[1] > 1


def gatherer(
    x: Tensor, launch: Launcher, inverse: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:
    """What writes the rows of a matrix like ``x`` that an index names: (x, index, inverse, out)."""
    spreads = by_token(inverse) and x.numel() * x.itemsize >= _MANY_BYTES
    config_class = ScatterConfig if spreads else GatherConfig
    config = choose_gather_config(x.shape[1] * x.itemsize, config_class)
    kernel = launch.kernel(config)
    kind = torch.int16 if config.width == 2 else torch.int32
    # One row may have any stride, which a view of another dtype asks to be whole.
    is_one = x.shape[0] == 1

    def run(x: Tensor, index: Tensor, inverse: Tensor | None, out: Tensor) -> None:
        x = readable(x)
        words = x.view(-1).view(kind).view(1, -1) if is_one else x.view(kind)
        indices = (dense(index), dense(inverse)) if spreads else (dense(index),)
        kernel(words, *indices, out.view(kind), launch.num_sms)

    return run
