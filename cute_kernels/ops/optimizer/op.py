"""The op that updates a master weight and quantizes it."""

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
    """Take a step of AdamW on an fp32 master weight, and quantize the result. All in place.

    ``numbers`` are lr, power1, power2, scale and found_inf. power1 and power2 are beta1 and beta2
    to the power of the step. scale divides gradients, and is negative to maximize. found_inf = 1
    leaves master and moments unchanged. Let fl() be one rounding to fp32 and fma() one rounding of
    a product and a sum, as nvcc compiles the fused kernel of PyTorch 2.13:

        g = fl(grad / scale)
        p = fma(-fl(lr * weight_decay), p, p), unless weight_decay is 0
        m = fma(beta1, m, fma(-beta1, g, g))
        v = fma(beta2, v, fma(-beta2, fl(g * g), fl(g * g)))
        p = fl(p - fl(fl(fl(lr / fl(1 - power1)) * m)
                      / fl(fl(fl(sqrt(v)) / fl(sqrt(fl(1 - power2)))) + eps)))

    This takes one kernel; two if groups have amaxes, the first of which computes the amaxes of
    the new p.

    Args:
        master: p, (G, N, K) fp32, contiguous.
        exp_avg: m, like ``master``.
        exp_avg_sq: v, like ``master``.
        grad: (G, N, K) bf16, fp16 or fp32. It is not changed.
        numbers: (5,) fp32.
        out: Buffers of the directions, as for ``grouped_quantize_out``.
        format: Text of the format, which is not row-scaled.
        rowwise: As for ``grouped_quantize``.
        columnwise: As for ``grouped_quantize``.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay coefficient.
        scale: As for ``grouped_quantize``.
        seed: As for ``grouped_quantize``.
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
        """Return the quantization of the updated master."""
        return GroupedQuantize(
            master, self.format, None, amax, self.rowwise, self.columnwise, self.scale, self.seed
        )

    def capability(self) -> tuple[str, Format | None]:
        return self.quantize(self.master).capability()

    def check(self) -> None:
        """Check the arguments."""
        quantization, fp32, shape = (
            self.quantize(self.master),
            (torch.float32,),
            tuple(self.master.shape),
        )
        for name in self.written[:3]:
            tensor = getattr(self, name)
            check_tensor(name, tensor, dtypes=fp32, shape=shape)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is written in place and must be contiguous")
        check_tensor("grad", self.grad, dtypes=INPUT_DTYPES, shape=shape)
        check_tensor("numbers", self.numbers, dtypes=fp32, shape=(5,))
        same_device("master", self.device, **self.tensors())
        for name, bound in (
            ("beta1", 1),
            ("beta2", 1),
            ("eps", math.inf),
            ("weight_decay", math.inf),
        ):
            if not 0 <= getattr(self, name) < bound:
                raise ValueError(
                    f"{name} must be at least 0 and below {bound}, got {getattr(self, name)}"
                )
        global_scale = self.record.global_scale
        if global_scale is not None and global_scale.per == "row":
            raise ValueError(f"weights need a global scale per group, got {self.format}")
        quantization.check()
        check_outputs(quantization, quantization.outputs(), self.out)

    def outputs(self) -> list[BufferSpec]:
        spec = BufferSpec(tuple(self.master.shape), torch.float32)
        return [spec, spec, spec, *self.quantize(self.master).outputs()]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        state, buffers = outputs[:3], outputs[3:]
        adamw(state, self.grad, self.numbers, (self.beta1, self.beta2, self.eps, self.weight_decay))
        self.quantize(state[0]).run_reference(buffers)
