"""Autograd of ops, and errors where a derivative would be lost."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves


def refuse_derivatives(op: str, tensors: Iterable[tuple[str, object]], remedy: str) -> None:
    """Raise if writing into a given tensor would lose a derivative, as torch's functions do.

    Args:
        op: Name of the op, for the message.
        tensors: Operands and outputs by name; values that are no tensors are skipped.
        remedy: Alternative to detaching, for the message.

    Raises:
        RuntimeError: One of ``tensors`` requires a gradient; or a level of forward-mode AD is open,
            whose tangents are not all visible here (those of ``torch.func.jvp`` are not).
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(f"{op} has no derivative in forward mode: {remedy}, or leave the level")
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{op} has no derivative, but {name} requires a gradient: detach it, or {remedy}"
            )


def _refuse_tangents(name: str, args: Iterable[object]) -> None:
    """Raise NotImplementedError if an argument has a tangent."""
    for a in tree_leaves(args):
        if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative, so the tangent would be lost: use the "
                "backward mode, or detach the input"
            )


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    library: torch.library.Library,
) -> None:
    """Register the derivative of an op, with an error for operands that have a tangent.

    PyTorch's own kernel ignores tangents, so forward-mode AD would treat the op as a constant.
    ``name`` is the name of an op of ``library`` without namespace.
    """
    op = getattr(getattr(torch.ops, library.ns), name).default
    kernel = make_autograd_impl(op, Info(backward, setup_context))
    defaults = tuple(a.default_value for a in op._schema.arguments if not a.kwarg_only)

    def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the autograd kernel with all arguments."""
        # The dispatcher leaves out arguments that have their defaults, but the gradients of an op
        # that takes lists must have the structure of all of them.
        args += defaults[len(args) :]
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        return kernel(keyset, *args, **kwargs)

    library.impl(name, autograd, "Autograd", with_keyset=True)


def not_differentiable(name: str) -> Callable[..., Any]:
    """Return the backward pass of an op without a derivative, which raises."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name} has no derivative; train through grouped.nn, or detach its input"
        )

    return backward
