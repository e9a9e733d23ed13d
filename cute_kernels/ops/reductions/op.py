"""Ops that reduce or count: end offsets of groups, amaxes and column sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.reference.groups import Groups

from ..checks import check_dtype, check_input, check_tensor
from ..op import Op
from ..registration import register


@register
@dataclasses.dataclass
class ComputeOffsets(Op):
    """Return the end offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes.
        multiplier: Number of elements per unit of ``splits``, at least 1, in the range of
            ``dtype``.
        dtype: Dtype of the offsets: int32 or int64; int32 by default.

    Returns:
        (G,) offsets. Offsets above the largest number of ``dtype`` saturate.
    """

    splits: Tensor
    multiplier: int = 1
    dtype: torch.dtype | None = None

    name: ClassVar[str] = "compute_offsets"
    out_name: ClassVar[str] = "offs"

    def check(self) -> None:
        """Check the arguments."""
        integers = (torch.int32, torch.int64)
        check_tensor("splits", self.splits, dtypes=integers, ndim=(1,))
        check_dtype("dtype", self.dtype or torch.int32, integers)
        largest = torch.iinfo(self.dtype or torch.int32).max
        if not 1 <= self.multiplier <= largest:
            raise ValueError(
                f"multiplier must be in [1, {largest}], the offsets' dtype, got {self.multiplier}"
            )

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec(tuple(self.splits.shape), self.dtype or torch.int32)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        (offs,) = outputs
        reference.compute_offsets(self.splits, self.multiplier, offs)


@register
@dataclasses.dataclass
class GroupedAmax(Op):
    """Return the largest magnitude of each group, ignoring NaN.

    Args:
        x: (T, K) with ``offs``, else (G, N, K); bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G,) fp32, 0 for an empty group.
    """

    x: Tensor
    offs: Tensor | None = None

    name: ClassVar[str] = "grouped_amax"
    out_name: ClassVar[str] = "amax"

    def check(self) -> None:
        check_input("x", self.x, self.offs)

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec(
                (self.x.shape[0] if self.offs is None else self.offs.shape[0],), torch.float32
            )
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        (amax,) = outputs
        reference.grouped_amax(
            self.x, Groups.from_shape(self.x.shape, self.offs, self.device), amax
        )


@register
@dataclasses.dataclass
class GroupedDbias(Op):
    """Return the column sums of each group in fp32, in a fixed order: the gradient of a bias.

    Args:
        dy: (T, N) with ``offs``, else (G, M, N); bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G, N) fp32, the dtype of the sums; zeros for an empty group. Callers cast to the dtype of
        the bias once, after adding other parts of the gradient.
    """

    dy: Tensor
    offs: Tensor | None = None

    name: ClassVar[str] = "grouped_dbias"
    out_name: ClassVar[str] = "dbias"

    def check(self) -> None:
        check_input("dy", self.dy, self.offs)

    def outputs(self) -> list[BufferSpec]:
        groups = self.dy.shape[0] if self.offs is None else self.offs.shape[0]
        return [BufferSpec((groups, self.dy.shape[-1]), torch.float32)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        (dbias,) = outputs
        reference.grouped_dbias(
            reference.Elements(self.dy),
            Groups.from_shape(self.dy.shape, self.offs, self.device),
            dbias,
        )
