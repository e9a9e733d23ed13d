"""Sharded parameters: find this rank's part, write it or replace it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..ownership import Owner
from ..tensor.dtensor_parts import is_distributed, local_part


def local_rows(p: Any) -> range | None:
    """Return the rows of the first dimension that this rank has of a parameter.

    Return None if the parameter is sharded along another dimension.
    """
    if not is_distributed(p):
        return range(len(p)) if p.dim() else None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if p.dim() == 0 or tuple(shape[1:]) != tuple(p.shape[1:]) or shape[0] != len(local_part(p)):
        return None
    return range(offset[0], offset[0] + shape[0])


def check_can_fill(key: str, p: Any) -> None:
    """Raise ValueError if ranks have partial sums of ``p``, which no checkpoint determines."""
    if is_distributed(p) and any(placement.is_partial() for placement in p.placements):
        raise ValueError(
            f"{key} has the placements {p.placements}: partial sums of ranks cannot be loaded"
        )


def check_can_quantize(key: str, p: Any, shape: tuple[int, ...], owner: Owner | None) -> None:
    """Raise ValueError unless each rank can have whole quantized groups of ``p``.

    Args:
        key: Name of the parameter.
        p: The parameter.
        shape: Shape of the quantized weight on all ranks.
        owner: Owner of the parameter, or None.
    """
    if not is_distributed(p):
        return
    if local_rows(p) is None:
        raise ValueError(
            f"{key} has the placements {p.placements}, but quantized experts are sharded between "
            "groups only: load a plain checkpoint, or distribute the experts with ExpertParallel"
        )
    info = getattr(getattr(owner, "manager", None), "mesh_info", None)
    if info is None:
        return
    if not hasattr(info, "shard_mesh_size"):
        raise ValueError(
            f"{key} is replicated by FSDP, which gathers plain parameters only: use fully_shard"
        )
    if shape != tuple(p.shape):
        raise ValueError(
            f"{key} has the shape {tuple(p.shape)} under fully_shard, but {shape} when quantized, "
            "because the experts are transposed: load before fully_shard"
        )
    groups, ranks = owner.manager._orig_size[0], info.shard_mesh_size  # type: ignore[union-attr]
    if groups % ranks:
        raise ValueError(
            f"{key} has {groups} groups on the {ranks} ranks of fully_shard: the number of "
            "quantized groups must be a multiple of the ranks. Shard over fewer ranks, load a "
            "plain checkpoint, or leave a shared expert, which is one group, out of fully_shard "
            "(ignored_params)"
        )


def fill(p: Any, read: Callable[[range | None], Tensor]) -> None:
    """Copy values into this rank's part of ``p``.

    Args:
        p: A parameter, sharded or not.
        read: Returns the values of a range of rows, or of all rows for None.
    """
    rows = local_rows(p)
    target = local_part(p)
    if rows is not None:
        if len(rows):
            target.copy_(read(None if len(rows) == len(p) else rows))
        return
    whole = read(None)
    if is_distributed(p):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(target.device, target.dtype)
        whole = local_part(
            distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        )
    target.copy_(whole)


def make_parameter(p: Any, local: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter without gradient that is sharded like ``p``.

    Args:
        p: The parameter that is replaced.
        local: This rank's part of the new parameter.
        shape: Shape on all ranks.
    """
    if is_distributed(p):
        from ..tensor.dtensor_parts import from_local_part

        local = from_local_part(local, p.device_mesh, p.placements, shape)
    return nn.Parameter(local, requires_grad=False)


def update_owner(owner: Owner | None) -> None:
    """Make FSDP2 use the current parameter of its module, also after the first call."""
    manager = owner.manager if owner is not None else None
    if manager is None:
        return
    # Gathered buffers of the old parameter have another size.
    manager.all_gather_outputs = []
    manager.__dict__.pop("_unsharded_param", None)
    manager.sharded_param = getattr(manager._module_info.module, manager._module_info.param_name)
    manager._sharded_param_data = None
    manager.reset_sharded_param()
    manager._init_extensions()


def raise_on_all_ranks(tensors: Iterable[Any], has_error: bool) -> None:
    """Raise ValueError on this rank if another rank that shares one of the DTensors has an error.

    Args:
        tensors: Parameters of the module.
        has_error: True on a rank that raises an error of its own.
    """
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_distributed(t)))
    if not meshes:
        return
    import torch.distributed as dist

    failed = torch.tensor([has_error], dtype=torch.int32, device=meshes[0].device_type)
    for mesh in meshes:
        for dim in range(mesh.ndim):
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    if not has_error and bool(failed.item()):
        raise ValueError(
            "nothing was loaded, because another rank cannot load its part: see its error"
        )
