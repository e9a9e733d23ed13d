"""Codes to the bf16 or fp16 numbers that a tensor core multiplies: code times block scale.

Each number is rounded to nearest even once from fp32. The product of a 4-bit code and its E4M3
scale is exact in both types. So is every byte code without a block scale, and in bf16 a byte code
times a power of two, except at the limits of its range.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32

from cute_kernels.device.codecs import CODECS

from ...formats import Format
from ...records import UnsupportedError
from ..convert import pack_words
from ..ptx import asm
from .base import Codec

#: PTX of an E4M3 scale in a word as a pair of fp16, or times 2^112 as a pair of bf16.
_SCALE = """{{
	.reg .b16 low, high;
	.reg .b32 pair;
	.reg .f32 x;
	mov.b32 {{low, high}}, $1;
	cvt.rn.f16x2.e4m3x2 pair, {half};
	mov.b32 {{low, high}}, pair;
	{store}
}}"""
_STORE = {
    "float16": "mov.b32 $0, {{{0}, {0}}};",
    "bfloat16": "cvt.f32.f16 x, {0}; mul.rn.f32 x, x, 0f77800000; cvt.rn.bf16x2.f32 $0, x, x;",
}
#: Two codes, a byte, times a pair of scales. fp16 has the bits of a code's number in its high byte;
#: those of its exponent and mantissa, three places lower, are the number times 2^-112 in bf16.
_TIMES = {
    "float16": "cvt.rn.f16x2.e2m1x2 x, b{0}; mul.rn.f16x2 ${0}, x, $5;",
    "bfloat16": """cvt.rn.f16x2.e2m1x2 x, b{0};
	shr.u32 y, x, 3;
	and.b32 y, y, 0x0FC00FC0;
	lop3.b32 y, x, 0x80008000, y, 0xEA;
	mul.rn.bf16x2 ${0}, y, $5;""",
}


class NibbleValues:
    """E2M1 codes with E4M3 scales as bf16 or fp16, by instructions of sm_100a."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        body = "".join(_TIMES[dtype].format(i) for i in range(4))
        self.times = f"""{{
			.reg .b8 b0, b1, b2, b3;
			.reg .b32 x, y;
			mov.b32 {{b0, b1, b2, b3}}, $4;
			{body}
		}}"""

    def factor(self, word: Uint32, index: int) -> Uint32:
        """Return the factor of codes whose scale is byte ``index`` of ``word``."""
        half, byte = ("low", "high")[index // 2], ("low", "high")[index % 2]
        text = _SCALE.format(half=half, store=_STORE[self.dtype].format(byte))
        return asm(text, [Uint32], [word])

    def values(self, words: Sequence[Uint32], factor: Uint32) -> list[Uint32]:
        """Return pairs of numbers of words of eight codes, in their order."""
        return [v for word in words for v in asm(self.times, [Uint32] * 4, [word, factor])]


class ByteValues:
    """Byte codes with block scales of any kind, or none, as bf16 or fp16, by way of fp32."""

    def __init__(self, codec: Codec, dtype: str):
        self.codec = codec
        self.dtype = dtype

    def factor(self, word: Uint32, index: int) -> Float32:
        """Return the factor of codes whose scale is byte ``index`` of ``word``."""
        return self.codec.decode_scales(word >> (16 * (index // 2)))[index % 2]

    def values(self, words: Sequence[Uint32], factor: Float32 | None) -> list[Uint32]:
        """Return pairs of numbers of words of four codes, in their order."""
        numbers = self.codec.decode(words)
        if factor is not None:
            numbers = [number * factor for number in numbers]
        return pack_words(numbers, self.dtype)


def values_of(fmt: Format, dtype: str) -> Any:
    """Return what decodes the codes of a format to numbers of ``dtype``.

    Raises:
        UnsupportedError: No kernel decodes the elements and scales of the format.
    """
    if fmt.decoder_kind == "nibbles":
        return NibbleValues(dtype)
    if fmt.decoder_kind == "bytes":
        return ByteValues(CODECS[fmt.name](fmt, dtype), dtype)
    raise UnsupportedError(
        f"no kernel decodes {fmt}: {fmt.element.name} codes with scales {fmt.scale}"
    )
