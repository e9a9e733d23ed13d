"""PTX text that makes fp32 numbers of two elements, for the instructions that take pairs.

``REGISTERS`` are what the texts use; they declare nothing.
"""

from __future__ import annotations

from typing import NamedTuple

REGISTERS = """.reg .b32 lo, hi;
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
	("float16", 0): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; " + _HALVES_TO_F32.format("h0", "h2"),
	("float16", 1): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; " + _HALVES_TO_F32.format("h1", "h3"),
}


class Pair(NamedTuple):
	"""Two numbers.

	Attributes:
	  text: what makes them.
	  low: the register or operand of the first.
	  high: likewise of the second.
	"""

	text: str
	low: str = "lo"
	high: str = "hi"

	@property
	def packed(self) -> str:
		"""Text that sets ``p`` to both."""
		return f"{self.text} mov.b64 p, {{{self.low}, {self.high}}};"


def row_pairs(dtype: str, count: int) -> list[Pair]:
	"""Elements that follow each other in ``count`` words, operands ``$1`` and on."""
	if dtype == "float32":
		return column_pairs(dtype, count, 0)
	return [Pair(_ROW_PAIR[dtype].format(w=f"${i + 1}")) for i in range(count)]


def column_pairs(dtype: str, count: int, part: int) -> list[Pair]:
	"""One element of each of ``count`` words, operands ``$1`` and on.

	Args:
	  dtype: the elements' type.
	  count: how many words.
	  part: which of a word's two 16-bit elements; 0 for fp32.
	"""
	words = [(f"${i + 1}", f"${i + 2}") for i in range(0, count, 2)]
	if dtype == "float32":
		return [Pair("", a, b) for a, b in words]
	return [Pair(_COLUMN_PAIR[dtype, part].format(a=a, b=b)) for a, b in words]
