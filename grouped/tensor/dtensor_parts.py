"""The plain tensors of a rank's groups, and the tensor of all groups that they are gathered to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .grouped_tensor import GroupedTensor


def local_part(t: Any) -> Any:
    """This rank's part of a DTensor as it is held, outside of autograd; else the tensor."""
    return getattr(t, "_local_tensor", t)


def is_spread(*tensors: Any) -> bool:
    """Whether one of them is a DTensor, whose class is slow to import."""
    return any(hasattr(t, "_local_tensor") for t in tensors)


def part_of(p: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's part of a tensor that is sharded as ``p``; itself if that is no
    DTensor.
    """
    if not is_spread(p):
        return part
    from ..functional import dtensor_ops as sharding

    spread: Any = p
    return sharding.whole(part, spread.device_mesh, spread.placements, tuple(p.shape))


def sharded_as(p: Any, t: Any) -> Tensor:
    """``t``, the same on all ranks if it is no DTensor, sharded as ``p``."""
    if is_spread(p):
        from torch.distributed.tensor import distribute_tensor

        where = (p.device_mesh, p.placements)
        t = (
            t.redistribute(*where)
            if is_spread(t)
            else distribute_tensor(t, *where, src_data_rank=None)
        )
    return t


def gathered_inputs(x: "GroupedTensor", ranks: int, groups: int) -> tuple[Tensor, ...]:
    """The plain tensors of a shard as they are gathered: contiguous, rows of codes with their
    padding.

    Raises:
        ValueError: ``ranks`` do not divide the ``groups`` of the whole.
    """
    if x.grouping != "uniform":
        raise ValueError(f"only uniform GroupedTensors can be sharded, got {x!r}")
    if groups % ranks:
        raise ValueError(
            f"FSDP shards the groups of a GroupedTensor: their number, {groups}, must be a multiple of its {ranks} "
            "ranks. Leave a shared expert, which is one group, out of fully_shard by ignored_params"
        )
    return tuple(_with_padding(t) for t in x._inner().values())


def _with_padding(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else torch.nn.functional.pad(t, (0, t.stride(-2) - t.shape[-1]))


def gathered(
    x: "GroupedTensor", outputs: Sequence[Tensor], dtype: torch.dtype | None = None
) -> "GroupedTensor":
    """The tensor of all groups over what was gathered of shards like ``x``, or of another dtype:
    views.
    """
    wholes = zip(x._inner().items(), outputs, strict=True)
    inner = {
        name: whole if t.dim() == 1 else whole[..., : t.shape[-1]] for (name, t), whole in wholes
    }
    _, (fmt, own, prepacked, shapes) = x.__tensor_flatten__()
    return x.__tensor_unflatten__(
        inner, (fmt, dtype or own, prepacked, shapes), (len(outputs[0]), *x.shape[1:]), ()
    )
