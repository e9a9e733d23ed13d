"""Gather the groups of a sharded ``GroupedTensor``: its plain tensors, as their bytes are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import GroupedTensorBase, T


def gather_inputs(x: GroupedTensorBase, ranks: int, groups: int) -> tuple[Tensor, ...]:
    """Return the plain tensors of a shard in the form in which they are gathered.

    They are contiguous; rows of codes include their padding.

    Args:
        x: The shard.
        ranks: Number of shards.
        groups: Number of groups of all shards.

    Raises:
        ValueError: ``groups`` is not a multiple of ``ranks``, or ``x`` is not uniform.
    """
    if x.grouping != "uniform":
        raise ValueError(f"only uniform GroupedTensors can be sharded, got {x!r}")
    if groups % ranks:
        raise ValueError(
            f"FSDP shards the groups of a GroupedTensor: their number, {groups}, must be a "
            f"multiple of its {ranks} "
            "ranks. Leave a shared expert, which is one group, out of fully_shard by ignored_params"
        )
    return tuple(_with_padding(t) for t in x._inner().values())


def _with_padding(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else torch.nn.functional.pad(t, (0, t.stride(-2) - t.shape[-1]))


def wrap_gathered(shard: T, outputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> T:
    """Return the tensor of all groups around gathered tensors, which it views.

    Args:
        shard: A shard, whose metadata the result has.
        outputs: The gathered ``gather_inputs`` of all shards.
        dtype: Data type of the result, if it is not that of the shard.
    """
    inner = {
        name: output if t.dim() == 1 else output[..., : t.shape[-1]]
        for (name, t), output in zip(shard._inner().items(), outputs, strict=True)
    }
    return shard._rewrap(inner, dtype=dtype, shape=(len(outputs[0]), *shard.shape[1:]))
