"""Update of delayed scaling: the next scales from the amaxes of earlier tensors.

With b the newest amax or the largest one of the history, the next scale is min(fl(largest / b),
FMAX), or the previous scale where b is 0, infinite or NaN. ``codecs/fp8.py`` has the formula of
current scaling, which has no previous scale and takes 1.
"""

import math

import torch
from torch import Tensor

_FMAX = torch.finfo(torch.float32).max


def delayed_scaling_update(
    amax_history: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    largest: float,
    is_max: bool,
    skip_nonfinite: bool = False,
) -> None:
    """Roll the (L, n) history of each slot and compute its next (n,) scale, in place.

    Args:
        amax_history: (L, n) fp32. Row 0 is the amax of this step.
        scale: (n,) fp32.
        amax: (n,) fp32. Amax of this step, or 0 to use row 0. Its sign is dropped.
        largest: Number that the amax is scaled to.
        is_max: Use the largest amax of the last L steps instead of the last one.
        skip_nonfinite: Treat an infinite or NaN amax of this step as 0. Row 0 then becomes 0.
    """
    newest = amax_history[0]
    if amax is not None:
        newest = torch.where(amax == 0, newest, amax.abs())
    if skip_nonfinite:
        newest = newest.nan_to_num(nan=0.0, posinf=0.0)
        amax_history[0] = newest
    rolled = torch.cat([amax_history[1:], newest.unsqueeze(0)])
    # The maximum ignores NaN, as ``fmax`` does; NaN alone leaves the scale unchanged.
    basis = rolled.nan_to_num(nan=0.0, posinf=math.inf).amax(dim=0) if is_max else newest
    # Not ``largest / basis``: torch computes that as a reciprocal and a product, rounding twice.
    new = torch.full_like(basis, largest).div_(basis).clamp_max_(_FMAX)
    is_rolled = newest != 0
    is_scaled = is_rolled & basis.isfinite() & (basis > 0)
    rolled[0] = 0
    amax_history.copy_(torch.where(is_rolled, rolled, amax_history))
    scale.copy_(torch.where(is_scaled, new, scale))
