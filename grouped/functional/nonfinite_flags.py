"""Flags on the device that record non-finite numbers in the operands of a layer.

``grouped.inspect.detect_nonfinite`` makes the flags and reads them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..tensor.grouped_tensor import GroupedTensor

#: Tensors of a layer that have a flag each, in the order of the flags.
ROLES = ("input", "weight", "output", "grad_output")


def watch(flags: Tensor, x: Tensor, weights: Sequence[Tensor], y: Tensor, offs: Tensor) -> Tensor:
    """Set the flags of one call, and the flag of its backward pass when that runs.

    Args:
        flags: (4,) bool, one flag for each of ``ROLES``.
        x: (T, K) input.
        weights: The weight (G, N, K), or (N, K) per group.
        y: (T, N) output.
        offs: (G,) end rows. Rows after the last group are ignored.

    Returns:
        ``y``.
    """
    set_forward_flags(flags, x, weights, y, offs)
    return _WatchGradient.apply(y, flags, offs)


@torch.no_grad()
def set_forward_flags(
    flags: Tensor, x: Tensor, weights: Sequence[Tensor], y: Tensor, offs: Tensor
) -> None:
    """Set the flags of one forward pass. The arguments are those of ``watch``."""
    is_live = _live_rows(x, offs)
    weight_flag = torch.stack([_has_nonfinite(w) for w in weights]).any()
    _set(flags, "input", _has_nonfinite_rows(x, is_live))
    _set(flags, "weight", weight_flag)
    _set(flags, "output", _has_nonfinite_rows(y, is_live))


@torch.no_grad()
def set_gradient_flag(flags: Tensor, dy: Tensor, offs: Tensor) -> None:
    """Set the flag of the gradient of the output ``dy`` (T, N)."""
    _set(flags, "grad_output", _has_nonfinite_rows(dy, _live_rows(dy, offs)))


def _live_rows(x: Tensor, offs: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) < offs[-1]


def _set(flags: Tensor, role: str, is_nonfinite: Tensor) -> None:
    flags[ROLES.index(role)].logical_or_(is_nonfinite)


def _has_nonfinite_rows(x: Tensor, is_live: Tensor) -> Tensor:
    return (~x.isfinite().all(dim=-1) & is_live).any()


def _has_nonfinite(weight: Tensor) -> Tensor:
    if isinstance(weight, GroupedTensor):
        copy = weight.rowwise or weight.columnwise
        # The last scales of a quantized weight are not finite if any of its values was not.
        weight = weight if copy is None else copy.operand[1][-1]
    return ~weight.isfinite().all()


class _WatchGradient(torch.autograd.Function):
    """The identity. Its backward pass sets the flag of the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, flags: Tensor, offs: Tensor) -> Tensor:
        # Do not save them for backward: other calls set flags in between.
        ctx.flags = flags
        ctx.save_for_backward(offs)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        set_gradient_flag(ctx.flags, dy, *ctx.saved_tensors)
        return dy, None, None
