"""What Dynamo must not look into, said without loading Dynamo, which takes longer than all else
here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from cute_kernels.ops.registration import skip_dynamo

F = TypeVar("F", bound="Callable[..., Any]")


def eager_only(reason: str) -> Callable[[F], F]:
    """``torch.compiler.disable(reason=reason)`` as a decorator: graphs break at the function."""

    def decorate(function: F) -> F:
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        skip_dynamo(function)
        return function

    return decorate


def constant_call(function: F) -> F:
    """``torch.compiler.assume_constant_result`` as a decorator: tracing calls the function then and
    there.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
