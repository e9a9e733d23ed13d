"""Elements of a tensor that goes through an activation first, made where a kernel needs them.

A unit is what 16 bytes of the input make. Halves of a row are a multiple of 16 bytes, so that a
unit lies in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ..device.activations import activated
from ..device.convert import pack_words, unpack_words
from ..device.ptx import bits_as_f32, f32_as_bits, select
from .prologue import DTYPE_BYTES, Prologue


class ElementMaker:
	"""Makes elements of ``dtype`` as ``prologue`` says.

	Attributes:
	  unit: elements of a unit.
	  words: words of a unit's elements.
	"""

	def __init__(self, prologue: Prologue, dtype: str, arch: str):
		self.prologue = prologue
		self.dtype = dtype
		self.arch = arch
		self.size = DTYPE_BYTES[prologue.dtype]
		self.unit = prologue.unit
		self.words = self.unit * DTYPE_BYTES[dtype] // 4

	def cols(self, x: cute.Tensor) -> Int32:
		"""Columns of the elements that ``x`` becomes."""
		width = x.shape[len(x.shape) - 1]
		return width // 2 if self.prologue.halves else width

	def row_bytes(self, cols: Any) -> tuple[Any, Any]:
		"""Bytes of a row of the input, and of the gradient of the result, 0 if it is not read."""
		row = cols * self.size
		if not self.prologue.is_gradient:
			return (row + row if self.prologue.halves else row), 0
		return row, row // 2 if self.prologue.is_joint else row

	def column(self, col: Int32, cols: Int32) -> tuple[Int32, Boolean | None]:
		"""The column of its half that a column of elements is, and whether of the second half.

		Of a column past the last one, that of the last unit.
		"""
		if not self.prologue.is_joint:
			return col, None
		half = cols // 2
		is_second = col >= half
		of_half = select(is_second, Uint32(col - half), Uint32(col))
		return cutlass.min(Int32(of_half), half - self.unit), is_second

	def places(self, x_at: Any, grad_at: Any, col: Int32, cols: Int32) -> list[Any]:
		"""Where the 16 bytes of each input are.

		Args:
		  x_at: address of the row of the input.
		  grad_at: that of the gradient of the result.
		  col: the first column of the unit, as ``column`` gives it.
		  cols: columns of elements.
		"""
		at = col * self.size
		out = [x_at + at]
		if self.prologue.is_gated:
			half = cols * self.size
			out.append(x_at + (at + (half // 2 if self.prologue.is_joint else half)))
		if self.prologue.is_gradient:
			out.append(grad_at + at)
		return out

	def sources(
		self, x: cute.Tensor, grad: cute.Tensor | None, row: Int32, col: Int32, cols: Int32
	) -> tuple[list[tuple[Int64, Int64]], Boolean | None]:
		"""``places`` of a row in global memory, each with the bytes from there to the next row.

		And whether the column is of the second half, see ``column``.
		"""
		of_half, is_second = self.column(col, cols)
		pitches = [Int64(size) for size in self.row_bytes(cols)]
		x_at = grad_at = x.iterator.toint() + row * pitches[0]
		if grad is not None:
			grad_at = grad.iterator.toint() + row * pitches[1]
		places = self.places(x_at, grad_at, of_half, cols)
		of_each = [pitches[0]] * len(places)
		if grad is not None:
			of_each[-1] = pitches[1]
		return list(zip(places, of_each, strict=True)), is_second

	def made(self, inputs: Sequence[Sequence[Uint32]]) -> list[list[Float32]]:
		"""Elements in fp32, of words of each input in the order of ``places``.

		Of a joint prologue those of both halves.
		"""
		numbers = [unpack_words(words, self.prologue.dtype) for words in inputs]
		record, is_gradient = self.prologue.record, self.prologue.is_gradient
		return activated(record, is_gradient, self.arch, numbers)

	def words_of(self, inputs: Sequence[Sequence[Uint32]]) -> list[list[Uint32]]:
		"""``made``, rounded to ``dtype``."""
		if self.prologue.activation is None:
			return [list(words) for words in inputs]
		return [pack_words(numbers, self.dtype) for numbers in self.made(inputs)]

	def make(self, inputs: Sequence[Sequence[Uint32]], is_second: Boolean | None = None) -> list[Uint32]:
		"""Words of a unit's elements; ``is_second`` as ``column`` gives it."""
		first, *second = self.words_of(inputs)
		if not second:
			return first
		return [select(is_second, b, a) for a, b in zip(first, *second, strict=True)]

	def numbers(self, inputs: Sequence[Sequence[Uint32]], is_second: Boolean | None = None) -> list[Float32]:
		"""``make``, in fp32."""
		first, *second = self.made(inputs)
		if not second:
			return first
		bits = [[f32_as_bits(number) for number in half] for half in (first, *second)]
		return [bits_as_f32(select(is_second, b, a)) for a, b in zip(*bits, strict=True)]


def maker_of(config: Any) -> ElementMaker | None:
	"""What makes the elements of a configuration; None where they are the input's."""
	if config.prologue is None or config.prologue.activation is None:
		return None
	return ElementMaker(config.prologue, config.dtype, config.arch)
