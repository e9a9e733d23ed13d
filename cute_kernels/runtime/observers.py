"""Tests for observers of an op call: modes, transforms, subclasses, gradients and profilers.

A call that nothing observes may skip PyTorch's dispatcher, whose Python boundary costs more than a
kernel launch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .plan_cache import VALUE_TYPES

#: Tensor classes whose calls need no dispatcher.
PLAIN_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})

_profiler_enabled = torch._C._autograd._profiler_enabled


def needs_dispatcher(
    args: Sequence[Any], plain_types: frozenset[type] = PLAIN_TENSOR_TYPES
) -> bool:
    """Return True if a call with these arguments must go through the dispatcher.

    Args:
        args: Arguments of an op: tensors, lists of tensors and plain values.
        plain_types: Tensor classes that the callee accepts without the dispatcher.
    """
    return is_any_call_observed() or is_any_argument_observed(
        args, plain_types, torch.is_grad_enabled()
    )


def is_any_call_observed() -> bool:
    """Return True if something observes every call in the current state of PyTorch."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
        # A profiler learns the name of an op from the dispatcher.
        or _profiler_enabled()
    )


def is_any_argument_observed(
    args: Sequence[Any], plain_types: frozenset[type], grad_enabled: bool
) -> bool:
    """Return True if an argument requires a gradient or is a tensor of another class.

    Args:
        args: Arguments of an op: tensors, lists of tensors and plain values.
        plain_types: Tensor classes that need no dispatcher.
        grad_enabled: False ignores ``requires_grad``.
    """
    for arg in args:
        kind = type(arg)
        if kind in VALUE_TYPES:
            continue
        if kind in plain_types:
            if grad_enabled and arg.requires_grad:
                return True
        elif isinstance(arg, (list, tuple)):
            if is_any_argument_observed(arg, plain_types, grad_enabled):
                return True
        elif isinstance(arg, Tensor):
            return True
    return False
