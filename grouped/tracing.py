"""Decorators that tell Dynamo how to trace a function, without importing Dynamo.

That import takes longer than the rest of this package.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from cute_kernels.ops.registration import skip_dynamo

F = TypeVar("F", bound="Callable[..., Any]")


def eager_only(reason: str) -> Callable[[F], F]:
    """Decorate a function like ``torch.compiler.disable(reason=reason)``: graphs break at it."""

    def decorate(function: F) -> F:
        """Mark ``function`` for Dynamo."""
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        skip_dynamo(function)
        return function

    return decorate


def constant_call(function: F) -> F:
    """Decorate a function like ``torch.compiler.assume_constant_result``: tracing calls it."""
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
