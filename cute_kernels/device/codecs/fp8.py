"""FP8 with one scale per group: from the amax of this tensor ("current"), or given ("delayed").

  scale     = min(fl(FP8_MAX / amax), FMAX), or 1 where the amax is 0, infinite or NaN; or as given
  scale_inv = fl(1 / scale)
  code      = sat_rn_fp8(fl(x * scale))

There are no blocks. Given scales come from ``kernels/quantize/delayed_scaling.py``. It applies the
same formula to a history of amaxes, but keeps the previous scale where this one has 1.
"""

from typing import NamedTuple

from cutlass import Float32, Uint32

from ..ptx import asm, bits_as_f32
from .base import nan_if_infinite
from .bytes import ByteCodec

_FMAX_BITS = 0x7F7FFFFF


class FP8GlobalScale(NamedTuple):
    """Global scale in registers.

    Attributes:
        scale: fp32 factor of an element.
        scale_inv: fp32 factor of a code.
    """

    scale: Float32
    scale_inv: Float32


class FP8Codec(ByteCodec):
    """E4M3 or E5M2 codes with one scale per group."""

    def global_scale(self, amax: Float32) -> FP8GlobalScale:
        """Return the scale and its reciprocal.

        The scale is at most FMAX, and 1 if the amax is 0, infinite or NaN. If the caller gives
        scales, ``amax`` is the scale. With ``nan_scales`` the reciprocal is NaN if the amax is
        infinite; for a given scale it becomes NaN once the amax is known (``AmaxKernels.merge``).
        """
        if self.fmt.has_given_scale:
            return FP8GlobalScale(amax, asm("rcp.rn.f32 $0, $1;", [Float32], [amax]))
        text = """{
			.reg .pred ok;
			.reg .f32 s;
			div.rn.f32 s, $3, $2;
			min.f32 s, s, $4;
			setp.lt.f32 ok, $2, 0f7F800000;
			selp.f32 s, s, 0f3F800000, ok;
			setp.neu.f32 ok, $2, 0f00000000;
			selp.f32 $0, s, 0f3F800000, ok;
			rcp.rn.f32 $1, $0;
		}"""
        limit, fmax = Float32(self.fmt.element.max), bits_as_f32(Uint32(_FMAX_BITS))
        scale, scale_inv = asm(text, [Float32, Float32], [amax, limit, fmax])
        return FP8GlobalScale(
            scale, nan_if_infinite(amax, scale_inv) if self.fmt.nan_scales else scale_inv
        )

    def zero_global_scale(self) -> FP8GlobalScale:
        """Return zeros."""
        return FP8GlobalScale(Float32(0.0), Float32(0.0))

    def global_scale_outputs(self, global_scale: FP8GlobalScale) -> tuple[Float32, ...]:
        """Return the stored numbers, in order of ``global_scale_names``."""
        return tuple(getattr(global_scale, name) for name in self.global_scale_names)

    def block_scale(self, a: Float32, global_scale: FP8GlobalScale) -> tuple[None, Float32]:
        """Return no scale, and the scale of the group as the encode factor."""
        return None, global_scale.scale
