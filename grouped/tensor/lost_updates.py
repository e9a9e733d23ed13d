"""Warnings about in-place updates of a quantized tensor that rounding loses."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from .grouped_tensor import GroupedTensor

#: In-place ops with which optimizers and averages update parameters; their second argument is the
#: update, or the end of a lerp. Weight decay (``mul_``) is left out: it is meant to be small.
_UPDATES = frozenset(
    f"{prefix}{name}_"
    for prefix in ("", "_foreach_")
    for name in ("add", "sub", "addcmul", "addcdiv", "lerp")
) | {"_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"}
#: Arguments of these ops that are factors of the update.
_FACTORS = ("alpha", "value", "scalars", "weight", "weights", "lr")
_ADVICE = (
    "Keep a copy of the weights in fp32, as grouped.optim.AdamW does, or let an optimizer of yours "
    "update it and quantize it with grouped.quantize(master, fmt, out=weight)."
)


def adds_update(name: str) -> bool:
    """Return True if the aten op ``name`` adds an update to its output."""
    return name in _UPDATES


def snapshot(x: GroupedTensor) -> tuple[Tensor, ...] | None:
    """Return a copy of the bytes of ``x``, or None on a GPU and while tracing.

    On a GPU a comparison would wait for the device in each step. A flag on the device would cost a
    copy of the codes, and nothing would read it. While tracing there are no bytes.
    """
    copy = x.rowwise or x.columnwise
    if copy is None or any(type(t) is not Tensor or t.device.type != "cpu" for t in copy):
        return None
    return tuple(t.clone() for t in copy)


def warn_if_lost(
    x: GroupedTensor,
    before: tuple[Tensor, ...] | None,
    name: str,
    arguments: dict[str, Any],
    position: int,
    dense: Tensor,
) -> None:
    """Warn if an update that is not zero left every byte of ``x`` as it was.

    Args:
        x: The updated tensor.
        before: Its ``snapshot``. If it is None, warn once that updates may be lost.
        name: Name of the op.
        arguments: Arguments of the op by name, decoded.
        position: Position of ``x`` in the op's list of tensors, if it takes one.
        dense: The decoded values after the update.
    """
    copy = x.rowwise or x.columnwise
    if before is None or copy is None:
        _warn_unwatched()
        return
    if not all(map(torch.equal, before, copy)):
        return
    update = list(arguments.values())[1]
    update = update[position] if isinstance(update, (list, tuple)) else update
    is_zero = torch.equal(update, dense) if "lerp" in name else _is_zero(update)
    if is_zero or any(_is_zero(arguments[factor]) for factor in _FACTORS if factor in arguments):
        return
    warnings.warn(
        f"{name} changed nothing in {x!r}: the whole update is lost when it is rounded to the "
        f"format. {_ADVICE}",
        stacklevel=2,
    )


def _is_zero(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_zero, value))
    return not (value.any() if isinstance(value, Tensor) else value)


@functools.cache
def _warn_unwatched() -> None:
    """Warn, once, that updates of a GroupedTensor may be lost."""
    warnings.warn(
        "updating a GroupedTensor in place rounds it to its format each time, which loses updates "
        "that are small relative to the values. An update that changes nothing warns on a CPU, but "
        f"not on a GPU or in compiled code. {_ADVICE}",
        stacklevel=2,
    )
