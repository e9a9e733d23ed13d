"""Says so when the in-place update of a quantized tensor is lost to rounding."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from .grouped_tensor import GroupedTensor

#: In-place ops by which optimizers and averages update parameters; their second argument is the
#: update, or where a lerp goes. Weight decay (``mul_``) is left out: it is meant to be small.
_UPDATES = frozenset(
    f"{prefix}{name}_"
    for prefix in ("", "_foreach_")
    for name in ("add", "sub", "addcmul", "addcdiv", "lerp")
) | {"_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"}
#: Factors of the update among their arguments.
_FACTORS = ("alpha", "value", "scalars", "weight", "weights", "lr")
_ADVICE = (
    "Keep a copy of the weights in fp32, as grouped.optim.AdamW does, or let an optimizer of yours update it and "
    "quantize it with grouped.quantize(master, fmt, out=weight)."
)


def adds_update(name: str) -> bool:
    """Whether the aten op ``name`` adds an update to what it writes."""
    return name in _UPDATES


def snapshot(x: GroupedTensor) -> tuple[Tensor, ...] | None:
    """Copies of the bytes that say what ``x`` stands for, or None where nobody may look at them.

    On a GPU a comparison would wait for the device in each step, and a flag kept there would cost
    a copy of the codes and not be read by anyone. While tracing there are no bytes.
    """
    held = x.rowwise or x.columnwise
    if held is None or any(type(t) is not Tensor or t.device.type != "cpu" for t in held):
        return None
    return tuple(t.clone() for t in held)


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
        x: what was updated.
        before: its ``snapshot``; where it is None, say once what may happen.
        name: the op.
        arguments: its arguments, decoded, by name.
        position: where ``x`` is in the op's list of tensors, if it takes one.
        dense: the decoded values after the update.
    """
    held = x.rowwise or x.columnwise
    if before is None or held is None:
        _warn_unwatched()
        return
    if not all(map(torch.equal, before, held)):
        return
    update = list(arguments.values())[1]
    update = update[position] if isinstance(update, (list, tuple)) else update
    is_zero = torch.equal(update, dense) if "lerp" in name else _is_zero(update)
    if is_zero or any(_is_zero(arguments[factor]) for factor in _FACTORS if factor in arguments):
        return
    warnings.warn(
        f"{name} changed nothing in {x!r}: the whole update is lost when it is rounded to the format. {_ADVICE}",
        stacklevel=2,
    )


def _is_zero(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_zero, value))
    return not (value.any() if isinstance(value, Tensor) else value)


@functools.cache
def _warn_unwatched() -> None:
    warnings.warn(
        "updating a GroupedTensor in place rounds it to its format each time, which loses updates "
        "that are small beside the values. On a CPU one that changes nothing warns; on a GPU and "
        f"in compiled code nothing looks. {_ADVICE}",
        stacklevel=2,
    )
