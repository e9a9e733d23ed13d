"""PTX text that makes fp32 numbers of two elements, for the instructions that take pairs.

``REGISTERS`` are what the texts use; they declare nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

REGISTERS = """.reg .b32 lo, hi, v0, v1, v2, v3;
		.reg .b16 h0, h1, h2, h3;
		.reg .b64 p, f;"""

_HALVES_TO_F32 = "cvt.f32.f16 lo, {0}; cvt.f32.f16 hi, {1};"
#: Both elements of the word ``w``.
_ROW_PAIR = {
    "bfloat16": "shl.b32 lo, {w}, 16; and.b32 hi, {w}, 0xFFFF0000;",
    "float16": "mov.b32 {{h0, h1}}, {w}; " + _HALVES_TO_F32.format("h0", "h1"),
}
#: An element of the word ``a`` and the same of ``b``, by dtype and place in the word.
_COLUMN_PAIR = {
    ("bfloat16", 0): "shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16;",
    ("bfloat16", 1): "and.b32 lo, {a}, 0xFFFF0000; and.b32 hi, {b}, 0xFFFF0000;",
    ("float16", 0): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; "
    + _HALVES_TO_F32.format("h0", "h2"),
    ("float16", 1): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; "
    + _HALVES_TO_F32.format("h1", "h3"),
}


class Pair(NamedTuple):
    """Two numbers: the text that makes them, and their registers or operands.

    ``words`` is of bf16 the word that both are in, or the two words whose high halves they are.
    """

    text: str
    low: str = "lo"
    high: str = "hi"
    words: tuple[str, ...] = ()


def _high_halves(low: str, high: str) -> str:
    """Text that sets ``p`` to the bf16 numbers in the high halves of two words."""
    return f"mov.b64 p, {{{low}, {high}}}; and.b64 p, p, 0xFFFF0000FFFF0000;"


def products(pairs: Sequence[Pair], factor: str) -> list[Pair]:
    """The pairs times both numbers of ``factor``, by instructions of sm_100a that take two."""
    by, out, left = f"mul.rn.f32x2 p, p, {factor};", [], list(pairs)
    while left:
        one = left.pop(0)
        if len(one.words) == 1 and left:
            # High halves of two words take one instruction less than those of one.
            a, b = one.words + left.pop(0).words
            text = f"{_high_halves(a, b)} {by} mov.b64 {{v1, v3}}, p; shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16;"
            out += [
                Pair(f"{text} mov.b64 p, {{lo, hi}}; {by} mov.b64 {{v0, v2}}, p;", "v0", "v1"),
                Pair("", "v2", "v3"),
            ]
            continue
        packed = (
            _high_halves(*one.words)
            if len(one.words) > 1
            else f"{one.text} mov.b64 p, {{{one.low}, {one.high}}};"
        )
        out.append(Pair(f"{packed} {by} mov.b64 {{lo, hi}}, p;"))
    return out


def row_pairs(dtype: str, count: int) -> list[Pair]:
    """Elements that follow each other in ``count`` words, operands ``$1`` and on."""
    if dtype == "float32":
        return column_pairs(dtype, count, 0)
    words = [f"${i + 1}" for i in range(count)]
    return [
        Pair(_ROW_PAIR[dtype].format(w=w), words=(w,) if dtype == "bfloat16" else ()) for w in words
    ]


def column_pairs(dtype: str, count: int, part: int) -> list[Pair]:
    """One element of each of ``count`` words, operands ``$1`` and on: of two 16-bit ones the
    ``part``-th.
    """
    words = [(f"${i + 1}", f"${i + 2}") for i in range(0, count, 2)]
    if dtype == "float32":
        return [Pair("", a, b) for a, b in words]
    high = dtype == "bfloat16" and part == 1
    return [
        Pair(_COLUMN_PAIR[dtype, part].format(a=a, b=b), words=(a, b) if high else ())
        for a, b in words
    ]
