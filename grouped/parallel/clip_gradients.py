"""Gradient clipping of parameters on several meshes, or on none."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip plain parameters and DTensors of any meshes together by the norm of all gradients.

    ``torch.nn.utils.clip_grad_norm_`` raises for a mixture of them. The norm is that of the whole
    model: a sharded gradient counts with all its shards. A plain gradient counts once, since it is
    equal on all ranks after data parallelism has summed it.

    Args:
        parameters: Parameters whose ``grad`` is scaled in place.
        max_norm: Largest norm that is not scaled.
        norm_type: Order of the norm; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise if the norm is NaN or infinite. This reads the norm on the host.
        foreach: As in PyTorch's function.

    Returns:
        () fp32, the norm before clipping: a plain tensor, equal on all ranks.

    Raises:
        RuntimeError: ``error_if_nonfinite`` is True and the norm is not finite. Nothing is scaled.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    norms = [
        _norm_of([p.grad for p in group if p.grad is not None], norm_type, foreach)
        for group in groups.values()
    ]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, "
            "so they cannot be clipped"
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def _norm_of(gradients: Sequence[Any], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of gradients that are plain, or DTensors of one mesh."""
    mesh = getattr(gradients[0], "device_mesh", None)
    if mesh is None:
        return get_total_norm(gradients, norm_type, foreach=foreach)
    if norm_type != math.inf:
        norm: Any = get_total_norm(gradients, norm_type, foreach=foreach)
        return norm.full_tensor()
    # PyTorch's function raises for the largest magnitude of a shard without elements.
    shards = [
        g.full_tensor() if any(p.is_partial() for p in g.placements) else g.to_local()
        for g in gradients
    ]
    largest = get_total_norm(
        [shard for shard in shards if shard.numel()] or [shards[0].new_zeros(1)],
        norm_type,
        foreach=foreach,
    )
    return DTensor.from_local(
        largest, mesh, [Partial("max")] * mesh.ndim, run_check=False
    ).full_tensor()
