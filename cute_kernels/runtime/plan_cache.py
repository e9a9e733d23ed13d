"""A cache of launch plans: the work that an op does once per combination of tensor metadata.

An op checks its arguments, picks a kernel and computes its launch parameters once for each
combination of tensor metadata; that is its plan. A later call with the same metadata costs one
dictionary look-up, and runs no check and no heuristic again.
"""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

#: Types of arguments that are plain values: neither tensors nor lists of tensors.
VALUE_TYPES = frozenset({type(None), bool, int, str, torch.dtype})

P = TypeVar("P")


def plan_key(op: Hashable, backend: Hashable, arguments: Iterable[object]) -> Hashable:
    """Return the key of a call's plan. Calls with equal keys share a plan.

    A tensor contributes its dtype, device, shape and strides, never its contents or its address, so
    a plan assumes no alignment.

    Args:
        op: Class or name of the op.
        backend: The chosen backend.
        arguments: Arguments in the op's order: tensors, lists of tensors or integers, and other
            hashable values.
    """
    # A single expression, which compares types before classes: this is a quarter of a call's host
    # time.
    return (
        op,
        backend,
        *[
            a
            if type(a) in VALUE_TYPES
            else (a.dtype, a.device, a.shape, a.stride())
            if isinstance(a, Tensor)
            else tuple(
                [t if type(t) is int else (t.dtype, t.device, t.shape, t.stride()) for t in a]
            )
            if isinstance(a, (list, tuple))
            else a
            for a in arguments
        ],
    )


class PlanCache(Generic[P]):
    """Plans by tensor metadata. A full cache drops its oldest plan.

    A plan is small, but a program may never see the same number of tokens twice.

    Args:
        capacity: Largest number of plans.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._plans: dict[Hashable, P] = {}
        self._capacity = capacity

    def get(self, key: Hashable) -> P | None:
        """Return the plan of a key made by ``plan_key``, or None."""
        return self._plans.get(key)

    def add(self, key: Hashable, plan: P) -> P:
        """Store a plan and return it."""
        while len(self._plans) >= self._capacity:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan
        return plan

    def clear(self) -> None:
        """Drop all plans."""
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


#: Plans of all ops, and recordings of ``replay``.
PLANS: PlanCache[Any] = PlanCache()


def clear_plan_cache() -> None:
    """Drop all plans, so that the next call makes a new one.

    For settings that change which kernel runs but are no argument of an op.
    """
    PLANS.clear()
