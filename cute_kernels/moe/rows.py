"""Rows of tokens to rows of experts by an index, and back as weighted sums.

A warp takes a strip of a row at a time. Every lane has its loads under way before it uses any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, cute

from ..device.constants import WARP_SIZE
from ..device.convert import pack_words, unpack_words
from ..device.launch import DSL_TYPES, GridKernel, compact, env_stream
from ..device.memory import load_global_if, store_global, store_global_half
from ..device.ptx import add_rn, mul_rn
from ..quantize.config import DTYPE_BYTES

if TYPE_CHECKING:
	from .config import CombineConfig, GatherConfig

_WARPS = 8
_THREADS = _WARPS * WARP_SIZE
#: Loads of a lane at a time.
_LOADS = 4


class GatherKernel(GridKernel):
	"""``out[r] = x[index[r]]``, zeros where the index is none of x's rows."""

	ctas_per_sm, num_threads = 8, _THREADS

	def __init__(self, config: GatherConfig):
		self.width = config.width

	@staticmethod
	def fake_args(config: GatherConfig) -> tuple[Any, ...]:
		"""Stand-ins for (x, index, out, num_sms, stream)."""
		element, width = (Int16 if config.width == 2 else Int32), config.width
		rows = cute.sym_int()
		cols = cute.sym_int(divisibility=max(1, width // 4))
		x = compact(element, cute.sym_int(), cols, align=width)
		index = compact(Int32, rows, align=4)
		return (x, index, compact(element, rows, cols, align=width), Int32(1), env_stream())

	@cute.kernel
	def kernel(self, x: cute.Tensor, index: cute.Tensor, out: cute.Tensor) -> None:
		tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
		warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
		row_bytes = x.shape[1] * (x.element_type.width // 8)
		strip = WARP_SIZE * _LOADS * self.width
		strips = (row_bytes + strip - 1) // strip
		items = Int64(out.shape[0]) * strips
		item, step = Int64(warp), cute.arch.grid_dim()[0] * _WARPS
		while item < items:
			r = Int32(item // strips)
			at = Int32(item - Int64(r) * strips) * strip + lane * self.width
			source = index[r]
			end = row_bytes
			if source < 0 or source >= x.shape[0]:
				source, end = Int32(0), Int32(0)
			from_ = x.iterator.toint() + Int64(source) * row_bytes + at
			to = out.iterator.toint() + Int64(r) * row_bytes + at
			ats = [at + i * (WARP_SIZE * self.width) for i in range(_LOADS)]
			loaded = [load_global_if(from_ + (a - at), self.width, a, end) for a in ats]
			for i in cutlass.range_constexpr(_LOADS):
				if ats[i] < row_bytes:
					if cutlass.const_expr(self.width == 2):
						store_global_half(to + (ats[i] - at), loaded[i][0])
					else:
						store_global(to + (ats[i] - at), loaded[i])
			item += step


class CombineKernel(GridKernel):
	"""``y[t] = sum over k of weight[t, k] * h[row[t, k]]``, in fp32 and in the order of k."""

	ctas_per_sm, num_threads = 8, _THREADS

	def __init__(self, config: CombineConfig):
		self.config = config
		self.width = 16 // DTYPE_BYTES[config.dtype] if config.vectorized else 1

	@staticmethod
	def fake_args(config: CombineConfig) -> tuple[Any, ...]:
		"""Stand-ins for (h, row, weight, y, num_sms, stream)."""
		tokens, top_k = cute.sym_int(), cute.sym_int()
		width = 16 // DTYPE_BYTES[config.dtype] if config.vectorized else 1
		cols = cute.sym_int(divisibility=width)
		sizes = [width * DTYPE_BYTES[dtype] for dtype in (config.dtype, config.out)]
		weight = compact(Float32, tokens, top_k, align=4) if config.weighted else None
		return (
			compact(DSL_TYPES[config.dtype], cute.sym_int(), cols, align=sizes[0]),
			compact(Int32, tokens, top_k, align=4),
			weight,
			compact(DSL_TYPES[config.out], tokens, cols, align=min(sizes[1], 32)),
			Int32(1),
			env_stream(),
		)

	@cute.kernel
	def kernel(self, h: cute.Tensor, row: cute.Tensor, weight: cute.Tensor | None, y: cute.Tensor) -> None:
		tid, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
		warp = cute.arch.block_idx()[0] * _WARPS + tid // WARP_SIZE
		cols, top_k = h.shape[1], row.shape[1]
		strip = WARP_SIZE * self.width
		strips = (cols + strip - 1) // strip
		items = Int64(y.shape[0]) * strips
		item, step = Int64(warp), cute.arch.grid_dim()[0] * _WARPS
		while item < items:
			t = Int32(item // strips)
			column = Int32(item - Int64(t) * strips) * strip + lane * self.width
			sums = cute.make_rmem_tensor(self.width, Float32)
			sums.fill(0.0)
			k = Int32(0)
			while k < top_k:
				self.add(h, row, weight, sums, t, k, column)
				k += _LOADS
			if column < cols:
				self.store(y, sums, t, column)
			item += step

	@cute.jit
	def add(
		self,
		h: cute.Tensor,
		row: cute.Tensor,
		weight: cute.Tensor | None,
		sums: cute.Tensor,
		t: Int32,
		k: Int32,
		column: Int32,
	) -> None:
		"""Add the rows of some of a token's experts; those that are not there add zeros."""
		cols, num_bytes = h.shape[1], self.width * DTYPE_BYTES[self.config.dtype]
		loaded, weights = [], []
		for i in cutlass.range_constexpr(_LOADS):
			source, end, w = Int32(0), Int32(0), Float32(0.0)
			if k + i < row.shape[1]:
				source = row[t, k + i]
				end = cols
				if source < 0 or source >= h.shape[0]:
					source, end = Int32(0), Int32(0)
				if cutlass.const_expr(self.config.weighted):
					if end > 0:
						w = weight[t, k + i]
			place = Int64(source) * cols + column
			address = h.iterator.toint() + place * DTYPE_BYTES[self.config.dtype]
			loaded.append(load_global_if(address, num_bytes, column, end))
			weights.append(w)
		for i in cutlass.range_constexpr(_LOADS):
			numbers = unpack_words(loaded[i], self.config.dtype)
			for c in cutlass.range_constexpr(self.width):
				number = numbers[c]
				if cutlass.const_expr(self.config.weighted):
					number = mul_rn(number, weights[i])
				sums[c] = add_rn(sums[c], number)

	@cute.jit
	def store(self, y: cute.Tensor, sums: cute.Tensor, t: Int32, column: Int32) -> None:
		if cutlass.const_expr(self.width == 1):
			y[t, column] = sums[0].to(y.element_type)
		else:
			words = pack_words([sums[c] for c in range(self.width)], self.config.out)
			size = DTYPE_BYTES[self.config.out]
			address = y.iterator.toint() + (Int64(t) * y.shape[1] + column) * size
			for i in cutlass.range_constexpr(0, len(words), 4):
				store_global(address + 4 * i, words[i : i + 4])
