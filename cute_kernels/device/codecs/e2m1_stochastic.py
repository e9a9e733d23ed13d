"""E2M1 codes with stochastic rounding, on sm_90a and sm_100a.

With y = fl(x * enc) and h = y * 2^-14 as fp16, rounded toward zero, the bits of |h| are the code of
the next smaller number and nine more bits. These nine bits are the distance of y from there to the
next larger number (see ``e2m1_sm90``). So with a random number r below 256, the probability of the
larger one

  code = (min(|h|, 6 * 2^-14) + 2 r) >> 9        sign apart

counts in bits of h, and the carry goes from code to code whatever their distance. Limiting |h| also
turns NaN into the code 7, as the format requires.

sm_100a has an instruction that rounds so, ``cvt.rs.satfinite.e2m1x4``. But its four elements share
two random numbers of 16 bits, and we do not know where the byte of an element would have to be.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Uint32, Uint64

from ...arch import get_arch
from ..ptx import asm
from .e2m1_sm90 import byte_order

_REGISTERS = """
	.reg .b32 x0, x1, p0, p1, even, odd, high, drawn;
	.reg .b16 half0, half1;
	.reg .b64 pair;
"""
#: PTX that sets x{i} to an element as fp32, by dtype and half of the word.
_WIDEN = {
    ("bfloat16", 0): "shl.b32 x{i}, {word}, 16; ",
    ("bfloat16", 1): "and.b32 x{i}, {word}, 0xFFFF0000; ",
    ("float16", 0): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half0; ",
    ("float16", 1): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half1; ",
    ("float32", 0): "mov.b32 x{i}, {word}; ",
}
#: fp32: 2^-14, and two of them. Pairs of fp16: six times that.
_SCALE, _SCALES, _LIMIT = "0f38800000", 0x3880000038800000, 0x0E000E00
#: Both elements times the factor, then the scale: one number each, or two.
_MULTIPLY = {
    "sm_90a": """mul.rn.f32 x0, x0, {factor}; mul.rn.f32 x1, x1, {factor};
		mul.rn.f32 x0, x0, {scale}; mul.rn.f32 x1, x1, {scale};""",
    "sm_100a": """mov.b64 pair, {{x0, x1}}; mul.rn.f32x2 pair, pair, {factor};
		mul.rn.f32x2 pair, pair, {scale}; mov.b64 {{x0, x1}}, pair;""",
}
#: PTX that puts the random bytes of elements 0 and 2, or of 1 and 3, into the halves of a word.
_BYTES = {"even": "and.b32 drawn, {word}, 0x00FF00FF;", "odd": "prmt.b32 drawn, {word}, 0, 0x4341;"}


def encode(
    words: Sequence[Uint32],
    positions: Sequence[tuple[int, int]],
    factor: Float32,
    random_words: Sequence[Uint32],
    dtype: str,
    arch: str,
    swizzle_xor: Int32 | int = 0,
) -> Uint32:
    """Encode as ``e2m1_sm90.encode``, with two words of ``random_words``, one byte per element."""
    first_operand = len(words) + 1
    *random_in, order_in, limit_in, factor_in, scale_in = (
        f"${first_operand + i}" for i in range(6)
    )
    factors: list[Float32 | Uint64] = [factor]
    if get_arch(arch).has_f32x2:
        factors = [asm("mov.b64 $0, {$1, $1};", [Uint64], [factor]), Uint64(_SCALES)]
    else:
        scale_in = _SCALE
    body = ""
    for parity, name in enumerate(("even", "odd")):
        for p in range(2):
            for i in range(2):
                word, half = positions[4 * p + 2 * i + parity]
                body += _WIDEN[dtype, half].format(word=f"${word + 1}", i=i)
            body += _MULTIPLY[arch].format(factor=factor_in, scale=scale_in)
            body += f"""
			cvt.rz.f16x2.f32 p{p}, x1, x0; min.xorsign.abs.f16x2 p{p}, p{p}, {limit_in};
			{_BYTES[name].format(word=random_in[p])} mad.lo.u32 p{p}, drawn, 2, p{p};
			"""
        # Bytes s000 eemx: eight times as much puts eem beside s.
        body += f"""prmt.b32 {name}, p0, p1, {order_in}; shl.b32 high, {name}, 3;
			lop3.b32 {name}, high, {name}, 0x70707070, 0xE4;"""
    text = f"""{{{_REGISTERS}
		{body}
		shr.u32 even, even, 4; lop3.b32 $0, even, odd, 0x0F0F0F0F, 0xE4;
	}}"""
    return asm(
        text, [Uint32], [*words, *random_words, byte_order(swizzle_xor), Uint32(_LIMIT), *factors]
    )
