"""PTX text that makes a pair of fp32 numbers of two elements, for the instructions that take pairs.

Each text sets ``p`` and declares nothing; ``REGISTERS`` are what the texts use.
"""

from __future__ import annotations

__all__ = ["REGISTERS", "column_pairs", "row_pairs"]

REGISTERS = """.reg .b32 lo, hi;
        .reg .b16 h0, h1, h2, h3;
        .reg .b64 p, f;"""

#: Both elements of the word ``w``.
_ROW_PAIR = {
    "bfloat16": "shl.b32 lo, {w}, 16; and.b32 hi, {w}, 0xFFFF0000; mov.b64 p, {{lo, hi}};",
    "float16": "mov.b32 {{h0, h1}}, {w}; cvt.f32.f16 lo, h0; cvt.f32.f16 hi, h1; "
    "mov.b64 p, {{lo, hi}};",
}
#: An element of the word ``a`` and the same of ``b``, by dtype and place in the word.
_COLUMN_PAIR = {
    ("bfloat16", 0): "shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16; mov.b64 p, {{lo, hi}};",
    ("bfloat16", 1): "and.b32 lo, {a}, 0xFFFF0000; and.b32 hi, {b}, 0xFFFF0000; "
    "mov.b64 p, {{lo, hi}};",
    ("float16", 0): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; cvt.f32.f16 lo, h0; "
    "cvt.f32.f16 hi, h2; mov.b64 p, {{lo, hi}};",
    ("float16", 1): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; cvt.f32.f16 lo, h1; "
    "cvt.f32.f16 hi, h3; mov.b64 p, {{lo, hi}};",
    ("float32", 0): "mov.b64 p, {{{a}, {b}}};",
}


def row_pairs(dtype: str, count: int) -> list[str]:
    """Texts for elements that follow each other in ``count`` words, operands ``$1`` and on."""
    if dtype == "float32":
        return column_pairs(dtype, count, 0)
    return [_ROW_PAIR[dtype].format(w=f"${i + 1}") for i in range(count)]


def column_pairs(dtype: str, count: int, part: int) -> list[str]:
    """Texts for one element of each of ``count`` words, operands ``$1`` and on.

    Args:
        dtype: the elements' type.
        count: how many words.
        part: which of a word's two 16-bit elements; 0 for fp32.
    """
    text = _COLUMN_PAIR[dtype, part]
    return [text.format(a=f"${i + 1}", b=f"${i + 2}") for i in range(0, count, 2)]
