"""Encoding blocks of sixteen elements to E2M1 codes, on each architecture.

sm_100a has an instruction for it. sm_90a has none; there fp16 does it, two elements at a time. With
y = fl(x * enc), take

    h = fp16(fl(y * s))    s = 513/512 * 2^-14

The power of two puts E2M1's exponents 0 to 3 on those of fp16, its subnormals on fp16's. The rest
of s puts the ties of E2M1 on ties of fp16 that fall to the same side: a tie is an odd multiple of
a quarter, (2j + 1)/4 times a power of two, and times 513/512 that is an odd multiple of half a unit
of h, (2j + 1) * 513, beside which the even unit is the lower one just if j is even. Nothing else
changes sides, because fl and fp16 are monotonic and fl keeps ties and their neighbours apart. So h
tells every y from the next code's, and what is left is to move its borders to where bits change:

    h = fp16(min(|h|, 6 s) * 1021.5/1024)    code = (bits of h + 0x100) >> 9, sign apart

The high byte of h is s000 eemx, the code and the bit that rounds. Limiting |h| also takes NaN to
the code 7 of the format's rule. A test goes through every
border of h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Float32, Int32, Uint32

from cute_kernels.device.nvfp4 import encode_column, encode_row
from cute_kernels.device.ptx import asm

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["encode_column_blocks", "encode_row_block"]

_HALF_BLOCK = 8  # elements of a word of codes
#: An element of a block: its word and which part of the word.
_Element = tuple[Uint32, int]

_REGISTERS = """
    .reg .f32 x0, x1;
    .reg .b16 half0, half1;
    .reg .b32 wide, p0, p1, even, odd, high, limit, back;
"""
#: fp32: 513/512 * 2^-14. Pairs of fp16: six times that, and what moves borders to changing bits.
_SCALE = "0f38804000"
_LIMIT = "0x0E030E03"
_BACK = "0x3BFB3BFB"

#: x{i} as fp32, by dtype and part of the word.
_WIDEN = {
    ("bfloat16", 0): "shl.b32 wide, {word}, 16; mov.b32 x{i}, wide;",
    ("bfloat16", 1): "and.b32 wide, {word}, 0xFFFF0000; mov.b32 x{i}, wide;",
    ("float16", 0): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half0;",
    ("float16", 1): "mov.b32 {{half0, half1}}, {word}; cvt.f32.f16 x{i}, half1;",
    ("float32", 0): "mov.b32 x{i}, {word};",
}


def encode_row_block(
    words: Sequence[Uint32], factor: Float32, dtype: str, arch: str
) -> list[Uint32]:
    """E2M1 codes of sixteen elements that follow each other in memory, as two words.

    Args:
        words: 8 words of two 16-bit elements, or 16 of one fp32.
        factor: the block's encode factor.
        dtype: the elements' type.
        arch: ``"sm_90a"`` or ``"sm_100a"``.
    """
    half = len(words) // 2
    parts = (words[:half], words[half:])
    if arch == "sm_100a":
        return [encode_row(part, factor, dtype) for part in parts]
    per_word = _HALF_BLOCK // half
    return [
        _encode([(word, i) for word in part for i in range(per_word)], factor, dtype)
        for part in parts
    ]


def encode_column_blocks(
    words: Sequence[Uint32],
    factors: Sequence[Float32],
    dtype: str,
    arch: str,
    twist: Int32 | int = 0,
) -> list[list[Uint32]]:
    """E2M1 codes of the columns of sixteen rows, one word each, as two words a column.

    Args:
        words: 16 words, one a row: two columns of 16-bit elements, or one of fp32.
        factors: the encode factor of each column.
        dtype: the elements' type.
        arch: ``"sm_90a"`` or ``"sm_100a"``.
        twist: 0, 2, 4 or 6: word i is that of row i ^ twist. sm_90a only.
    """
    parts = (words[:_HALF_BLOCK], words[_HALF_BLOCK:])
    if arch == "sm_100a":
        return [
            [encode_column(part, factor, dtype, c) for part in parts]
            for c, factor in enumerate(factors)
        ]
    return [
        [_encode([(word, c) for word in part], factor, dtype, twist) for part in parts]
        for c, factor in enumerate(factors)
    ]


def _encode(
    elements: Sequence[_Element], factor: Float32, dtype: str, twist: Int32 | int = 0
) -> Uint32:
    """Eight elements as one word of codes, the first in the low nibble.

    Element i is that of nibble i ^ twist.
    """
    # Bytes 1, 3, 5, 7 of two words are the high ones of their halves.
    order = Uint32(0x7531)
    if not isinstance(twist, int):
        # Byte i of the result comes from half i ^ twist / 2.
        order = order ^ Uint32(twist) * Uint32(0x1111)
    words = list(dict.fromkeys(id(word) for word, _ in elements))
    operands = {id(word): word for word, _ in elements}
    names = {key: f"${i + 1}" for i, key in enumerate(words)}
    factor_in, order_in = f"${len(words) + 1}", f"${len(words) + 2}"
    body = f"mov.b32 limit, {_LIMIT}; mov.b32 back, {_BACK};"
    for first, name in ((0, "even"), (1, "odd")):
        for p in range(2):
            for i in range(2):
                word, part = elements[first + 4 * p + 2 * i]
                body += _WIDEN[dtype, part].format(word=names[id(word)], i=i)
                body += f"""
                mul.rn.f32 x{i}, x{i}, {factor_in};
                mul.rn.f32 x{i}, x{i}, {_SCALE};
                """
            body += f"""
            cvt.rn.f16x2.f32 p{p}, x1, x0;
            min.xorsign.abs.f16x2 p{p}, p{p}, limit;
            mul.rn.f16x2 p{p}, p{p}, back;
            """
        # Bytes s000 eemx. Eight times as much, and the rounding bit's eight, puts eem beside s.
        # 0xE4 selects: a where c, else b.
        body += f"""
        prmt.b32 {name}, p0, p1, {order_in};
        mad.lo.u32 high, {name}, 8, 0x08080808;
        lop3.b32 {name}, high, {name}, 0x70707070, 0xE4;
        """
    body += "shr.u32 even, even, 4; lop3.b32 $0, even, odd, 0x0F0F0F0F, 0xE4;"
    return asm(f"{{{_REGISTERS}{body}}}", [Uint32], [*(operands[w] for w in words), factor, order])
