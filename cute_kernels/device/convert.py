"""Exact conversions to fp32, and conversions back that round once; for sm_90 and later."""

from collections.abc import Sequence

from cutlass import Float32, Uint32

from .ptx import asm, bits_as_f32, f32_as_bits

_BF16_TWO_TO_126 = 0x7E807E80  # a pair
_CVT_PAIR = {"bfloat16": "cvt.rn.bf16x2.f32", "float16": "cvt.rn.f16x2.f32"}


def unpack_pair(word: Uint32, dtype: str) -> tuple[Float32, Float32]:
    """Return the two bf16 or fp16 numbers of a word, the low half first."""
    if dtype == "bfloat16":
        return bits_as_f32(word << 16), bits_as_f32(word & Uint32(0xFFFF0000))
    if dtype != "float16":
        raise TypeError(f"words hold two bfloat16 or float16, not {dtype}")
    return asm(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
        [Float32, Float32],
        [word],
    )


def unpack_words(words: Sequence[Uint32], dtype: str) -> list[Float32]:
    """Return the fp32 numbers of words of ``dtype``, in memory order."""
    if dtype == "float32":
        return [bits_as_f32(word) for word in words]
    return [number for word in words for number in unpack_pair(word, dtype)]


def pack_words(numbers: Sequence[Float32], dtype: str) -> list[Uint32]:
    """Return words of ``dtype`` in memory order, rounded to nearest even.

    ``numbers`` has an even count.
    """
    if dtype == "float32":
        return [f32_as_bits(number) for number in numbers]
    text = f"{_CVT_PAIR[dtype]} $0, $2, $1;"
    return [asm(text, [Uint32], [*numbers[i : i + 2]]) for i in range(0, len(numbers), 2)]


def decode_e2m1(word: Uint32) -> list[Float32]:
    """Return the numbers of eight E2M1 codes, the one in the lowest nibble first.

    The exponent field and the mantissa bit are moved to the lowest exponent and highest mantissa
    bits of bf16. There they stand for 2^-126 times the number, including zero and the subnormal
    0.5.
    """
    low, high = [], []
    for i in range(4):
        shift = 6 - 4 * i
        magnitude = word << shift if shift > 0 else word >> -shift
        pair = (magnitude & Uint32(0x01C001C0)) | ((word << (12 - 4 * i)) & Uint32(0x80008000))
        pair = asm("mul.rn.bf16x2 $0, $1, $2;", [Uint32], [pair, Uint32(_BF16_TWO_TO_126)])
        numbers = unpack_pair(pair, "bfloat16")
        low.append(numbers[0])
        high.append(numbers[1])
    return low + high


def decode_e4m3_pair(pair: Uint32) -> tuple[Float32, Float32]:
    """Return the numbers of the two lowest bytes; 0x7F and 0xFF are NaN."""
    return asm(
        """{
		.reg .b16 pair, lo, hi;
		.reg .b32 numbers;
		cvt.u16.u32 pair, $2;
		cvt.rn.f16x2.e4m3x2 numbers, pair;
		mov.b32 {lo, hi}, numbers;
		cvt.f32.f16 $0, lo;
		cvt.f32.f16 $1, hi;
		}""",
        [Float32, Float32],
        [pair],
    )
