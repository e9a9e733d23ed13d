"""E2M1 codes on sm_90a.

sm_90a has no instruction that rounds to E2M1. Conversions to fp16 do it, two elements at a time.
With y = fl(x * enc), take

  h = fp16(fl(y * s))    s = 513/512 * 2^-14

The power of two puts E2M1's exponents 0 to 3 on those of fp16, and its subnormals on fp16's. The
rest of s puts the ties of E2M1 on ties of fp16 that round to the same side. A tie is an odd
multiple of a quarter, (2j + 1)/4 times a power of two. Times 513/512 that is an odd multiple of
half a unit of h, (2j + 1) * 513, whose even neighbour is the lower one just if j is even. Nothing
else changes sides, because fl and fp16 are monotonic and fl keeps ties and their neighbours
distinct. So h separates every y from the next code's, and only its borders remain to be moved to
where bits change:

  h = fp16(min(|h|, 6 s) * 1021.5/1024)    code = (bits of h + 0x100) >> 9, sign apart

The high byte of h is s000 eemx, the code and the bit that rounds. Limiting |h| also turns NaN into
the code 7, as the format requires. A test goes through every border of h.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Uint32

from ..ptx import asm

_REGISTERS = """
	.reg .f32 x0, x1;
	.reg .b16 half0, half1;
	.reg .b32 wide, p0, p1, even, odd, high, limit, back;
"""
#: fp32: 513/512 * 2^-14. Pairs of fp16: six times that, and what moves borders to changing bits.
_SCALE = "0f38804000"
_LIMIT = "0x0E030E03"
_BACK = "0x3BFB3BFB"

#: PTX that sets x{i} to an element as fp32, by dtype and half of the word.
_WIDEN = {
    ("bfloat16", 0): "shl.b32 wide, {word}, 16; mov.b32 x{i}, wide;",
    ("bfloat16", 1): "and.b32 wide, {word}, 0xFFFF0000; mov.b32 x{i}, wide;",
    ("float16", 0): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half0;",
    ("float16", 1): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half1;",
    ("float32", 0): "mov.b32 x{i}, {word};",
}


def encode(
    words: Sequence[Uint32],
    positions: Sequence[tuple[int, int]],
    factor: Float32,
    dtype: str,
    swizzle_xor: Int32 | int = 0,
) -> Uint32:
    """Encode eight elements as one word of codes, the first in the low nibble.

    Args:
        words: Words of the elements.
        positions: Word and half of the word of each element.
        factor: Encode factor.
        dtype: Data type of the elements.
        swizzle_xor: 0, 2, 4 or 6: element i goes to nibble i ^ swizzle_xor.
    """
    factor_in, order_in = f"${len(words) + 1}", f"${len(words) + 2}"
    elements = [(f"${word + 1}", half) for word, half in positions]
    # Elements 0, 2, 4 and 6 are the low nibbles of bytes, the others the high ones.
    even = _bytes_of_codes("even", elements[0::2], factor_in, order_in, dtype)
    odd = _bytes_of_codes("odd", elements[1::2], factor_in, order_in, dtype)
    text = f"""{{{_REGISTERS}
		mov.b32 limit, {_LIMIT}; mov.b32 back, {_BACK};
		{even}
		{odd}
		shr.u32 even, even, 4; lop3.b32 $0, even, odd, 0x0F0F0F0F, 0xE4;
	}}"""
    return asm(text, [Uint32], [*words, factor, byte_order(swizzle_xor)])


def byte_order(swizzle_xor: Int32 | int) -> Uint32:
    """Return the ``prmt`` selector of the high bytes of the halves of two words: 1, 3, 5, 7."""
    order = Uint32(0x7531)
    # Byte i of the result comes from half i ^ swizzle_xor / 2.
    return order if isinstance(swizzle_xor, int) else order ^ Uint32(swizzle_xor) * Uint32(0x1111)


def _bytes_of_codes(
    name: str, elements: Sequence[tuple[str, int]], factor: str, order: str, dtype: str
) -> str:
    """Return PTX that sets the high nibbles of register ``name`` to the codes of four elements.

    Args:
        name: Register.
        elements: Name of each element's word, and half of the word.
        factor: Operand with the encode factor.
        order: Operand with the byte order, see ``byte_order``.
        dtype: Data type of the elements.
    """
    body = ""
    for p in range(2):
        for i in range(2):
            word, half = elements[2 * p + i]
            body += f"""{_WIDEN[dtype, half].format(word=word, i=i)}
		mul.rn.f32 x{i}, x{i}, {factor};
		mul.rn.f32 x{i}, x{i}, {_SCALE};
		"""
        body += f"""cvt.rn.f16x2.f32 p{p}, x1, x0;
		min.xorsign.abs.f16x2 p{p}, p{p}, limit;
		mul.rn.f16x2 p{p}, p{p}, back;
		"""
    # Bytes s000 eemx. Eight times as much, and the rounding bit's eight, puts eem beside s.
    # 0xE4 selects: a where c, else b.
    return f"""{body}prmt.b32 {name}, p0, p1, {order};
		mad.lo.u32 high, {name}, 8, 0x08080808;
		lop3.b32 {name}, high, {name}, 0x70707070, 0xE4;"""
