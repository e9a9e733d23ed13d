"""The largest magnitude along a dimension."""

import math

import torch
from torch import Tensor

from .conversions import mark_nan


def absmax(x: Tensor, dim: int = -1, *, nan: bool = False) -> Tensor:
    """Return the largest |x| along ``dim``, fp32, or 0 for an empty slice.

    It ignores NaN, as the hardware's ``max`` does. With ``nan`` it keeps NaN, as ``max.NaN`` does.
    """
    if x.shape[dim] == 0:
        return x.new_zeros(x.shape[:dim] + x.shape[dim:][1:], dtype=torch.float32)
    magnitude = x.abs()
    amax = magnitude.amax(dim)
    if nan:
        return mark_nan(amax.float(), amax.isnan())
    if bool(amax.isnan().any()):
        amax = magnitude.nan_to_num_(nan=0.0, posinf=math.inf).amax(dim)
    return amax.float()
