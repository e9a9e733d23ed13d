"""A step of AdamW as torch's fused CUDA kernel makes it (``fused_adam_utils.cuh``), to the bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .fma import fma


def adamw(
    held: Sequence[Tensor], grad: Tensor, numbers: Tensor, constants: Sequence[float]
) -> None:
    """Update ``held``, master and moments, as ``ops.adamw_quantize`` states; by beta1, beta2, eps
    and weight_decay.
    """
    p, m, v = held
    lr, power1, power2, scale, found_inf = numbers
    beta1, beta2, eps, decay = numbers.new_tensor(constants)
    g = grad.float() / scale
    if decay:  # in fp32
        p = fma(-(lr * decay), p, p)
    square = g * g
    m = fma(beta1, m, fma(-beta1, g, g))
    v = fma(beta2, v, fma(-beta2, square, square))
    p = p - lr / (1 - power1) * m / (_sqrt(v) / _sqrt(1 - power2) + eps)
    # What arithmetic on a GPU gives.
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=p.device).view(torch.float32)
    for old, new in zip(held, (p, m, v), strict=True):
        old.copy_(torch.where(found_inf == 1, old, torch.where(new.isnan(), nan, new)))


def _sqrt(x: Tensor) -> Tensor:
    # On CPUs that of fp32 is off by a bit now and then.
    return x.double().sqrt().float()
