"""Launch plans: what an op worked out for tensors like these, kept for the next call.

An op checks its arguments, picks a kernel and computes its launch parameters once for each
combination of tensor metadata; that is its plan. A later call with the same metadata costs one
dictionary look-up, and runs no check and no heuristic again.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

#: Types of arguments that are values: neither tensors nor lists of them.
INERT = frozenset({type(None), bool, int, str, torch.dtype})

P = TypeVar("P")


def plan_key(op: Hashable, backend: Hashable, arguments: Iterable[object]) -> Hashable:
    """What the plan of a call may depend on, equal for calls that can share one.

    Of a tensor that is its dtype, device, shape and strides; never its contents or its address, so
    a plan assumes no alignment. Arguments are in the op's order: tensors, lists of them or of
    integers, and what is hashable.
    """
    # One expression rather than a function a tensor, and looks at types before at classes: this is
    # a quarter of a call's host time.
    return (
        op,
        backend,
        *[
            a
            if type(a) in INERT
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
    """Plans of one op by tensor metadata, as many as ``capacity``: past it the oldest goes first.

    A plan is small, but a program may never see the same number of tokens twice.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._plans: dict[Hashable, P] = {}
        self._capacity = capacity

    def get(self, key: Hashable) -> P | None:
        """The plan for a key of ``plan_key``, if there is one."""
        return self._plans.get(key)

    def add(self, key: Hashable, plan: P) -> P:
        while len(self._plans) >= self._capacity:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan
        return plan

    def clear(self) -> None:
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)
