"""MXFP8: FP8 codes with an E8M0 scale per block of 32, see ``cute_kernels.reference``.

e = e8m0(fl(a * fl(1 / FP8_MAX))), rounded up; code = sat_rn_fp8(fl(x * 2^(127 - e))).
"""

from cutlass import Float32, Uint32

from ..ptx import asm, bits_as_f32
from .base import GlobalScaleRegisters
from .bytes import ByteCodec

#: A mantissa that is not zero carries into the exponent. Subnormal numbers carry only above 2^-127,
#: whose bits are 0x400000. The smallest factor and scale are 2^-127. The exponent of
#: an infinite amax is 255.
_SCALE = """{
	.reg .pred above;
	.reg .b32 v;
	mul.rn.f32 v, $2, $3;
	setp.gt.u32 above, v, 0x00400000;
	add.u32 v, v, 0x007FFFFF;
	shr.u32 v, v, 23;
	min.u32 v, v, 254;
	selp.b32 $0, v, 0, above;
	sub.u32 v, 254, $0;
	shl.b32 v, v, 23;
	max.u32 $1, v, 0x00400000;
}"""
#: ``_SCALE``, but 255, which is NaN, is stored for an infinite amax; its factor is that of 254.
_NAN_SCALE = """{
	.reg .pred above;
	.reg .b32 v;
	mul.rn.f32 v, $2, $3;
	setp.gt.u32 above, v, 0x00400000;
	add.u32 v, v, 0x007FFFFF;
	shr.u32 v, v, 23;
	selp.b32 $0, v, 0, above;
	min.u32 v, $0, 254;
	sub.u32 v, 254, v;
	shl.b32 v, v, 23;
	max.u32 $1, v, 0x00400000;
}"""
_DECODE = """{
	.reg .pred is_nan;
	.reg .b32 e;
	and.b32 e, $1, 255;
	setp.eq.u32 is_nan, e, 255;
	shl.b32 e, e, 23;
	max.u32 e, e, 0x00400000;
	selp.b32 $0, 0x7FC00000, e, is_nan;
}"""


class MXFP8Codec(ByteCodec):
    """E4M3 or E5M2 codes with a power of two per block."""

    def block_scale(self, a: Float32, global_scale: GlobalScaleRegisters) -> tuple[Uint32, Float32]:
        """Return the E8M0 byte, and the power of two that elements are multiplied with.

        With ``nan_scales`` the byte of an infinite amax is 255.
        """
        operands = [a, Float32(1.0 / self.fmt.element.max)]
        byte, factor = asm(
            _NAN_SCALE if self.fmt.nan_scales else _SCALE, [Uint32, Uint32], operands
        )
        return byte, bits_as_f32(factor)

    def decode_scales(self, pair: Uint32) -> tuple[Float32, Float32]:
        """Return the powers of two of two E8M0 bytes."""
        low, high = (bits_as_f32(asm(_DECODE, [Uint32], [word])) for word in (pair, pair >> 8))
        return low, high
