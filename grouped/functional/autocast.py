"""Functions that autocast does not affect, since they promise the dtypes of their arithmetic."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound="Callable[..., Any]")


def in_own_dtypes(function: F) -> F:
    """Run ``function``, whose first argument is a tensor, without autocast.

    Under autocast an fp32 product runs in 16 bits, also in a backward pass that is compiled or
    called inside of its block; and ``torch.cat`` of bf16 raises if autocast uses fp16.
    """

    @functools.wraps(function)
    def run(x: torch.Tensor, *arguments: Any) -> Any:
        kind = x.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return function(x, *arguments)
        with torch.autocast(kind, enabled=False):
            return function(x, *arguments)

    wrapped: Any = run
    return wrapped
