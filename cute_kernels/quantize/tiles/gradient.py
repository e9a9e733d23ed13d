"""Gradients of an activation, and p times its result, to codes from one read of its inputs.

The loader brings tiles of the inputs; all warps turn them where they lie into tiles of the gradient
and of p a, as ``moe_activate_gradient`` has them; then four warps quantize each. Warps that are done
begin with the next stage. Of <grad, a> a tile's part of each row goes to memory, for a second kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from cute_kernels.activations import parse_activation
from cute_kernels.device.activations import weighted_gradient
from cute_kernels.device.codecs import codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.groups import Grouping
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import add_rn, bits_as_f32, f32_as_bits
from cute_kernels.layout.shapes import SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS
from cute_kernels.quantize.fakes import FakeBuffers

from .bytes import ByteTiles
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, Descriptor, Encoding, SharedMemory, TileGeometry, TilePlaces
from .loader import DESCRIPTOR_WORDS, TileLoader, Tma
from .scales import write_column_scales
from .team import Copies, Team

if TYPE_CHECKING:
	from cute_kernels.quantize.config import GradientConfig, TileConfig

_THREADS = 256
#: Lanes that share a row of a tile, eight columns each.
_LANES = TILE_COLS // 8


class Inputs(NamedTuple):
	"""Copies of boxes of the inputs, and the weights of rows."""

	x: Tma
	grad: Tma
	weight: cute.Tensor
	pair: cute.Tensor


class GradientLoader(TileLoader):
	"""Loads tiles of the inputs, and the weights of their rows."""

	def sources(self, what: Descriptor, inputs: Inputs) -> list[tuple[Tma, Int32]]:
		first, half = what.col_tile * TILE_COLS, inputs.grad.source.shape[1]
		return [*((inputs.x, first + t * half) for t in range(self.config.num_tiles)), (inputs.grad, first)]

	@cute.jit
	def load_tile(self, what: Descriptor, inputs: Inputs, stage: Int32, full: Int32, shared: SharedMemory) -> None:
		TileLoader.load_tile(self, what, inputs, stage, full, shared)
		for i in cutlass.range_constexpr(TILE_ROWS // WARP_SIZE):
			row, p = i * WARP_SIZE + cute.arch.lane_idx(), Float32(0.0)
			if row < what.count:
				at = inputs.pair[what.first + row]
				if at >= 0 and at < inputs.weight.shape[0]:
					p = inputs.weight[at]
			store_shared(shared.factors.toint() + (stage * TILE_ROWS + row) * 4, [f32_as_bits(p)])

	@cute.jit
	def announce(self, shared: SharedMemory, full: Int32) -> None:
		cute.arch.mbarrier_arrive(shared.full + full)  # each lane, for its weights


class GradientQuantizer:
	"""Persistent quantizer of gradients, see the module."""

	def __init__(self, config: GradientConfig):
		self.config = config
		self.act = parse_activation(config.activation)
		self.crews = config.num_tiles + 1
		self.tiles = [self.converter(copy) for copy in config.copies]
		self.loader = GradientLoader(config, self.tiles[0].columns.tile)  # type: ignore[arg-type]
		self.threads = self.crews * config.copies[0].warps_per_team * WARP_SIZE
		#: Columnwise scale tiles of each kind of tile, and the most bytes of them.
		self.scale_tiles = [t.columns.is_tiled * scale_tiles(TILE_ROWS, t.columns.codec.block) for t in self.tiles]
		self.scales_bytes = SF_TILE_BYTES * max(self.scale_tiles)

	def converter(self, copy: TileConfig) -> ByteTiles:
		codec = codec_of(copy.format, copy.dtype, copy.arch)
		tile = TileGeometry(copy.dtype, codec.block)
		return ByteTiles(copy, codec, tile, Team(copy, tile))  # type: ignore[arg-type]

	@staticmethod
	def fake_args(config: GradientConfig) -> tuple[Any, ...]:
		fake, scaled = (FakeBuffers(config.dtype, "ragged", copy.format) for copy in config.copies)
		scaled.rows, pairs = fake.rows, cute.sym_int()
		return (
			fake.x(),
			scaled.x(),
			fake.offs(),
			compact(Float32, pairs, align=4),
			compact(Int32, fake.rows, align=4),
			*(fake.codes(), fake.scales(), fake.codes_t(), fake.scales_t()),
			*(scaled.codes_t(), scaled.scales_t()),
			compact(Float32, cute.sym_int(), fake.rows, align=4),
			compact(Float32, pairs, align=4),
			Int32(1),
			env_stream(),
		)

	@cute.jit
	def __call__(self, *args: Any) -> None:
		x, grad, offs, weight, pair, *out, sums, dweight, num_sms, stream = args
		copies = [self.loader.copy_of(t, t.shape[0]) for t in (x, grad)]
		self.kernel(*copies[0], *copies[1], offs, weight, pair, tuple(out), sums).launch(
			grid=[num_sms, 1, 1], block=[self.threads + WARP_SIZE, 1, 1], stream=stream, min_blocks_per_mp=1
		)
		self.add(x, offs, pair, sums, dweight).launch(grid=[num_sms, 1, 1], block=[_THREADS, 1, 1], stream=stream)

	@cute.kernel
	def add(self, x: cute.Tensor, offs: cute.Tensor, pair: cute.Tensor, sums: cute.Tensor, dweight: cute.Tensor) -> None:
		row = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
		last = Grouping.of(x, offs).last_row()
		while row < last:
			at, total = pair[row], Float32(0.0)
			if at >= 0 and at < dweight.shape[0]:
				for t in cutlass.range(sums.shape[0], unroll=4):
					total = add_rn(total, sums[t, row])
				dweight[at] = total
			row += cute.arch.grid_dim()[0] * _THREADS

	@cute.kernel
	def kernel(
		self,
		x_copy: cute.CopyAtom,
		x_source: cute.Tensor,
		x_box: cute.ComposedLayout,
		grad_copy: cute.CopyAtom,
		grad_source: cute.Tensor,
		grad_box: cute.ComposedLayout,
		offs: cute.Tensor,
		weight: cute.Tensor,
		pair: cute.Tensor,
		out: tuple[cute.Tensor, ...],
		sums: cute.Tensor,
	) -> None:
		smem, stages = cutlass.memory.SmemAllocator(), self.config.num_stages

		def part(size: int, align: int = 16) -> cute.Pointer:
			return smem.allocate_array(Uint8, max(size, 1), byte_alignment=align)

		tiles = part(stages * self.config.tile_bytes, 1024)
		shared = SharedMemory(
			tiles=tiles,
			scales=part(self.crews * SF_TILE_BYTES),
			scales_t=part(2 * self.crews * self.scales_bytes),
			squares=tiles,
			factors=part(stages * TILE_ROWS * 4),
			descriptors=smem.allocate_array(Int32, stages * DESCRIPTOR_WORDS, byte_alignment=16),
			full=smem.allocate_array(Int64, 2, byte_alignment=8),
			empty=smem.allocate_array(Int64, stages, byte_alignment=8),
		)
		tid = cute.arch.thread_idx()[0]
		if tid < 2:
			cute.arch.mbarrier_init(shared.full + tid, WARP_SIZE)
		if tid < stages:
			cute.arch.mbarrier_init(shared.empty + tid, self.threads // WARP_SIZE)
		cute.arch.mbarrier_init_fence()
		cute.arch.sync_threads()
		groups, warp = Grouping.of(x_source, offs), cute.arch.make_warp_uniform(tid // WARP_SIZE)
		cols = x_source.shape[1], grad_source.shape[1]
		if warp == self.threads // WARP_SIZE:
			inputs = Inputs(Tma(x_copy, x_source, x_box), Tma(grad_copy, grad_source, grad_box), weight, pair)
			self.loader.load(groups, cols[1], None, None, inputs, shared)
		else:
			copies = (Copies(*out[:4]), Copies(None, None, *out[4:]))
			self.compute(groups, cols, copies, sums, warp, shared)

	@cute.jit
	def compute(
		self, groups: Grouping, cols: Any, out: Any, sums: cute.Tensor, warp: Int32, shared: SharedMemory
	) -> None:
		config, own = self.config, self.config.copies[0]
		crew = warp // own.warps_per_team
		part = warp - crew * own.warps_per_team
		stage, phase, copy, count = Int32(0), Int32(0), Int32(0), Int32(1)
		while count > 0:
			cute.arch.mbarrier_wait(shared.full + copy, phase)
			what = self.loader.read_descriptor(shared, stage)
			count = what.count
			if count > 0:
				at = shared.tiles.toint() + stage * config.tile_bytes
				self.make(what, at, shared.factors.toint() + stage * (4 * TILE_ROWS), sums)
				# The next load of this stage is an asynchronous write after these.
				cute.arch.fence_view_async_shared()
				cute.arch.barrier(barrier_id=self.crews + 1, number_of_threads=self.threads)
				places = TilePlaces(
					tile=at + crew * own.tile_bytes,
					scales=shared.scales.toint() + crew * SF_TILE_BYTES,
					scales_t=shared.scales_t.toint() + (crew * 2 + copy) * self.scales_bytes,
					squares=at,
				)
				if crew < config.num_tiles:
					column = crew * (cols[1] // TILE_COLS) + what.col_tile
					self.quantize(0, groups, cols[0], out[0], what._replace(col_tile=column), crew, part, places)
				else:
					self.quantize(1, groups, cols[1], out[1], what, crew, part, places)
				cute.arch.sync_warp()
				with cute.arch.elect_one():
					cute.arch.mbarrier_arrive(shared.empty + stage)
			stage, _ = self.loader.next_stage(stage, phase, 1)
			phase ^= copy
			copy ^= 1

	@cute.jit
	def make(self, what: Descriptor, tile_at: Int32, weights_at: Int32, sums: cute.Tensor) -> None:
		config, thread = self.config, cute.arch.thread_idx()[0]
		unit, row = thread % _LANES, thread // _LANES
		step, pair = self.threads // _LANES, row // 2 * 2
		first = tile_at + unit // 8 * BOX_SIZE + row * BOX_BYTES + (unit ^ row) % 8 * 16
		of_unit = [first + t * config.copies[0].tile_bytes for t in range(self.crews)]
		# A warp has two rows at once: of an odd number, one more than there are.
		for n in cutlass.range((what.count - pair + step - 1) // step, unroll=1):
			after = n * (step * BOX_BYTES)
			*inputs, grad = [unpack_words(load_shared(at + after, 4), config.dtype) for at in of_unit]
			of_row = row + n * step
			p = bits_as_f32(load_shared(weights_at + of_row * 4, 1)[0])
			made, scaled, total = weighted_gradient(self.act, config, inputs, grad, p)
			for at, numbers in zip(of_unit, [*made, scaled], strict=True):
				store_shared(at + after, pack_words(numbers, config.dtype))
			if unit == 0 and of_row < what.count:
				sums[what.col_tile, what.first + of_row] = total

	@cute.jit
	def quantize(self, kind: int, groups: Grouping, cols: Int32, out: Copies, *where: Any) -> None:
		(what, _, part, places), tiles, count = where, self.tiles[kind], self.scale_tiles[kind]
		by = Encoding(tiles.columns.codec.zero_level(), None, None)
		tiles.convert(groups, cols, (by, by), None, out, *where, Uint32(0))
		if cutlass.const_expr(count > 0):
			if part < count:
				write_column_scales(groups, out.scales_t, what, places.scales_t, part, count)
