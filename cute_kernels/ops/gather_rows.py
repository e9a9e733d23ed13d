"""Gather of rows by an index into memory, and the order in which rows are read."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.moe.choose import choose_gather_config
from ..kernels.moe.config import GatherConfig, ScatterConfig
from ..runtime.launch import Launcher
from .arguments import dense, readable

#: Size in bytes from which each row is read once and written k times. Below it, L2 serves k reads
#: of a row as fast as one. On an H200, 512 rows of 4 KiB with k = 8 take 9.1 us by index and 10.8
#: us by inverse; rows of 14 KiB take 22.9 and 22.1 us.
_MANY_BYTES = 2**22


def reads_tokens(inverse: Tensor | None) -> bool:
    """Return True if kernels read each row of x once, instead of once per row of the result."""
    return inverse is not None and inverse.shape[1] > 1


def gatherer(
    x: Tensor, launch: Launcher, inverse: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], None]:
    """Return a function that gathers rows of a matrix like ``x``: (x, index, inverse, out)."""
    spreads = reads_tokens(inverse) and x.numel() * x.itemsize >= _MANY_BYTES
    config_class = ScatterConfig if spreads else GatherConfig
    config = choose_gather_config(x.shape[1] * x.itemsize, config_class)
    kernel = launch.kernel(config)
    kind = torch.int16 if config.width == 2 else torch.int32
    # A single row may have any stride, but a view of another dtype needs a multiple of its size.
    is_one = x.shape[0] == 1

    def run(x: Tensor, index: Tensor, inverse: Tensor | None, out: Tensor) -> None:
        """Gather the rows."""
        x = readable(x)
        words = x.view(-1).view(kind).view(1, -1) if is_one else x.view(kind)
        indices = (dense(index), dense(inverse)) if spreads else (dense(index),)
        kernel(words, *indices, out.view(kind), launch.num_sms)

    return run
