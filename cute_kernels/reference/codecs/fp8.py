"""FP8 with one scale per group, exact to the bit: TransformerEngine's current and delayed scaling.

With g the amax of a group and fl() one rounding to fp32:

  scale     = min(fl(FP8_MAX / g), FMAX), or 1 where g is 0, infinite or NaN; delayed: as given
  scale_inv = fl(1 / scale)
  code      = fp8(fl(x * scale))                                saturating, to nearest even
  value     = fl(code * scale_inv)                              what a code decodes to

Given scales come from ``reference.delayed_scaling_update``. It applies the same formula to a
history of amaxes, but keeps the previous scale where the first line has 1.

NaN never reaches an amax; as an element it becomes the code of NaN, 0x7F. With ``nan_scales``
scale_inv is NaN where g is infinite, also where the scale is given.
"""

import torch
from torch import Tensor

from ...formats import FP8
from ..conversions import mark_nan
from .base import Codec

_FMAX = torch.finfo(torch.float32).max


class FP8Codec(Codec):
    """Codec of FP8 with one scale per group."""

    format = FP8

    def global_scale_vectors(self, amax: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return scale_inv, scale and amax."""
        scale = self._scale(amax) if scale is None else scale
        scale_inv = scale.reciprocal()
        if self.fmt.nan_scales:
            mark_nan(scale_inv, amax.isinf())
        return scale_inv, scale, amax

    def factors(self, a: Tensor, g: Tensor) -> tuple[None, Tensor]:
        return None, g if self.fmt.has_given_scale else self._scale(g)

    def scale_values(self, stored: Tensor) -> Tensor:
        raise TypeError("FP8 has no block scales")

    def _scale(self, g: Tensor) -> Tensor:
        # Not ``max / g``: torch computes that as a reciprocal and a product, rounding twice.
        scale = torch.full_like(g, self.fmt.element.max).div_(g).clamp_max_(_FMAX)
        return scale.masked_fill_((g == 0) | ~g.isfinite(), 1.0)
