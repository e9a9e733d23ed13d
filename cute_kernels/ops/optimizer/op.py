"""The op that updates a master and quantizes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.formats import Format
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.reference.adamw import adamw

from ..checks import INPUT_DTYPES, check_tensor, same_device
from ..op import FormatOp
from ..quantize.op import GroupedQuantize
from ..registration import check_outputs, register_inplace


@register_inplace
@dataclasses.dataclass
class AdamWQuantize(FormatOp):
    """A step of AdamW on an fp32 master, and ``grouped_quantize`` of what it makes; all is written
    in place.

    ``numbers`` are lr, power1, power2, scale and found_inf: beta1 and beta2 to the power of the
    step, what gradients are divided by, negative to maximize, and 1 to leave master and moments.
    With fl() one rounding to fp32 and fma() one of a product and a sum, as nvcc compiles the fused
    kernel of PyTorch 2.13:

      g = fl(grad / scale) p = fma(-fl(lr * weight_decay), p, p), unless weight_decay is 0 m =
      fma(beta1, m, fma(-beta1, g, g)) v = fma(beta2, v, fma(-beta2, fl(g * g), fl(g * g))) p = fl(p
      - fl(fl(fl(lr / fl(1 - power1)) * m) / fl(fl(fl(sqrt(v)) / fl(sqrt(fl(1 - power2)))) + eps)))

    One kernel; where groups have amaxes two, of which the first takes them of the p that it makes.

    Args:
        master: p, (G, N, K) fp32, contiguous, like ``exp_avg``, m, and ``exp_avg_sq``, v.
        grad: (G, N, K) bf16, fp16 or fp32; it stays as it is.
        numbers: (5,) fp32.
        out: the buffers of the directions, as of ``grouped_quantize_out``.
        format: the text of the format, not a row-scaled one.
        rowwise: as of ``grouped_quantize``, like ``columnwise``, ``scale`` and ``seed``.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    numbers: Tensor
    out: list[Tensor]
    format: str
    rowwise: bool
    columnwise: bool
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: Tensor | None = None
    seed: Tensor | None = None

    name: ClassVar[str] = "adamw_quantize"
    written: ClassVar[tuple[str, ...]] = ("master", "exp_avg", "exp_avg_sq", "out")

    def quantize(self, master: Tensor, amax: Tensor | None = None) -> GroupedQuantize:
        """What is done behind the step."""
        return GroupedQuantize(
            master, self.format, None, amax, self.rowwise, self.columnwise, self.scale, self.seed
        )

    def capability(self) -> tuple[str, Format | None]:
        return self.quantize(self.master).capability()

    def check(self) -> None:
        after, fp32, shape = self.quantize(self.master), (torch.float32,), tuple(self.master.shape)
        for name in self.written[:3]:
            held = getattr(self, name)
            check_tensor(name, held, dtypes=fp32, shape=shape)
            if not held.is_contiguous():
                raise ValueError(f"{name} is written in place and must be contiguous")
        check_tensor("grad", self.grad, dtypes=INPUT_DTYPES, shape=shape)
        check_tensor("numbers", self.numbers, dtypes=fp32, shape=(5,))
        same_device("master", self.device, **self.tensors())
        for name, end in (
            ("beta1", 1),
            ("beta2", 1),
            ("eps", math.inf),
            ("weight_decay", math.inf),
        ):
            if not 0 <= getattr(self, name) < end:
                raise ValueError(
                    f"{name} must be at least 0 and below {end}, got {getattr(self, name)}"
                )
        level = self.record.global_scale
        if level is not None and level.per == "row":
            raise ValueError(f"weights have second levels of groups, which {self.format} has not")
        after.check()
        check_outputs(after, after.outputs(), self.out)

    def outputs(self) -> list[BufferSpec]:
        held = BufferSpec(tuple(self.master.shape), torch.float32)
        return [held, held, held, *self.quantize(self.master).outputs()]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        held, buffers = outputs[:3], outputs[3:]
        adamw(held, self.grad, self.numbers, (self.beta1, self.beta2, self.eps, self.weight_decay))
        self.quantize(held[0]).run_reference(buffers)
