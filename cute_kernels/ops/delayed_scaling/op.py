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

#: Amax that determines the scale: the largest of the history, or the most recent one.
ALGORITHMS = ("max", "most_recent")
_SMALLEST_NORMAL, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_margin(margin: int, fmt: Format) -> None:
    """Check that ``margin`` is an integer that leaves a normal fp32 number of the largest one."""
    if isinstance(margin, bool) or not isinstance(margin, (int, torch.SymInt)):
        raise TypeError(f"margin must be an integer, got {margin!r}")
    largest = fmt.element.max
    # The bound of 1000 keeps the power of two from overflowing in Python.
    if abs(margin) > 1000 or not _SMALLEST_NORMAL <= largest * 2.0**-margin <= _LARGEST:
        raise ValueError(
            f"margin must leave {largest} * 2^-margin a normal fp32 number, got {margin}"
        )


@register_inplace
@dataclasses.dataclass
class DelayedScalingUpdate(FormatOp):
    """Roll the amax history of each slot, and compute its next scale. Both in place.

    A slot is a column of the history: one group of one tensor. For each slot, with fl() one
    rounding to fp32 (TransformerEngine's fused update):

        last = amax if it is given and not 0, else history[0]
        if last != 0:
          history = (history[1], ..., history[L-1], last)
          A = max(history) ignoring NaN, or last for "most_recent"
          if A is finite and A > 0: scale = min(fl(fl(FP8_MAX * 2^-margin) / A), FMAX)
          history[0] = 0

    So the largest of the last L amaxes counts. If ``last`` is 0, the slot was not used in this
    step, and nothing changes. An infinite A keeps the scale until the infinity has left the
    history.

    Args:
        amax_history: (L, n) fp32, contiguous. Row 0 collects the amaxes of this step, row 1 is the
            oldest.
        scale: (n,) fp32, contiguous.
        format: Text of the format. Its element determines FP8_MAX.
        amax: (n,) fp32 to use instead of row 0, such as an amax that was reduced over processes.
            Its sign is dropped.
        margin: FP8_MAX is divided by two to this power.
        algorithm: ``"max"`` or ``"most_recent"``.
        skip_nonfinite: Treat an infinite or NaN ``last`` as 0. Row 0 becomes ``last``.
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
        """fl(FP8_MAX * 2^-margin); exact if ``check`` passes."""
        return self.record.element.max * 2.0**-self.margin

    def check(self) -> None:
        """Check the arguments."""
        fp32 = (torch.float32,)
        check_tensor("amax_history", self.amax_history, dtypes=fp32, ndim=(2,))
        if self.amax_history.shape[0] < 1:
            raise ValueError(
                "amax_history must have at least one row, "
                f"got shape {tuple(self.amax_history.shape)}"
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
