"""E2M1 codes and their E4M3 scales as fp16, for architectures without an instruction for it.

The bits ``s ee m`` of a code, put into fp16 as ``s 000ee m000000000``, are its value times 2^-14, a
subnormal number if ee is 0. Products of such numbers are exact.
"""

from cutlass import Uint32

from ..ptx import asm

#: Codes in the low nibbles of four bytes, and in the high ones, to bytes ``s 000 eem 0``: the high
#: bytes of fp16. Left shifts are multiplications, which use another unit than the logic.
_EVEN_CODES = """{
	.reg .b32 x, y;
	mul.lo.u32 x, $1, 16;
	mul.lo.u32 y, $1, 2;
	and.b32 y, y, 0x0E0E0E0E;
	lop3.b32 $0, x, 0x80808080, y, 0xEA;
}"""
_ODD_CODES = """{
	.reg .b32 y;
	shr.b32 y, $1, 3;
	and.b32 y, y, 0x0E0E0E0E;
	lop3.b32 $0, $1, 0x80808080, y, 0xEA;
}"""
_SCALE = """{{
	.reg .b32 s;
	.reg .b16 lo, hi;
	mov.b32 {{lo, hi}}, $2;
	mov.b32 s, {{{half}, {half}}};
	mul.rn.{dtype}x2 $0, $1, s;
}}"""
#: 2^14 as two fp16.
_TWO_TO_14 = 0x74007400


def high_bytes(codes: Uint32, is_odd: bool) -> Uint32:
    """Return the high byte of fp16, value times 2^-14, of one code in each of four bytes.

    Each byte has two codes; ``is_odd`` selects the second one, in the high nibble.
    """
    return asm(_ODD_CODES if is_odd else _EVEN_CODES, [Uint32], [codes])


def two_halves(high: Uint32, first_byte: int) -> Uint32:
    """Return bytes ``first_byte`` and ``first_byte + 2`` as the high bytes of two fp16."""
    if first_byte == 1:
        return high & Uint32(0xFF00FF00)
    return asm("prmt.b32 $0, $1, 0, 0x2404;", [Uint32], [high])


def times_scale(halves: Uint32, scales: Uint32, index: int, dtype: str = "f16") -> Uint32:
    """Return two numbers times one of two block scales, all of PTX type ``dtype``."""
    text = _SCALE.format(half=("lo", "hi")[index], dtype=dtype)
    return asm(text, [Uint32], [halves, scales])


def scales_as_fp16(pair: Uint32) -> Uint32:
    """Return the two E4M3 scales in the low half of ``pair`` as two fp16."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    return asm(text, [Uint32], [pair])


def fp16_values(codes: Uint32, scales: Uint32, index: int) -> list[Uint32]:
    """Return eight codes times one of two block scales: elements t and t + 4, t = 0 .. 3."""
    high = [high_bytes(codes, is_odd == 1) for is_odd in range(2)]
    out = []
    for t in range(4):
        small = times_scale(two_halves(high[t % 2], t // 2), scales, index)
        out.append(times_scale(small, Uint32(_TWO_TO_14), 0))
    return out
