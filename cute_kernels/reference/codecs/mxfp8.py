"""MXFP8, exact to the bit: FP8 codes with a power of two per block. Source: OCP Microscaling v1.0.

With a the amax of a block and fl() one rounding to fp32:

  e     = e8m0(fl(a * fl(1 / FP8_MAX)))          the stored scale 2^(e - 127), rounded up
  code  = fp8(fl(x * 2^(127 - e)))               saturating, to nearest even
  value = fl(code * 2^(e - 127))                 what a code decodes to

``e`` is 254 for an infinite amax and 0 for an amax up to FP8_MAX * 2^-127, including zero. 2^-127
is subnormal in fp32 and is not flushed. NaN never reaches an amax. As an element it becomes the
code of NaN, 0x7F. Infinities saturate. With ``nan_scales`` their block's e is stored as 255, which
is NaN.
"""

import torch
from torch import Tensor

from ...formats import E8M0, MXFP8, Format
from ..conversions import decode, encode_e8m0, f32
from .base import Codec

#: The sum of the E8M0 codes of a power of two and of its inverse.
_INVERSE = 254
#: The E8M0 code of NaN.
_NAN = 255


class MXFP8Codec(Codec):
    """Codec of MXFP8."""

    format = MXFP8

    def __init__(self, fmt: Format, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(fmt, dtype)
        self._rcp_max = f32(1.0 / fmt.element.max)

    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the E8M0 codes of the block scales, and the inverse scales."""
        # An amax is never NaN, so that no code is 255.
        stored = encode_e8m0(a * self._rcp_max)
        factors = decode(E8M0, _INVERSE - stored)
        if self.fmt.nan_scales:
            stored = stored.masked_fill(a.isinf(), _NAN)
        return stored, factors

    def scale_values(self, stored: Tensor) -> Tensor:
        return decode(E8M0, stored)
