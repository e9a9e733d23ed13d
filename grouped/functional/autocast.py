"""Arithmetic that autocast does not reach: dtypes of it are part of what a function promises."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound="Callable[..., Any]")


def in_own_dtypes(function: F) -> F:
    """Run ``function``, whose first argument is a tensor, without autocast.

    Under autocast a product of fp32 runs in 16 bits, also in a backward pass that is compiled or
    called inside of its block, and ``torch.cat`` of bf16 raises where autocast is to fp16.
    """

    @functools.wraps(function)
    def run(x: torch.Tensor, *rest: Any) -> Any:
        kind = x.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return function(x, *rest)
        with torch.autocast(kind, enabled=False):
            return function(x, *rest)

    wrapped: Any = run
    return wrapped
