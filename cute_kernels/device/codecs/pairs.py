"""PTX text that converts two elements to fp32, for instructions that take pairs.

``REGISTERS`` declares the registers that the texts use.
"""

from collections.abc import Sequence
from typing import NamedTuple

REGISTERS = """.reg .b32 lo, hi, v0, v1, v2, v3;
		.reg .b16 h0, h1, h2, h3;
		.reg .b64 p, f;"""

_HALVES_TO_F32 = "cvt.f32.f16 lo, {0}; cvt.f32.f16 hi, {1};"
#: PTX of both elements of the word ``w``.
_ROW_PAIR = {
    "bfloat16": "shl.b32 lo, {w}, 16; and.b32 hi, {w}, 0xFFFF0000;",
    "float16": "mov.b32 {{h0, h1}}, {w}; " + _HALVES_TO_F32.format("h0", "h1"),
}
#: PTX of an element of the word ``a`` and the same of ``b``, by dtype and half of the word.
_COLUMN_PAIR = {
    ("bfloat16", 0): "shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16;",
    ("bfloat16", 1): "and.b32 lo, {a}, 0xFFFF0000; and.b32 hi, {b}, 0xFFFF0000;",
    ("float16", 0): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; "
    + _HALVES_TO_F32.format("h0", "h2"),
    ("float16", 1): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; "
    + _HALVES_TO_F32.format("h1", "h3"),
}


class Pair(NamedTuple):
    """Two fp32 numbers.

    Attributes:
        text: PTX that computes them.
        low: Register or operand of the first number.
        high: Register or operand of the second number.
        words: For bf16, the word that has both numbers, or the two words whose high halves they
            are.
    """

    text: str
    low: str = "lo"
    high: str = "hi"
    words: tuple[str, ...] = ()


def _high_halves(low: str, high: str) -> str:
    """Return PTX that sets ``p`` to the bf16 numbers in the high halves of two words."""
    return f"mov.b64 p, {{{low}, {high}}}; and.b64 p, p, 0xFFFF0000FFFF0000;"


def products(pairs: Sequence[Pair], factor: str) -> list[Pair]:
    """Return pairs times the pair ``factor``, by instructions of sm_100a that take two numbers."""
    multiply = f"mul.rn.f32x2 p, p, {factor};"
    out, remaining = [], list(pairs)
    while remaining:
        pair = remaining.pop(0)
        if len(pair.words) == 1 and remaining:
            # The high halves of two words take one instruction less than both halves of one.
            a, b = pair.words + remaining.pop(0).words
            text = f"{_high_halves(a, b)} {multiply} mov.b64 {{v1, v3}}, p; "
            text += f"shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16;"
            out += [
                Pair(
                    f"{text} mov.b64 p, {{lo, hi}}; {multiply} mov.b64 {{v0, v2}}, p;", "v0", "v1"
                ),
                Pair("", "v2", "v3"),
            ]
            continue
        packed = (
            _high_halves(*pair.words)
            if len(pair.words) > 1
            else f"{pair.text} mov.b64 p, {{{pair.low}, {pair.high}}};"
        )
        out.append(Pair(f"{packed} {multiply} mov.b64 {{lo, hi}}, p;"))
    return out


def row_pairs(dtype: str, count: int) -> list[Pair]:
    """Return the pairs of consecutive elements in ``count`` words, operands ``$1`` and on."""
    if dtype == "float32":
        return column_pairs(dtype, count, 0)
    words = [f"${i + 1}" for i in range(count)]
    return [
        Pair(_ROW_PAIR[dtype].format(w=w), words=(w,) if dtype == "bfloat16" else ()) for w in words
    ]


def column_pairs(dtype: str, count: int, half: int) -> list[Pair]:
    """Return the pairs of one element of each of ``count`` words; ``half`` selects it."""
    words = [(f"${i + 1}", f"${i + 2}") for i in range(0, count, 2)]
    if dtype == "float32":
        return [Pair("", a, b) for a, b in words]
    high = dtype == "bfloat16" and half == 1
    return [
        Pair(_COLUMN_PAIR[dtype, half].format(a=a, b=b), words=(a, b) if high else ())
        for a, b in words
    ]
