"""A step of AdamW with the bits of torch's fused CUDA kernel (``fused_adam_utils.cuh``)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .fma import fma


def adamw(
    state: Sequence[Tensor], grad: Tensor, numbers: Tensor, constants: Sequence[float]
) -> None:
    """Update master and moments as ``ops.adamw_quantize`` states.

    Args:
        state: Master, first and second moment, written in place.
        grad: Gradient.
        numbers: lr, power1, power2, scale and found_inf.
        constants: beta1, beta2, eps and weight_decay.
    """
    p, m, v = state
    lr, power1, power2, scale, found_inf = numbers
    beta1, beta2, eps, decay = numbers.new_tensor(constants)
    g = grad.float() / scale
    if decay:  # in fp32
        p = fma(-(lr * decay), p, p)
    square = g * g
    m = fma(beta1, m, fma(-beta1, g, g))
    v = fma(beta2, v, fma(-beta2, square, square))
    p = p - lr / (1 - power1) * m / (_sqrt(v) / _sqrt(1 - power2) + eps)
    # The NaN of arithmetic on a GPU.
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=p.device).view(torch.float32)
    for old, new in zip(state, (p, m, v), strict=True):
        old.copy_(torch.where(found_inf == 1, old, torch.where(new.isnan(), nan, new)))


def _sqrt(x: Tensor) -> Tensor:
    # The fp32 square root of CPUs is sometimes off by one bit.
    return x.double().sqrt().float()
