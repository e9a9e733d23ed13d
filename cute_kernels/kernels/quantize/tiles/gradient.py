"""Gradients of an activation, and p times its result, to codes from one read of its inputs.

The loader brings tiles of the inputs; all warps turn them where they lie into tiles of the gradient
and of p a, as ``moe_activate_gradient`` has them; then four warps quantize the columns of each tile
of the stage, and four the rows of all. Who is done begins with the next stage, so warps take rows
from a counter. So do CTAs tiles, many of which have few rows. Of <grad, a> a tile's warp_in_team of each
row goes to memory, for a second kernel.

With 96 KiB a stage there are two, and the loader has the time in which one is worked on: tile to
load, and tile weights and scales, it has read by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import unpack_absmax
from cute_kernels.device.activation_curves import (
    TABLE_BYTES,
    FactorTable,
    quick_bound,
    weighted_gradient,
)
from cute_kernels.device.codecs import codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.memory import load_global_if, load_shared, store_shared
from cute_kernels.device.ptx import add_rn, bits_as_f32, f32_as_bits, select
from cute_kernels.formats.activations import parse_activation
from cute_kernels.kernels.quantize.amax import AmaxKernels
from cute_kernels.kernels.quantize.fakes import FakeBuffers
from cute_kernels.kernels.quantize.global_scales import GlobalScaleWriter
from cute_kernels.layout.shapes import SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .byte_codes import ByteTiles
from .geometry import (
    BOX_BYTES,
    BOX_SIZE,
    TILE_COLS,
    TileAddresses,
    TileDescriptor,
    TileGeometry,
    TileSharedMemory,
)
from .loader import DESCRIPTOR_WORDS, TileLoader, Tma
from .scales import write_column_scales
from .team import CopyBuffers, Team

if TYPE_CHECKING:
    from cute_kernels.device.codecs import GlobalScaleRegisters
    from cute_kernels.kernels.quantize.config import GradientConfig, TileConfig

_THREADS = 256
#: Lanes that share a row of a tile, eight columns each, and rows that a warp has at once.
_LANES = TILE_COLS // 8
_ROWS = WARP_SIZE // _LANES
#: Bytes of weights of a stage's rows; behind them, how many rows were taken.
_WEIGHTS = TILE_ROWS * 4
_FACTORS = _WEIGHTS + 16


class Inputs(NamedTuple):
    """CopyBuffers of boxes of the inputs, the weights of rows, given scales of both copies, and the
    counter of tiles.
    """

    x: Tma
    grad: Tma
    weight: cute.Tensor
    pair: cute.Tensor
    given: tuple[cute.Tensor | None, cute.Tensor | None]
    counter: cute.Tensor


class GradientLoader(TileLoader):
    """Loads tiles of the inputs, and the weights of their rows."""

    @cute.jit
    def load(
        self, groups: GroupCursor, cols: Int32, inputs: Inputs, shared: TileSharedMemory
    ) -> None:  # type: ignore[override]
        stage, phase, tall = Int32(0), Int32(1), self.config.band
        col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
        num_tiles = groups.used_tiles()
        item, end = cute.arch.block_idx()[0], num_tiles * col_tiles
        while item < end:
            band = item // (tall * col_tiles) * tall
            wanted, col_tile = self.tile_of(item, num_tiles, col_tiles)
            group, first, count = groups.locate_in_warp(wanted)
            least = item
            if count <= 0:
                head = groups.seek(band, Int32(0))[0]
                if head >= band + tall:
                    least = head // tall * (tall * col_tiles)  # no rows up to there
            taken = self.take(inputs.counter, item, end, least)
            if count > 0:
                weights = self.read_weights(inputs, first, count)
                scales = [
                    Int32(0) if of_copy is None else Int32(f32_as_bits(of_copy[group]))
                    for of_copy in inputs.given
                ]
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                tile = TileDescriptor(wanted, col_tile, first, count, group, *scales)
                self.describe(shared, stage, tile)
                self.load_tile(tile, inputs, stage, stage, shared)
                self.store_weights(weights, shared.factors.toint() + stage * _FACTORS)
                self.announce(shared, stage)
                phase ^= stage
                stage ^= 1
            item = self.next(inputs.counter, taken, end)
        cute.arch.mbarrier_wait(shared.empty + stage, phase)
        self.describe(shared, stage, TileDescriptor(*[Int32(0)] * 7))
        self.announce(shared, stage)

    @cute.jit
    def take(self, counter: cute.Tensor, item: Int32, end: Int32, least: Int32) -> Int32:
        """How many items were taken, in the first lane; that is asked before the answer is needed.

        CTAs began with items of their own. The next one is not before ``least``.
        """
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            if least > item:
                least = cutlass.min(least, end) - cute.arch.grid_dim()[0]
                cute.arch.atomic_max(counter.iterator, least, sem="relaxed", scope="gpu")
            taken = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return taken

    @cute.jit
    def next(self, counter: cute.Tensor, taken: Int32, end: Int32) -> Int32:
        """The item after those that were taken; who finds none after all additions clears the
        counter.
        """
        if cute.arch.lane_idx() == 0 and taken == end - 1:
            cute.arch.atomic_exch(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(taken, 0) + cute.arch.grid_dim()[0]

    def read_weights(self, inputs: Inputs, first: Int32, count: Int32) -> list[Uint32]:
        """Of a lane's row of each 32; 0 where there is none."""
        found, pairs = [], inputs.weight.shape[0]
        for i in range(TILE_ROWS // WARP_SIZE):
            row = i * WARP_SIZE + cute.arch.lane_idx()
            found += load_global_if(
                inputs.pair.iterator.toint() + Int64(first + row) * 4, 4, row, count
            )
        addresses = [Int32(select(Int32(at) < 0, Uint32(pairs), at)) for at in found]
        at = inputs.weight.iterator.toint()
        return [load_global_if(at + Int64(place) * 4, 4, place, pairs)[0] for place in addresses]

    @cute.jit
    def store_weights(self, weights: list[Uint32], to: Int32) -> None:
        """To shared memory, with no rows taken."""
        for i, p in enumerate(weights):
            store_shared(to + (i * WARP_SIZE + cute.arch.lane_idx()) * 4, [p])
        with cute.arch.elect_one():
            store_shared(to + _WEIGHTS, [Uint32(0)])

    def sources(self, tile: TileDescriptor, inputs: Inputs) -> list[tuple[Tma, Int32]]:
        first, half = tile.col_tile * TILE_COLS, inputs.grad.source.shape[1]
        return [
            *((inputs.x, first + t * half) for t in range(self.config.num_tiles)),
            (inputs.grad, first),
        ]

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        cute.arch.mbarrier_arrive(shared.full + full)  # each lane, for its weights


class GradientQuantizer(AmaxKernels):
    """Persistent quantizer of gradients, see the module."""

    def __init__(self, config: GradientConfig):
        self.config, self.dtype, self.arch = config, config.dtype, config.arch
        self.act = parse_activation(config.activation)
        #: Four warps a tile, for its columns, and four for rows.
        self.crews = config.num_tiles + 2
        self.tiles = [self.converter(copy) for copy in config.copies]
        self.loader = GradientLoader(config, self.tiles[0].columns.geometry)  # type: ignore[arg-type]
        self.threads = self.crews * config.copies[0].warps_per_team * WARP_SIZE
        self.has_given_scale = any(copy.fmt.has_given_scale for copy in config.copies)
        self.levels = GlobalScaleWriter(self.tiles[0].columns.codec)
        #: Levels of scales that are given become NaN when amaxes are known.
        self.marks_levels = self.has_given_scale and any(
            copy.fmt.nan_scales for copy in config.copies
        )
        #: Columnwise scale tiles of each kind of tile, and the most bytes of them.
        self.scale_tiles = [
            t.columns.is_tiled * scale_tiles(TILE_ROWS, t.columns.codec.block) for t in self.tiles
        ]
        self.scales_bytes = SF_TILE_BYTES * max(self.scale_tiles)
        self.table = None
        if (
            get_arch(config.arch).tuned_by == "time"
            and config.has_table_room
            and quick_bound(self.act) is not None
        ):
            self.table = FactorTable.create(self.act, config.dtype)

    def converter(self, copy: TileConfig) -> ByteTiles:
        codec = codec_of(copy.format, copy.dtype, copy.arch)
        geometry = TileGeometry(copy.dtype, codec.block)
        return ByteTiles(copy, codec, geometry, Team(copy, geometry))  # type: ignore[arg-type]

    @staticmethod
    def fake_args(config: GradientConfig) -> tuple[Any, ...]:
        fake, scaled = (FakeBuffers(config.dtype, "ragged", copy.format) for copy in config.copies)
        scaled.rows, scaled.groups, pairs = fake.rows, fake.groups, cute.sym_int()
        return (
            fake.x(),
            scaled.x(),
            fake.offs(),
            compact(Float32, pairs, align=4),
            compact(Int32, fake.rows, align=4),
            *(fake.level(), scaled.level()),
            *(fake.codes(), fake.scales(), fake.codes_t(), fake.scales_t(), *fake.results()),
            *(None, None, scaled.codes_t(), scaled.scales_t(), *scaled.results()),
            compact(Float32, cute.sym_int(), fake.rows, align=4),
            compact(Float32, pairs, align=4),
            Int32(1),
            compact(Int32, 1, align=4),
            env_stream(),
        )

    @cute.jit
    def __call__(self, *args: Any) -> None:
        x, grad, offs, weight, pair, *of_copies, sums, dweight, num_sms, counter, stream = args
        given, out = tuple(of_copies[:2]), tuple(of_copies[2:])
        if const_expr(self.marks_levels):
            both = out[: len(out) // 2], out[len(out) // 2 :]
            scale_invs, scales, amaxes = zip(*(one[4:] for one in both), strict=True)
            self.launch_levels(amaxes, given, scale_invs, scales, num_sms, stream)
        elif const_expr(self.has_given_scale):
            first, *other = [t for t in (out[len(out) // 2 - 1], out[-1]) if t is not None]
            self.launch_clear(first, num_sms, stream, *other)
        copies = [self.loader.copy_of(t, t.shape[0]) for t in (x, grad)]
        self.kernel(*copies[0], *copies[1], offs, weight, pair, given, out, sums, counter).launch(
            grid=[num_sms, 1, 1],
            block=[self.threads + WARP_SIZE, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        ctas = cutlass.min((x.shape[0] + (_THREADS - 1)) // _THREADS, num_sms * (2048 // _THREADS))
        self.add(x, offs, pair, sums, dweight).launch(
            grid=[ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add(
        self,
        x: cute.Tensor,
        offs: cute.Tensor,
        pair: cute.Tensor,
        sums: cute.Tensor,
        dweight: cute.Tensor,
    ) -> None:
        row = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        last = GroupCursor.from_tensors(x, offs).end_row()
        while row < last:
            at, total = pair[row], Float32(0.0)
            if at >= 0 and at < dweight.shape[0]:
                for t in cutlass.range(sums.shape[0], unroll=8):
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
        given: tuple[cute.Tensor | None, ...],
        out: tuple[cute.Tensor | None, ...],
        sums: cute.Tensor,
        counter: cute.Tensor,
    ) -> None:
        smem, stages = cutlass.memory.SmemAllocator(), self.config.num_stages

        def part(size: int, align: int = 16) -> cute.Pointer:
            return smem.allocate_array(Uint8, max(size, 1), byte_alignment=align)

        table = None
        if const_expr(self.table is not None):
            table = part(TABLE_BYTES)  # the first, so that addresses in it are low
        tiles = part(stages * self.config.tile_bytes, 1024)
        shared = TileSharedMemory(
            tiles=tiles,
            scales=part(self.config.num_tiles * SF_TILE_BYTES),
            scales_t=part(2 * (self.config.num_tiles + 1) * self.scales_bytes),
            squares=tiles,
            factors=part(stages * _FACTORS),
            descriptors=smem.allocate_array(Int32, stages * DESCRIPTOR_WORDS, byte_alignment=16),
            full=smem.allocate_array(Int64, stages, byte_alignment=8),
            empty=smem.allocate_array(Int64, stages, byte_alignment=8),
            table=table,
        )
        tid = cute.arch.thread_idx()[0]
        if tid < stages:
            cute.arch.mbarrier_init(shared.full + tid, WARP_SIZE)
            cute.arch.mbarrier_init(shared.empty + tid, self.threads // WARP_SIZE)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        groups, warp = (
            GroupCursor.from_tensors(x_source, offs),
            cute.arch.make_warp_uniform(tid // WARP_SIZE),
        )
        cols = x_source.shape[1], grad_source.shape[1]
        if warp == self.threads // WARP_SIZE:
            boxes = Tma(x_copy, x_source, x_box), Tma(grad_copy, grad_source, grad_box)
            inputs = Inputs(*boxes, weight, pair, given, counter)
            self.loader.load(groups, cols[1], inputs, shared)
        else:
            if const_expr(self.table is not None):
                self.table.fill(table.toint(), tid, self.threads)
            both = out[: len(out) // 2], out[len(out) // 2 :]
            copies, amaxes = tuple(CopyBuffers(*one[:4]) for one in both), [one[-1] for one in both]
            thread, marked = cute.arch.block_idx()[0] * self.threads + tid, [None, None]
            if const_expr(self.marks_levels):
                marked = [
                    one[4] if copy.fmt.nan_scales else None
                    for one, copy in zip(both, self.config.copies, strict=True)
                ]
            else:
                for i, one in enumerate(both):
                    levels = GlobalScaleWriter(self.tiles[i].columns.codec)
                    levels.write(
                        given[i], *one[4:-1], thread, cute.arch.grid_dim()[0] * self.threads
                    )
            self.compute(groups, cols, copies, amaxes, marked, sums, warp, shared)

    @cute.jit
    def compute(
        self,
        groups: GroupCursor,
        cols: Any,
        out: Any,
        amaxes: Any,
        marked: Any,
        sums: cute.Tensor,
        warp: Int32,
        shared: TileSharedMemory,
    ) -> None:
        config, own = self.config, self.config.copies[0]
        crew = warp // own.warps_per_team
        warp_in_team = warp - crew * own.warps_per_team
        stage, phase, count = Int32(0), Int32(0), Int32(1)
        running_absmax, absmax_group = Uint32(0), Int32(0)
        while count > 0:
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            tile = self.loader.read_descriptor(shared, stage)
            count = tile.num_rows
            if const_expr(self.has_given_scale):
                if count == 0 or tile.group != absmax_group:
                    self.report(amaxes, marked, crew, absmax_group, running_absmax)
                    running_absmax, absmax_group = Uint32(0), tile.group
            if count > 0:
                at = shared.tiles.toint() + stage * config.tile_bytes
                self.make(tile, at, shared.factors.toint() + stage * _FACTORS, sums, shared.table)
                # The next load of this stage is an asynchronous write after these.
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=self.crews + 1, number_of_threads=self.threads)
                columns = cols[1] // TILE_COLS
                if crew > config.num_tiles:
                    for t in range_constexpr(config.num_tiles):
                        there = tile._replace(col_tile=t * columns + tile.col_tile)
                        addresses = TileAddresses(
                            at + t * own.tile_bytes,
                            shared.scales.toint() + t * SF_TILE_BYTES,
                            at,
                            at,
                        )
                        copy = (out[0].codes, out[0].scales)
                        self.tiles[0].rows.convert(
                            groups,
                            cols[0],
                            self.level(0, tile),
                            *copy,
                            there,
                            warp_in_team,
                            addresses,
                            Uint32(0),
                        )
                else:
                    scales_t = shared.scales_t.toint() + (crew * 2 + stage) * self.scales_bytes
                    addresses = TileAddresses(at + crew * own.tile_bytes, at, scales_t, at)
                    if crew < config.num_tiles:
                        there = tile._replace(col_tile=crew * columns + tile.col_tile)
                        running_absmax = self.convert_columns(
                            0,
                            groups,
                            cols[0],
                            out[0],
                            there,
                            crew,
                            warp_in_team,
                            addresses,
                            running_absmax,
                        )
                    else:
                        running_absmax = self.convert_columns(
                            1,
                            groups,
                            cols[1],
                            out[1],
                            tile,
                            crew,
                            warp_in_team,
                            addresses,
                            running_absmax,
                        )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
            phase ^= stage
            stage ^= 1

    @cute.jit
    def make(
        self,
        tile: TileDescriptor,
        tile_at: Int32,
        factors_at: Int32,
        sums: cute.Tensor,
        table: cute.Pointer | None,
    ) -> None:
        config, lane = self.config, cute.arch.lane_idx()
        unit, second = lane % _LANES, lane // _LANES
        of_tile = [
            tile_at + unit // 8 * BOX_SIZE + t * config.copies[0].tile_bytes
            for t in range(config.num_tiles + 1)
        ]
        first = cute.arch.shuffle_sync(self.take(factors_at), 0)
        while first < tile.num_rows:
            after = self.take(factors_at)
            # Of an odd number of rows the last one twice.
            row = cutlass.min(first + second, tile.num_rows - 1)
            place = row * BOX_BYTES + (unit ^ row) % 8 * 16
            words = [load_shared(at + place, 4) for at in of_tile]
            *inputs, grad = [unpack_words(of_one, config.dtype) for of_one in words]
            p = bits_as_f32(load_shared(factors_at + row * 4, 1)[0])
            factors = None if self.table is None else self.table.factors(words[0], table.toint())
            made, scaled, total = weighted_gradient(self.act, config, inputs, grad, p, factors)
            cute.arch.sync_warp()  # both have read the row
            if first + second < tile.num_rows:
                for at, numbers in zip(of_tile, [*made, scaled], strict=True):
                    store_shared(at + place, pack_words(numbers, config.dtype))
                if unit == 0:
                    sums[tile.col_tile, tile.first_row + row] = total
            first = cute.arch.shuffle_sync(after, 0)
        if tile.num_rows < TILE_ROWS:
            self.clear_rows(tile.num_rows, tile_at)

    @cute.jit
    def take(self, factors_at: Int32) -> Int32:
        """The first of the next rows that no warp has, in the first lane."""
        first = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = cute.make_ptr(Int32, factors_at + _WEIGHTS, cute.AddressSpace.smem)
            first = cute.arch.atomic_add(counter, Int32(_ROWS), sem="relaxed", scope="cta")
        return first

    @cute.jit
    def clear_rows(self, count: Int32, tile_at: Int32) -> None:
        """Zero rows of tiles from ``count`` on."""
        for b in range_constexpr(self.config.tile_bytes // BOX_SIZE):
            base = tile_at + b * BOX_SIZE + count * BOX_BYTES
            for i in cutlass.range(
                cute.arch.thread_idx()[0], (TILE_ROWS - count) * 8, self.threads, unroll=1
            ):
                store_shared(base + i * 16, [Uint32(0)] * 4)

    @cute.jit
    def convert_columns(
        self, kind: int, groups: GroupCursor, cols: Int32, out: CopyBuffers, *where: Any
    ) -> Uint32:
        (tile, crew, warp_in_team, addresses, running_absmax), tiles, count = (
            where,
            self.tiles[kind],
            self.scale_tiles[kind],
        )
        copy = (self.level(kind, tile), out.codes_t, out.scales_t)
        running_absmax = tiles.columns.convert(
            groups, cols, *copy, tile, warp_in_team, addresses, running_absmax
        )
        if const_expr(count > 0):
            tiles.team.sync(crew)
            if warp_in_team < count:
                write_column_scales(
                    groups, out.scales_t, tile, addresses.scales_t, warp_in_team, count
                )
        return running_absmax

    def level(self, kind: int, tile: TileDescriptor) -> GlobalScaleRegisters:
        """What codes of a group are relative to."""
        return self.tiles[kind].columns.codec.global_scale(
            bits_as_f32(Uint32((tile.amax, tile.column_amax)[kind]))
        )

    @cute.jit
    def report(
        self, amaxes: Any, marked: Any, crew: Int32, group: Int32, running_absmax: Uint32
    ) -> None:
        """Fold tile a warp's columns have running_absmax of a group into the group's amax; rows are those of
        columns.
        """
        best = unpack_absmax(running_absmax, self.dtype, self.arch)
        for i in range_constexpr(2):
            if const_expr(amaxes[i] is not None):
                if (crew == self.config.num_tiles) == bool(i):
                    self.merge(amaxes[i], group, best, marked[i])
