"""What Dynamo must not look into, said without loading Dynamo, which takes longer than all else
here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from cute_kernels.ops.registry import keep_dynamo_out

F = TypeVar("F", bound="Callable[..., Any]")


def eager_only(reason: str) -> Callable[[F], F]:
    """``torch.compiler.disable(reason=reason)`` as a decorator: graphs break at the function."""

    def decorate(function: F) -> F:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        keep_dynamo_out(function)
        return function

    return decorate


def constant_call(function: F) -> F:
    """``torch.compiler.assume_constant_result`` as a decorator: tracing calls the function then and
    there.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
