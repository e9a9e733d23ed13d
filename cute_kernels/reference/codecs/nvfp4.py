"""NVFP4 quantization and its inverse, exact to the bit.

With g the amax of a group or of a row, a the amax of a block, and fl() one rounding to fp32:

    S_enc = min(fl(2688 / g), FMAX), or 1 where g is 0 or infinite
    S_dec = fl(1 / S_enc)
    s     = e4m3(min(fl(a * fl(S_enc * fl(1/6))), FMAX))                  the stored block scale
    enc   = min(fl(1 / fl(s * S_dec)), FMAX)
    code  = e2m1(fl(x * enc))
    value = fl(code * fl(fl(s * g) * fl(1/2688)))                          what a code decodes to

This is the order of TransformerEngine's PyTorch reference. ``a * (S_enc / 6)`` and ``(a / 6) *
S_enc`` give different bytes, so the order is part of the format. NaN never reaches an amax; as an
element it becomes code 7. Where s rounds to zero, enc is FMAX and the value decodes to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4
from cute_kernels.reference.codecs.base import Codec
from cute_kernels.reference.conversions import decode_e4m3, encode_e4m3, f32

__all__ = ["NVFP4Codec"]

_FMAX = torch.finfo(torch.float32).max
_RCP_ELEMENT_MAX = f32(1.0 / NVFP4.element.max)


class NVFP4Codec(Codec):
    """See the module's docstring."""

    format = NVFP4

    def level(self, amax: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        return (amax,)

    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s_dec, mult = _second_level(g)
        scales = encode_e4m3((a * mult).clamp_max_(_FMAX))
        enc = (decode_e4m3(scales) * s_dec).reciprocal_().clamp_max_(_FMAX)
        return scales, enc

    def scale_values(self, stored: Tensor) -> Tensor:
        return decode_e4m3(stored)


def _second_level(g: Tensor) -> tuple[Tensor, Tensor]:
    """(S_dec, fl(S_enc * fl(1/6))) of amaxes ``g``."""
    # Not ``tensor_max / g``: torch computes that as a reciprocal and a product, rounding twice.
    s_enc = torch.full_like(g, NVFP4.tensor_max).div_(g).clamp_max_(_FMAX).nan_to_num_(nan=_FMAX)
    s_enc = s_enc.masked_fill((g == 0) | (s_enc == 0), 1.0)
    return s_enc.reciprocal(), s_enc * _RCP_ELEMENT_MAX
