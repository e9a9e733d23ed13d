"""A rank's part of a DTensor, and DTensors around a rank's part."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def local_part(t: Any) -> Any:
    """Return this rank's part of a DTensor, without autograd, or any other tensor unchanged."""
    return getattr(t, "_local_tensor", t)


def is_distributed(*tensors: Any) -> bool:
    """Return True if one of the tensors is a DTensor, without importing that slow class."""
    return any(hasattr(t, "_local_tensor") for t in tensors)


def from_local_part(
    local: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> Tensor:
    """Return the DTensor of a shape whose part on this rank is ``local``."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def wrap_like(p: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a DTensor sharded like ``p``.

    If ``p`` is not a DTensor, return ``local`` itself.
    """
    if not is_distributed(p):
        return local
    dtensor: Any = p
    return from_local_part(local, dtensor.device_mesh, dtensor.placements, p.shape)


def shard_like(p: Any, t: Any) -> Tensor:
    """Return ``t`` sharded like ``p``.

    A plain ``t`` must be equal on all ranks. If ``p`` is not a DTensor, return ``t`` itself.
    """
    if not is_distributed(p):
        return t
    if is_distributed(t):
        return t.redistribute(p.device_mesh, p.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None)
