"""Encoding blocks of sixteen elements to E2M1 codes, on each architecture.

sm_100a has an instruction for it. sm_90a has none; there codes come from the fp32 and FP8 units.
With t = y * 2^-6, y = fl(x * enc), E2M1's steps are E4M3's on its two lowest binades, but rounding
to E4M3 would round to three bits of mantissa where one is wanted. So t is first rounded to E2M1's
grid by adding and subtracting M = m * 2^22, where m has the sign of t and the exponent that decides
the spacing (that of t, at least 2^-6):

    s = fl(M + t)    r = s - M (exact)    e4m3(r + t * 2^-20)

m is a bf16 number: it needs not be that of t exactly, for around a power of two either spacing
rounds alike, and its 16 zero bits keep the additions in one binade and ties even. The last term is
below half a step of E4M3; it only gives a zero its sign. The E4M3 byte is s 00 eem 00, the code
with gaps; NaN's byte 0x7F is the code 7 of the format's rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Float32, Uint32

from cute_kernels.device.nvfp4 import encode_column, encode_row
from cute_kernels.device.ptx import asm

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["encode_column_blocks", "encode_row_block"]

_HALF_BLOCK = 8  # elements of a word of codes

_REGISTERS = """
    .reg .pred fast, small;
    .reg .f32 q, k, m, x, y, s, lim0, lim1, n0, n1;
    .reg .b32 wide, pair, scale, limit, factors, least, h0, h1, a2, a4, b2, lo, hi;
    .reg .b16 half0, half1, even0, even1, odd0, odd1;
    .reg .b32 even, odd;
"""
# Powers of two as fp32 bits.
_2M6, _2M20, _2P22, _M2P22 = "0f3C800000", "0f35800000", "0f4A800000", "0fCA800000"
_2P64, _2M64 = "0f5F800000", "0f1F800000"


def encode_row_block(
    words: Sequence[Uint32], a: Float32, factor: Float32, dtype: str, arch: str
) -> list[Uint32]:
    """E2M1 codes of sixteen elements that follow each other in memory, as two words.

    Args:
        words: 8 words of two 16-bit elements, or 16 of one fp32.
        a: their absmax, or more; unused on sm_100a.
        factor: the block's encode factor.
        dtype: the elements' type.
        arch: ``"sm_90a"`` or ``"sm_100a"``.
    """
    if arch == "sm_100a":
        half = len(words) // 2
        return [encode_row(part, factor, dtype) for part in (words[:half], words[half:])]
    per_word = 16 // len(words)
    order = [(i // per_word, i % per_word) for i in range(16)]
    return list(_encode(words, [a], [factor], [order], dtype))


def encode_column_blocks(
    words: Sequence[Uint32],
    a: Sequence[Float32],
    factors: Sequence[Float32],
    dtype: str,
    arch: str,
) -> list[list[Uint32]]:
    """E2M1 codes of the columns of sixteen rows, one word each, as two words a column.

    Args:
        words: 16 words, one a row: two columns of 16-bit elements, or one of fp32.
        a: the absmax of each column, or more; unused on sm_100a.
        factors: the encode factor of each column.
        dtype: the elements' type.
        arch: ``"sm_90a"`` or ``"sm_100a"``.
    """
    columns = range(len(factors))
    if arch == "sm_100a":
        return [
            [encode_column(part, factors[c], dtype, c) for part in (words[:8], words[8:])]
            for c in columns
        ]
    codes = _encode(words, a, factors, [[(i, c) for i in range(16)] for c in columns], dtype)
    return [list(codes[2 * c : 2 * c + 2]) for c in columns]


def _encode(
    words: Sequence[Uint32],
    a: Sequence[Float32],
    factors: Sequence[Float32],
    orders: Sequence[Sequence[tuple[int, int]]],
    dtype: str,
) -> tuple[Uint32, ...]:
    """Two code words for each of ``orders``: sixteen elements as (word, element of the word)."""
    results = 2 * len(orders)
    inputs = [f"${results + i}" for i in range(len(words))]
    a_in = [f"${results + len(words) + i}" for i in range(len(a))]
    factors_in = [f"${results + len(words) + len(a) + i}" for i in range(len(a))]
    to_e4m3 = _bf16_to_e4m3 if dtype == "bfloat16" else _any_to_e4m3
    elements = sorted({element for order in orders for element in order})
    body = "".join(f".reg .f32 r{i}_{e};\n" for i, e in elements)
    body += to_e4m3(inputs, a_in, factors_in, dtype)
    for column, order in enumerate(orders):
        for half in range(2):
            part = order[half * _HALF_BLOCK : (half + 1) * _HALF_BLOCK]
            body += _pack(f"${2 * column + half}", [f"r{i}_{e}" for i, e in part])
    operands = [*words, *a, *factors]
    return asm(f"{{{_REGISTERS}{body}}}", [Uint32] * results, operands)


def _bf16_to_e4m3(words: list[str], a: list[str], factors: list[str], dtype: str) -> str:
    """Sets r{word}_{element}. Common factors and values under 7 take the short way.

    Otherwise elements and factor are scaled by 2^64 or 2^-64, against each other, and elements are
    limited to what gives 6. (Scaling also makes NaNs positive, as products of fp32 are.)
    """
    count, last = len(words), len(factors) - 1
    text = f".reg .b32 w<{count}>;\n.reg .f32 e<2>;\n"
    text += "".join(f"mov.b32 w{i}, {word};\n" for i, word in enumerate(words))
    for c, (amax, factor) in enumerate(zip(a, factors, strict=True)):
        also = "" if c == 0 else ", fast"
        text += f"""
        mov.f32 e{c}, {factor};
        mul.rn.f32 q, {amax}, {factor};
        setp.lt{".and" if also else ""}.f32 fast, q, 0f40E00000{also};
        setp.lt.and.f32 fast, {factor}, 0f76800000, fast;
        setp.gt.and.f32 fast, {factor}, 0f08800000, fast;
        """
    text += "@fast bra ENCODE;\n"
    for c in range(len(factors)):
        text += f"""
        setp.lt.f32 small, e{c}, 0f3F800000;
        selp.f32 k, {_2P64}, {_2M64}, small;
        selp.b32 h{c}, 0x1F80, 0x5F80, small;
        mul.rn.f32 e{c}, e{c}, k;
        rcp.rn.f32 lim{c}, e{c};
        mul.rn.f32 lim{c}, lim{c}, 0f40C00000;
        """
    text += f"""
    prmt.b32 scale, h0, h{last}, 0x5410;
    cvt.rn.bf16x2.f32 limit, lim{last}, lim0;
    """
    for i in range(count):
        text += f"""
        mul.rn.bf16x2 w{i}, w{i}, scale;
        min.xorsign.abs.bf16x2 w{i}, w{i}, limit;
        """
    text += "ENCODE:\n"
    text += "".join(f"mul.rn.f32 n{c}, e{c}, {_2M6};\n" for c in range(len(factors)))
    text += f"cvt.rn.bf16x2.f32 factors, n{last}, n0;\nmov.b32 least, 0x3C803C80;\n"
    for i in range(count):
        text += f"""
        mul.rn.bf16x2 pair, w{i}, factors;
        max.xorsign.abs.bf16x2 pair, pair, least;
        """
        for e, factor in enumerate(("n0", f"n{last}")):
            take = ("shl.b32 {}, {}, 16;", "and.b32 {}, {}, 0xFFFF0000;")[e]
            text += f"""
            {take.format("wide", f"w{i}")}
            mov.b32 x, wide;
            {take.format("wide", "pair")}
            mov.b32 m, wide;
            mul.rn.f32 y, x, {factor};
            {_round_to_grid("y")}
            fma.rn.f32 r{i}_{e}, y, {_2M20}, s;
            """
    return text


def _any_to_e4m3(words: list[str], a: list[str], factors: list[str], dtype: str) -> str:
    """Sets r{word}_{element}, whatever the factors and elements are."""
    text, last = "", len(factors) - 1
    for i, word in enumerate(words):
        elements = [word]
        if dtype == "float16":
            text += f"""
            mov.b32 {{half0, half1}}, {word};
            cvt.f32.f16 lim0, half0;
            cvt.f32.f16 lim1, half1;
            """
            elements = ["lim0", "lim1"]
        for e, (element, factor) in enumerate(
            zip(elements, (factors[0], factors[last]), strict=False)
        ):
            text += f"""
            mul.rn.f32 y, {element}, {factor};
            min.xorsign.abs.f32 y, y, 0f40C00000;
            max.xorsign.abs.f32 m, y, 0f3F800000;
            mov.b32 wide, m;
            and.b32 wide, wide, 0xFFFF0000;
            mov.b32 m, wide;
            {_round_to_grid("y")}
            fma.rn.f32 s, y, {_2M20}, s;
            mul.rn.f32 r{i}_{e}, s, {_2M6};
            """
    return text


def _round_to_grid(y: str) -> str:
    """Sets s to ``y`` on the grid that m decides; zero is negative."""
    return f"""
    fma.rn.f32 s, m, {_2P22}, {y};
    fma.rm.f32 s, m, {_M2P22}, s;
    """


def _pack(result: str, elements: list[str]) -> str:
    """Eight numbers on the grid, scaled by 2^-6, to a word of codes."""
    text = ""
    for name, first in (("even", 0), ("odd", 1)):
        v = elements[first::2]
        text += f"""
        cvt.rn.satfinite.e4m3x2.f32 {name}0, {v[1]}, {v[0]};
        cvt.rn.satfinite.e4m3x2.f32 {name}1, {v[3]}, {v[2]};
        mov.b32 {name}, {{{name}0, {name}1}};
        """
    # 0xE4 selects: a where c, else b.
    return (
        text
        + f"""
    shr.u32 a2, even, 2;
    shr.u32 a4, even, 4;
    shl.b32 b2, odd, 2;
    lop3.b32 lo, a2, a4, 0x07070707, 0xE4;
    lop3.b32 hi, b2, odd, 0x70707070, 0xE4;
    lop3.b32 {result}, lo, hi, 0x0F0F0F0F, 0xE4;
    """
    )
