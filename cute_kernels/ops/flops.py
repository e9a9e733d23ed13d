"""Registration of FLOP counts with ``torch.utils.flop_counter``."""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry


def register_flops(namespace: Any, count: Callable[..., int], *names: str) -> None:
    """Register the FLOP count of ops.

    Args:
        namespace: ``torch.ops.cute_kernels`` or ``torch.ops.grouped``.
        count: Returns the number of operations. It takes the arguments of an op, and its result as
            ``out_val``.
        *names: Names of the ops in ``namespace``.
    """
    flop_registry.update(dict.fromkeys((getattr(namespace, name) for name in names), count))
