"""The update of delayed scaling: the next scales from the amaxes of earlier tensors."""

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
    """Roll the (L, n) history of each slot and make its next (n,) scale, in place.

    ``amax`` is that of the step where it is not 0; its sign is dropped. Row 0 is where it is 0, and
    without it. ``largest`` is what the amax is to be scaled to, an fp32 number; with ``is_max``
    that of the last L, else the last. With ``skip_nonfinite`` an amax of the step that is infinite
    or NaN counts as 0, and row 0 then is 0.
    """
    last = amax_history[0]
    if amax is not None:
        last = torch.where(amax == 0, last, amax.abs())
    if skip_nonfinite:
        last = last.nan_to_num(nan=0.0, posinf=0.0)
        amax_history[0] = last
    rolled = torch.cat([amax_history[1:], last.unsqueeze(0)])
    # A NaN is passed over, as ``fmax`` does; alone it leaves the scale.
    basis = rolled.nan_to_num(nan=0.0, posinf=math.inf).amax(dim=0) if is_max else last
    # Not ``largest / basis``: torch computes that as a reciprocal and a product, rounding twice.
    new = torch.full_like(basis, largest).div_(basis).clamp_max_(_FMAX)
    is_rolled = last != 0
    is_scaled = is_rolled & basis.isfinite() & (basis > 0)
    rolled[0] = 0
    amax_history.copy_(torch.where(is_rolled, rolled, amax_history))
    scale.copy_(torch.where(is_scaled, new, scale))
