"""The largest magnitude along a dimension."""

import math

import torch
from torch import Tensor

from .conversions import mark_nan


def absmax(x: Tensor, dim: int = -1, *, nan: bool = False) -> Tensor:
    """Return the largest |x| along ``dim`` in fp32; 0 for an empty slice.

    Args:
        x: Any shape and floating-point dtype.
        dim: The dimension that is reduced.
        nan: True returns NaN for a slice with a NaN, as PTX ``max.NaN`` does. False ignores NaN, as
            PTX ``max`` does.
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
