"""Differentiable fp32 sums over the ranks of a process group."""

from typing import Any

import torch
from torch import Tensor

_collectives = torch.ops._c10d_functional


def sum_over(x: Tensor, group: str) -> Tensor:
    """Return the fp32 sum of ``x`` over the ranks of ``group``, rounded to the dtype of ``x``."""
    out: Tensor = _collectives.wait_tensor(
        _collectives.all_reduce(x.float().contiguous(), "sum", group)
    )
    return out.to(x.dtype)


class SummedGradient(torch.autograd.Function):
    """Passes ``x`` through. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """Return a view of ``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return sum_over(dx, ctx.group), None


class Sum(torch.autograd.Function):
    """Sums over the ranks. The gradient on each rank is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        """Return the sum."""
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        """Return this rank's gradient."""
        return dx, None
