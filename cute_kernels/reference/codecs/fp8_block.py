"""FP8 with an fp32 scale per block of 128, exact to the bit: TransformerEngine's block scaling.

With a the amax of a block and fl() one rounding to fp32:

  a     = max(a, amax_epsilon)
  scale = fl(FP8_MAX / a), or the largest number of the input's dtype if that is infinite,
          rounded down to a power of two with pow2_scales; or 1 where a is 0 or infinite
  code  = fp8(fl(x * scale))                     saturating, to nearest even
  value = fl(code * scale_inv), scale_inv = fl(1 / scale), the stored scale

NaN never reaches an amax; as an element it becomes the code of NaN, 0x7F. Infinities saturate;
with ``nan_scales`` the scale_inv of their block is NaN.
"""

import torch
from torch import Tensor

from ...formats import Format, FP8Block
from ..conversions import f32, mark_nan
from .base import Codec

#: Mask of sign and exponent of fp32: without its mantissa, a number is rounded to a power of two.
_NO_MANTISSA = ~0x7FFFFF


class FP8BlockCodec(Codec):
    """Codec of FP8 with fp32 block scales."""

    format = FP8Block

    def __init__(self, fmt: Format, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(fmt, dtype)
        assert isinstance(fmt, FP8Block)
        self._epsilon, self._is_pow2 = f32(fmt.amax_epsilon), fmt.pow2_scales

    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored scale_inv and the scale of each block."""
        a = a.clamp_min(self._epsilon)
        # Not ``max / a``: torch computes that as a reciprocal and a product, rounding twice.
        scale = torch.full_like(a, self.fmt.element.max).div_(a)
        scale = scale.masked_fill_(scale.isinf(), torch.finfo(self.dtype).max)
        is_inf = a.isinf()
        scale = scale.masked_fill_((a == 0) | is_inf, 1.0)
        if self._is_pow2:
            scale.view(torch.int32).bitwise_and_(_NO_MANTISSA)
        scale_inv = scale.reciprocal()
        if self.fmt.nan_scales:
            mark_nan(scale_inv, is_inf)
        return scale_inv, scale

    def scale_values(self, stored: Tensor) -> Tensor:
        return stored
