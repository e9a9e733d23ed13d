"""Table of what PyTorch's ops do with a ``GroupedTensor``."""

from collections.abc import Callable
from typing import Any

#: Handlers by op: (op, *args, **kwargs) -> result. The key None has the handler of all other ops.
HANDLERS: dict[Any, Callable[..., Any]] = {}


def handler(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for ops that have a GroupedTensor among their arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register
