"""The activation of experts, which keeps its input for the backward pass and nothing else."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels import ops
from cute_kernels.formats.activations import Activation, parse_activation
from cute_kernels.records import check_kind


def as_activation(activation: object, interleaved: bool) -> Activation:
    """The record of an activation, from its name or itself.

    Raises:
        TypeError: it is neither.
        ValueError: there is none of this name, or ``interleaved`` is of none without a gate.
    """
    if not isinstance(activation, (str, Activation)):
        raise TypeError(
            f"activation must be a name such as 'swiglu' or a grouped.Activation, got {activation!r}"
        )
    check_kind(bool, interleaved=interleaved)
    act = parse_activation(activation) if isinstance(activation, str) else activation
    if interleaved and not act.is_gated:
        raise ValueError(f"interleaved is of gated activations, which {act.text} is not")
    return act


def activate(
    x: Tensor, activation: str, offs: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """``torch.ops.cute_kernels.moe_activate``, differentiable in eager mode and ``torch.func``."""
    if torch.compiler.is_compiling():
        return torch.ops.cute_kernels.moe_activate(x, activation, offs, interleaved)
    return _Activate.apply(x, activation, offs, interleaved)


class _Activate(torch.autograd.Function):
    """The same without PyTorch's dispatcher, in the form that ``torch.func`` takes."""

    @staticmethod
    def forward(x: Tensor, activation: str, offs: Tensor | None, interleaved: bool) -> Tensor:
        return ops.moe_activate(x, activation, offs, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.activation, offs, ctx.interleaved = inputs
        ctx.save_for_backward(x, offs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, offs = ctx.saved_tensors
        return (
            ops.moe_activate_gradient(x, dy.to(x.dtype), ctx.activation, offs, ctx.interleaved)[0],
            None,
            None,
            None,
        )
