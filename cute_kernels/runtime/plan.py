"""Launch plans: what an op worked out for tensors like these, kept for the next call.

An op checks its arguments, picks a kernel and computes its launch parameters once for each
combination of tensor metadata; that is its plan. A later call with the same metadata costs one
dictionary look-up, and runs no check and no heuristic again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

__all__ = ["PlanCache", "metadata"]

P = TypeVar("P")


def metadata(tensor: torch.Tensor | None) -> Hashable:
    """What a plan may depend on: dtype, device, shape and strides; never contents or address."""
    if tensor is None:
        return None
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride())


class PlanCache(Generic[P]):
    """Plans of one op by tensor metadata.

    Args:
        capacity: how many plans are kept; past it the oldest goes first. A plan is small, but a
            program may never see the same number of tokens twice.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._plans: dict[Hashable, P] = {}
        self._capacity = capacity

    def get(self, key: Hashable) -> P | None:
        """The plan for a key, if there is one.

        A key holds ``metadata`` of every tensor argument and everything else that the plan depends
        on: formats, flags, backend.
        """
        return self._plans.get(key)

    def add(self, key: Hashable, plan: P) -> P:
        """Keep a plan, and return it."""
        while len(self._plans) >= self._capacity:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan
        return plan

    def clear(self) -> None:
        """Forget every plan."""
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)
