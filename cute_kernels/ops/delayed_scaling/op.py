"""The op that updates the scales of delayed scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.formats import Format
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.records import check_choice

from ..checks import check_tensor, same_device
from ..op import FormatOp
from ..registration import register_inplace

#: What the scale follows from: the largest amax of the history, or the last one.
ALGORITHMS = ("max", "most_recent")
_SMALLEST_NORMAL, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_margin(margin: int, fmt: Format) -> None:
    """``margin`` must be an integer, and the format's largest number * 2^-margin a normal fp32."""
    if isinstance(margin, bool) or not isinstance(margin, (int, torch.SymInt)):
        raise TypeError(f"margin must be an integer, got {margin!r}")
    largest = fmt.element.max
    # Far from what a power of two overflows in Python.
    if abs(margin) > 1000 or not _SMALLEST_NORMAL <= largest * 2.0**-margin <= _LARGEST:
        raise ValueError(
            f"margin must leave {largest} * 2^-margin a normal fp32 number, got {margin}"
        )


@register_inplace
@dataclasses.dataclass
class DelayedScalingUpdate(FormatOp):
    """Roll the amax history of each slot, and make its next scale; both are written in place.

    A slot is a column of the history: a group of one tensor. For each, with fl() one rounding to
    fp32 (TransformerEngine's fused update):

      last = amax where that is given and not 0, else history[0]
      if last != 0:
        history = (history[1], ..., history[L-1], last)
        A = max(history) passing over NaN, or last for "most_recent"
        if A is finite and A > 0: scale = min(fl(fl(FP8_MAX * 2^-margin) / A), FMAX)
        history[0] = 0

    so the largest of the last L amaxes counts. Where ``last`` is 0 nothing was seen, and nothing
    changes. An infinite A keeps the scale, until the infinity has left the history.

    Args:
        amax_history: (L, n) fp32, contiguous; row 0 takes the amaxes of the present step, row 1
            is the oldest.
        scale: (n,) fp32, contiguous.
        format: the text of the format; its element decides FP8_MAX.
        amax: (n,) fp32 to use instead of row 0, such as one that was reduced over processes;
            its sign is dropped.
        margin: FP8_MAX is divided by two to this power.
        algorithm: ``"max"`` or ``"most_recent"``.
        skip_nonfinite: a ``last`` that is infinite or NaN counts as 0, and row 0 becomes
            ``last``.
    """

    amax_history: Tensor
    scale: Tensor
    format: str
    amax: Tensor | None = None
    margin: int = 0
    algorithm: str = "max"
    skip_nonfinite: bool = False

    name: ClassVar[str] = "delayed_scaling_update"
    written: ClassVar[tuple[str, ...]] = ("amax_history", "scale")
    alignment: ClassVar[int] = 4

    @property
    def largest(self) -> float:
        """fl(FP8_MAX * 2^-margin); exact where ``check`` passes."""
        return self.record.element.max * 2.0**-self.margin

    def check(self) -> None:
        fp32 = (torch.float32,)
        check_tensor("amax_history", self.amax_history, dtypes=fp32, ndim=(2,))
        if self.amax_history.shape[0] < 1:
            raise ValueError(
                f"amax_history must have at least one row, got shape {tuple(self.amax_history.shape)}"
            )
        slots = self.amax_history.shape[1:]
        check_tensor("scale", self.scale, dtypes=fp32, shape=slots)
        for name in self.written:
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} is written in place and must be contiguous")
        if self.amax is not None:
            check_tensor("amax", self.amax, dtypes=fp32, shape=slots)
        same_device("amax_history", self.device, **self.tensors())
        if not self.record.has_given_scale:
            raise ValueError(f"format must take scales from the caller, got {self.format!r}")
        check_margin(self.margin, self.record)
        check_choice("algorithm", self.algorithm, ALGORITHMS)

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec(tuple(t.shape), t.dtype) for t in (self.amax_history, self.scale)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        history, scale = outputs
        reference.delayed_scaling_update(
            history, scale, self.amax, self.largest, self.algorithm == "max", self.skip_nonfinite
        )
