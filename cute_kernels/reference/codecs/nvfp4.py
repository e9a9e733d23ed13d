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
element it becomes code 7. With ``nan_scales`` it does, so that g, a and s are NaN, and S_enc and
enc are FMAX. If s rounds to zero, enc is FMAX and the value decodes to zero.

With ``four_over_six``, 2688 becomes 6 * e4m3_max throughout. A block is encoded with two scales:
one maps its amax to 6, the other to 4. The codes with the smaller error are kept; if the errors are
equal or NaN, the codes of s6:

  base = fl(fl(a / 6) * S_enc)                                          a true division
  s6   = e4m3(base),  s4 = e4m3(fl(base * 1.5))
  d    = fl(fl(fl(fl(code * s) * g) / (6 * e4m3_max)) - x)              of each element
  err  = the sum in fp32, one element after the other, of |d| or fl(d * d)

In a square block these are the errors of its rows, added in fp32 as a tree: row i and row i + 8,
then i + 4, i + 2 and i + 1.
"""

import torch
from torch import Tensor

from ...formats import E4M3, NVFP4
from ..conversions import decode, encode, encode_e2m1, f32, round_e2m1
from .base import Codec

_FMAX = torch.finfo(torch.float32).max
_RCP_ELEMENT_MAX = f32(1.0 / NVFP4.element.max)


class NVFP4Codec(Codec):
    """Codec of NVFP4."""

    format = NVFP4
    fmt: NVFP4

    def global_scale_vectors(self, amax: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        return (amax,)

    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s_enc = self._s_enc(g)
        scales = encode(E4M3, (a * (s_enc * _RCP_ELEMENT_MAX)).clamp_max_(_FMAX))
        return scales, _enc(scales, s_enc)

    def encode(
        self, blocks: Tensor, a: Tensor, g: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return codes and scales; with ``four_over_six``, of the scale with the smaller error."""
        if not self.fmt.four_over_six:
            return super().encode(blocks, a, g, random)
        # Magnitudes suffice, since errors have no sign; one per leading index.
        magnitudes = blocks.movedim(-1, 0).abs().contiguous()
        s_enc = self._s_enc(g)
        # Divide by a tensor: for a number, torch may multiply by the reciprocal instead.
        base = a / torch.full_like(a, NVFP4.element.max) * s_enc
        six, four = encode(E4M3, base), encode(E4M3, base * 1.5)
        is_better = self._error(magnitudes, four, s_enc, g) < self._error(magnitudes, six, s_enc, g)
        scales = torch.where(is_better, four, six)
        return encode_e2m1(blocks * _enc(scales, s_enc).unsqueeze(-1)), scales

    def scale_values(self, stored: Tensor) -> Tensor:
        return decode(E4M3, stored)

    def _s_enc(self, g: Tensor) -> Tensor:
        # Not ``tensor_max / g``: torch computes that as a reciprocal and a product, rounding twice.
        s_enc = torch.full_like(g, self.fmt.tensor_max).div_(g).clamp_max_(_FMAX)
        s_enc = s_enc.nan_to_num_(nan=_FMAX)
        return s_enc.masked_fill((g == 0) | (s_enc == 0), 1.0)

    def _error(self, magnitudes: Tensor, scales: Tensor, s_enc: Tensor, g: Tensor) -> Tensor:
        """Return errors of blocks (16, ...) of |x| that are encoded with stored scales (...)."""
        values = round_e2m1(magnitudes * _enc(scales, s_enc)).mul_(decode(E4M3, scales)).mul_(g)
        d = values.div_(torch.full_like(g, self.fmt.tensor_max)).sub_(magnitudes)
        error = d.abs_() if self.fmt.four_over_six_error == "mae" else d.square_()
        return _square_sum(error) if self.fmt.is_2d else _sum(error)


def _enc(scales: Tensor, s_enc: Tensor) -> Tensor:
    """Return the factors of elements for stored scales."""
    factors = (decode(E4M3, scales) * s_enc.reciprocal()).reciprocal_()
    # As the hardware's ``min`` does. A scale is NaN if its amax is, see ``Format.amaxes_keep_nan``.
    return factors.nan_to_num_(nan=_FMAX, posinf=_FMAX)


def _sum(errors: Tensor) -> Tensor:
    """Return sums (...) of errors (16, ...), added one after the other."""
    first_error, *errors_after = errors.unbind()
    total = first_error.clone()
    for error in errors_after:
        total += error
    return total


def _square_sum(errors: Tensor) -> Tensor:
    """Return sums over square blocks of errors (16 rows, ..., K), for each column of a block."""
    rows = len(errors)
    total = _sum(
        errors.unflatten(-1, (-1, rows)).movedim(-1, 0).contiguous()
    )  # (16 rows, ..., K / 16)
    while len(total) > 1:
        half = len(total) // 2
        total = total[:half] + total[half:]
    return total[0].repeat_interleave(rows, dim=-1)
