"""The activation of experts. It saves its input for the backward pass and nothing else."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels import ops
from cute_kernels.formats.activations import ACTIVATIONS, Activation, parse_activation
from cute_kernels.records import check_kind

#: Names that Hugging Face configurations use for the curve of gated experts.
_COMMON_NAMES = ("gelu", "relu", "silu")


def warn_if_ungated(module: str, activation: object) -> None:
    """Warn about an ungated activation whose name other libraries use for gated experts.

    Args:
        module: Name of the class whose constructor calls this.
        activation: Its argument.
    """
    if isinstance(activation, str) and activation in _COMMON_NAMES:
        gated = next(
            act.name
            for act in map(Activation, ACTIVATIONS)
            if act.is_gated and act.curve == activation
        )
        warnings.warn(
            f"{module}(activation={activation!r}) has experts without a gate: W2 {activation}(W1 "
            f"x). For gated experts of models whose configuration says {activation!r}, pass "
            f"{gated!r}; for these experts without this warning pass "
            f"grouped.Activation({activation!r})",
            stacklevel=4,  # The caller of the constructor, which suggest_arguments wraps.
        )


def resolve_activation(activation: object, interleaved: bool) -> Activation:
    """Return the ``Activation`` record for a name or a record.

    Raises:
        TypeError: ``activation`` is neither a name nor a record.
        ValueError: No activation has this name, or ``interleaved`` is True for one without a gate.
    """
    if not isinstance(activation, (str, Activation)):
        raise TypeError(
            f"activation must be a name such as 'swiglu' or a grouped.Activation, got "
            f"{activation!r}"
        )
    check_kind(bool, interleaved=interleaved)
    act = parse_activation(activation) if isinstance(activation, str) else activation
    if interleaved and not act.is_gated:
        raise ValueError(f"interleaved=True needs a gated activation; {act.text} has no gate")
    return act


def activate(
    x: Tensor, activation: str, offs: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """Apply ``torch.ops.cute_kernels.moe_activate``, differentiable also under ``torch.func``.

    Args:
        x: (T, 2 I) for gated activations, else (T, I).
        activation: Text of the activation.
        offs: (G,) end rows. Rows from ``offs[-1]`` on are neither read nor written.
        interleaved: True if the two halves of a gated activation alternate.

    Returns:
        (T, I) in the dtype of ``x``.
    """
    if torch.compiler.is_compiling():
        return torch.ops.cute_kernels.moe_activate(x, activation, offs, interleaved)
    return _Activate.apply(x, activation, offs, interleaved)


class _Activate(torch.autograd.Function):
    """The activation without PyTorch's dispatcher, in the form that ``torch.func`` accepts."""

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
