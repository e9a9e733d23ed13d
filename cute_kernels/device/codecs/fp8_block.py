"""FP8 with an fp32 scale per block of 128, with the bits of ``reference/codecs/fp8_block.py``.

The reference states each rounding and their order. This module computes the same bits.

Powers of two need no division. FP8_MAX is 1.75 times a power of two, 448 of 2^8 and 57344 of 2^15.
So with a = m 2^e the quotient FP8_MAX / a is at least that power times 2^-e just if m <= 1.75. No
rounding crosses it: below such an m it stays under 1 - 2^-24, the number before one. In bits, where
an exponent counts 2^23, the quotient is

  top - (bits of a + 0x1FFFFF without mantissa)

with the carry of 0x1FFFFF into the exponent just if the mantissa is above that of 1.75.
"""

from cutlass import Float32, Uint32

from ...formats import FP8Block
from ..ptx import asm, bits_as_f32, f32_as_bits
from .base import GlobalScaleRegisters, nan_if_infinite
from .bytes import ByteCodec

_MANTISSA, _BIAS = 23, 127
#: Bits of the largest number of each input dtype, which replaces an infinite quotient.
_LARGEST_BITS = {"bfloat16": 0x7F7F0000, "float16": 0x477FE000, "float32": 0x7F7FFFFF}
_POW2 = """{
	.reg .pred plain;
	.reg .b32 s, t;
	add.u32 s, $2, 0x1FFFFF;
	and.b32 s, s, 0x7F800000;
	sub.u32 s, $3, s;
	min.u32 s, s, 0x7F000000;
	sub.u32 t, $2, 1;
	setp.lt.u32 plain, t, 0x7F7FFFFF;
	selp.b32 $0, s, 0x3F800000, plain;
	sub.u32 t, 0x7F000000, $0;
	max.u32 $1, t, 0x00400000;
}"""
_ANY = """{
	.reg .pred p;
	.reg .f32 s;
	div.rn.f32 s, $3, $2;
	setp.eq.f32 p, s, 0f7F800000;
	selp.f32 s, $4, s, p;
	setp.eq.f32 p, $2, 0f00000000;
	selp.f32 s, 0f3F800000, s, p;
	setp.eq.f32 p, $2, 0f7F800000;
	selp.f32 $0, 0f3F800000, s, p;
	rcp.rn.f32 $1, $0;
}"""


class FP8BlockCodec(ByteCodec):
    """E4M3 or E5M2 codes with an fp32 scale per block."""

    fmt: FP8Block

    def block_scale(self, a: Float32, global_scale: GlobalScaleRegisters) -> tuple[Uint32, Float32]:
        """Return the bits of scale_inv, and the scale FP8_MAX / a.

        The scale is 1 if ``a`` is 0 or infinite. With ``nan_scales`` scale_inv is NaN if ``a`` is
        infinite.
        """
        if self.fmt.amax_epsilon:
            a = asm("max.f32 $0, $1, $2;", [Float32], [a, Float32(self.fmt.amax_epsilon)])
        largest = self.fmt.element.max
        if not self.fmt.pow2_scales:
            limit = bits_as_f32(Uint32(_LARGEST_BITS[self.dtype]))
            scale, inverse = asm(_ANY, [Float32, Float32], [a, Float32(largest), limit])
            return self._stored(inverse, a), scale
        exponent = int(largest).bit_length() - 1
        top = Uint32((2 * _BIAS + exponent) << _MANTISSA)
        scale, inverse = asm(_POW2, [Uint32, Uint32], [f32_as_bits(a), top])
        return self._stored(bits_as_f32(inverse), a), bits_as_f32(scale)

    def _stored(self, inverse: Float32, a: Float32) -> Uint32:
        """Return the bits of scale_inv as they are stored."""
        return f32_as_bits(nan_if_infinite(a, inverse) if self.fmt.nan_scales else inverse)
