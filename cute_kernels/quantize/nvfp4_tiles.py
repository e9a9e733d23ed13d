"""NVFP4 tile by tile: rowwise, columnwise or both from one read, once the amaxes are known.

A tile is 128 slot rows by 128 columns. It lies in shared memory as boxes 128 bytes wide, in TMA's
128-byte swizzle: the 16-byte chunk c of row r is at chunk c ^ (r % 8). Both directions read that
without bank conflicts: rowwise, eight lanes take the same chunk of eight rows; columnwise, a warp
takes the 32 words of one row.

Roles:     one loader warp | num_teams teams of four warps, team n takes every n-th tile.
Pipeline:  tiles, loader -> team: full: one arrival and the bytes of the rows that exist; empty: one
           arrival a warp. A descriptor in shared memory says what the stage holds.

A row of a lane's 32x64 unit gives 32 bytes of codes and 4 scale bytes; a column of its 64-row unit
likewise. Every code store is a whole 32-byte sector; rowwise scales of a warp's 32 rows fill four
sectors, columnwise scales go through shared memory and leave as 512-byte tiles.

Counted by perf.count_quantize at 1024 x 4096 bf16: 5.4 PTX instructions an element rowwise, 5.5
columnwise, 10.5 both, 10.0 both with 16x16 blocks; 2.05 bytes read. On sm_90a 9.7 rowwise, 9.4
columnwise, 18.4 both, 17.8 both with 16x16 blocks.

Measured on an H200 (65536 x 7168 bf16): 95 % of a copy's rate rowwise, 90 % columnwise, 83 % both,
also with 16x16 blocks. perf/results/quantize_h200.md has what was tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.device.groups import Grouping, next_item
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.nvfp4 import encode_factor, second_level
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits
from cute_kernels.layout.shapes import TILE_ROWS
from cute_kernels.quantize.amax import AmaxKernels
from cute_kernels.quantize.fakes import FakeBuffers, dsl_dtype, env_stream
from cute_kernels.quantize.nvfp4_tile_columns import ColumnConverter
from cute_kernels.quantize.nvfp4_tile_rows import RowConverter
from cute_kernels.quantize.tile import (
    BOX_BYTES,
    BOX_SIZE,
    COL_BLOCKS,
    ROW_BLOCKS,
    SCALE_CODES,
    TILE_COLS,
    Descriptor,
    Level,
    TileGeometry,
)

if TYPE_CHECKING:
    from cute_kernels.quantize.config import TileConfig

__all__ = ["TileQuantizer"]

_WARP = 32
_DESCRIPTOR_WORDS = 8
_SCALES_T_BYTES = ROW_BLOCKS * TILE_COLS
_SQUARES_BYTES = 4 * ROW_BLOCKS * COL_BLOCKS
_FACTORS_BYTES = 4 * SCALE_CODES


class SharedMemory(NamedTuple):
    """Pointers into shared memory.

    Attributes:
        tiles: num_stages stages of one tile.
        scales_t: columnwise scale bytes of each team's tile, two deep.
        squares: amaxes of the 16x16 blocks of each team's tile, two deep.
        factors: encode factors of each team's group, by scale byte.
        descriptors: what each stage holds, see ``Descriptor``.
        full: arrival barriers of each team's tiles, two deep, see ``load``.
        empty: release barriers of the stages.
    """

    tiles: cute.Pointer
    scales_t: cute.Pointer
    squares: cute.Pointer
    factors: cute.Pointer
    descriptors: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class TileQuantizer(AmaxKernels):
    """Persistent tile quantizer, see the module."""

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.tile = TileGeometry(config.dtype)
        self.columns = ColumnConverter(config)
        self.rows = RowConverter(config)
        self.team_threads = config.warps_per_team * _WARP
        self.num_compute_warps = config.num_teams * config.warps_per_team
        self.num_threads = (self.num_compute_warps + 1) * _WARP

    @staticmethod
    def fake_args(config: TileConfig) -> tuple[Any, ...]:
        """Stand-ins for the arguments of ``__call__``."""
        fake = FakeBuffers(config.dtype, config.grouping == "uniform")
        return (
            fake.x(),
            fake.offs(),
            fake.amax(per_row=True) if config.row_scaled else None,
            fake.amax() if config.uses_group_amax else None,
            fake.codes() if config.rowwise else None,
            fake.scales() if config.rowwise else None,
            fake.codes_t() if config.columnwise else None,
            fake.scales_t() if config.columnwise else None,
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        codes: cute.Tensor | None,
        scales: cute.Tensor | None,
        codes_t: cute.Tensor | None,
        scales_t: cute.Tensor | None,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        if cutlass.const_expr(self.config.compute_amax):
            self.launch_amax(x, offs, row_amax, group_amax, num_sms, stream)
        rows, cols = Grouping.of(x, offs).num_rows, x.shape[len(x.shape) - 1]
        matrix = cute.make_tensor(
            x.iterator, cute.make_layout((rows, cols), stride=(Int64(cols), 1))
        )
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, x.element_type)
        box = cute.tile_to_shape(atom, (TILE_ROWS, self.tile.box_cols), order=(0, 1))
        line = cute.make_composed_layout(
            atom.inner, 0, cute.make_layout((1, self.tile.box_cols), stride=(self.tile.box_cols, 1))
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        box_copy, box_source = cpasync.make_tiled_tma_atom(
            op, matrix, box, (TILE_ROWS, self.tile.box_cols)
        )
        line_copy, line_source = cpasync.make_tiled_tma_atom(
            op, matrix, line, (1, self.tile.box_cols)
        )
        self.kernel(
            x,
            box_copy,
            box_source,
            box,
            line_copy,
            line_source,
            line,
            offs,
            row_amax,
            group_amax,
            codes,
            scales,
            codes_t,
            scales_t,
        ).launch(
            grid=[num_sms, 1, 1], block=[self.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        box_copy: cute.CopyAtom,
        box_source: cute.Tensor,
        box: cute.ComposedLayout,
        line_copy: cute.CopyAtom,
        line_source: cute.Tensor,
        line: cute.ComposedLayout,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        codes: cute.Tensor | None,
        scales: cute.Tensor | None,
        codes_t: cute.Tensor | None,
        scales_t: cute.Tensor | None,
    ) -> None:
        config = self.config
        smem = cutlass.memory.SmemAllocator()
        stages, copies = config.num_stages, 2 * config.num_teams
        shared = SharedMemory(
            tiles=smem.allocate_array(Uint8, stages * config.tile_bytes, byte_alignment=1024),
            scales_t=smem.allocate_array(Uint8, copies * _SCALES_T_BYTES, byte_alignment=16),
            squares=smem.allocate_array(Uint8, copies * _SQUARES_BYTES, byte_alignment=16),
            factors=smem.allocate_array(
                Uint8, config.num_teams * _FACTORS_BYTES, byte_alignment=16
            ),
            descriptors=smem.allocate_array(Int32, stages * _DESCRIPTOR_WORDS, byte_alignment=16),
            full=smem.allocate_array(Int64, copies, byte_alignment=8),
            empty=smem.allocate_array(Int64, stages, byte_alignment=8),
        )
        tid = cute.arch.thread_idx()[0]
        if tid < copies:
            cute.arch.mbarrier_init(shared.full + tid, 1)
        if tid < stages:
            cute.arch.mbarrier_init(shared.empty + tid, config.warps_per_team)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        cols = x.shape[len(x.shape) - 1]
        groups = Grouping.of(x, offs)
        warp = cute.arch.make_warp_uniform(tid // _WARP)
        if warp == self.num_compute_warps:
            cpasync.prefetch_descriptor(box_copy)
            cpasync.prefetch_descriptor(line_copy)
            boxes, lines = (box_copy, box_source, box), (line_copy, line_source, line)
            self.load(groups, cols, group_amax, boxes, lines, shared)
        else:
            self.compute(groups, cols, row_amax, codes, scales, codes_t, scales_t, warp, shared)

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32, by: int) -> tuple[Int32, Int32]:
        stage += by
        if stage >= self.config.num_stages:
            stage -= self.config.num_stages
            phase ^= 1
        return stage, phase

    # ------------------------------------------------------------------ loader

    @cute.jit
    def load(
        self,
        groups: Grouping,
        cols: Int32,
        group_amax: cute.Tensor | None,
        boxes: tuple,
        lines: tuple,
        shared: SharedMemory,
    ) -> None:
        """Find the tiles that hold rows and load them; rows that do not exist are not read.

        A tile's arrival barrier is its team's, not its stage's: a team waits for its own tiles
        only, so on a stage's barrier it could be ahead of another team's load that has not landed,
        and take the parity of an older phase for its own. Two a team are enough: a stage is
        refilled only after its team has seen its barrier, and that comes before the team's next
        tile but one is loaded.
        """
        stage, phase, full = Int32(0), Int32(1), Int32(0)
        amax, amax_of = Int32(0), Int32(-1)
        col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
        step = cute.arch.grid_dim()[0]
        item = cute.arch.block_idx()[0]
        num_tiles = groups.num_tiles()
        num_items = num_tiles * col_tiles
        band, hint, reach, head = Int32(-1), Int32(0), Int32(0), Int32(0)
        while item < num_items:
            band_was = band
            band = item // (self.config.band * col_tiles)
            first_tile = band * self.config.band
            if band != band_was:
                hint = reach
                head = groups.seek(first_tile, hint)[0]
            tall = cutlass.min(num_tiles - first_tile, Int32(self.config.band))
            within = item - first_tile * col_tiles
            col_tile = within // tall
            wanted = first_tile + (within - col_tile * tall)
            tile, group, first, count = groups.seek(wanted, hint)
            if tile != wanted:
                item += step
                if head >= first_tile + self.config.band:
                    band_of = head // self.config.band * self.config.band
                    item = next_item(item - step, step, band_of, col_tiles)
            else:
                reach = cutlass.max(reach, group)
                if cutlass.const_expr(group_amax is not None):
                    if group != amax_of:
                        amax, amax_of = Int32(f32_as_bits(group_amax[group])), group
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                what = Descriptor(tile, col_tile, first, count, group, amax)
                self.describe(shared, stage, what)
                with cute.arch.elect_one():
                    size = count * (self.tile.num_boxes * BOX_BYTES)
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.full + full, size)
                target = shared.tiles + stage * self.config.tile_bytes
                bar = shared.full + full
                for b in cutlass.range_constexpr(self.tile.num_boxes):
                    col = col_tile * TILE_COLS + b * self.tile.box_cols
                    if count == TILE_ROWS:
                        self.copy_box(boxes, TILE_ROWS, first, col, target + b * BOX_SIZE, bar)
                    else:
                        for r in cutlass.range(count, unroll=1):
                            place = target + (b * BOX_SIZE + r * BOX_BYTES)
                            self.copy_box(lines, 1, first + r, col, place, bar)
                stage, phase = self.next_stage(stage, phase, 1)
                full = self.next_barrier(full)
                item += step
        for _ in cutlass.range(self.config.num_teams, unroll=1):
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            zero = Int32(0)
            self.describe(shared, stage, Descriptor(*[zero] * 6))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(shared.full + full)
            stage, phase = self.next_stage(stage, phase, 1)
            full = self.next_barrier(full)

    @cute.jit
    def next_barrier(self, full: Int32) -> Int32:
        """The arrival barrier of the next tile: first and second of each team in turn."""
        full += 2
        if full >= 2 * self.config.num_teams:
            full = full - 2 * self.config.num_teams ^ 1
        return full

    @cute.jit
    def describe(self, shared: SharedMemory, stage: Int32, what: Descriptor) -> None:
        at = shared.descriptors.toint() + stage * (4 * _DESCRIPTOR_WORDS)
        with cute.arch.elect_one():
            store_shared(at, [Uint32(value) for value in what[:4]])
            store_shared(at + 16, [Uint32(what.group), Uint32(what.amax)])

    @cute.jit
    def copy_box(
        self, tma: tuple, rows: int, row: Int32, col: Int32, target: cute.Pointer, bar: cute.Pointer
    ) -> None:
        atom, source, layout = tma
        pointer = cute.recast_ptr(target, layout.inner, dtype=dsl_dtype(self.dtype))
        window = cute.local_tile(
            cute.domain_offset((row, col), source), (rows, self.tile.box_cols), (0, 0)
        )
        to, what = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, layout.outer), 0, 2),
            cute.group_modes(window, 0, 2),
        )
        cute.copy(atom, what, to, tma_bar_ptr=bar)

    # ------------------------------------------------------------------ conversion

    @cute.jit
    def compute(
        self,
        groups: Grouping,
        cols: Int32,
        row_amax: cute.Tensor | None,
        codes: cute.Tensor | None,
        scales: cute.Tensor | None,
        codes_t: cute.Tensor | None,
        scales_t: cute.Tensor | None,
        warp: Int32,
        shared: SharedMemory,
    ) -> None:
        """A team's tiles: columns first, then rows, then the columnwise scales."""
        config = self.config
        team = warp // config.warps_per_team
        part = warp - team * config.warps_per_team
        stage, phase, copy = team, Int32(0), Int32(0)
        count = Int32(1)
        factors_at = shared.factors.toint() + team * _FACTORS_BYTES
        level, level_of = Level(Float32(0.0), Float32(0.0), factors_at), Int32(-1)
        while count > 0:
            cute.arch.mbarrier_wait(shared.full + (team * 2 + copy), phase)
            what = self.read_descriptor(shared, stage)
            count = what.count
            if count > 0:
                tile_at = shared.tiles.toint() + stage * config.tile_bytes
                buffer = team * 2 + copy
                scales_at = shared.scales_t.toint() + buffer * _SCALES_T_BYTES
                squares_at = shared.squares.toint() + buffer * _SQUARES_BYTES
                if cutlass.const_expr(config.tables_factors):
                    if what.group != level_of:
                        level = self.tabulate(what, factors_at, team)
                        level_of = what.group
                elif cutlass.const_expr(config.uses_group_amax):
                    level = Level(*second_level(bits_as_f32(Uint32(what.amax))), factors_at)
                if cutlass.const_expr(config.columnwise or config.square_blocks):
                    if count < TILE_ROWS:
                        self.clear_rows(tile_at, count, team)
                    if not self.columns.skips_rows or self.columns.place(part).first_row < count:
                        self.columns.convert(
                            groups, cols, level, codes_t, what, part, tile_at, scales_at, squares_at
                        )
                    elif cutlass.const_expr(config.columnwise):
                        self.columns.clear(groups, cols, codes_t, what, part, scales_at)
                    self.sync_team(team)
                if cutlass.const_expr(config.rowwise):
                    for row in self.rows.rows(part):
                        row_level = level
                        if cutlass.const_expr(config.row_scaled):
                            row_level = self.rows.level(row_amax, what, row)
                        self.rows.convert(
                            cols, row_level, codes, scales, what, row, tile_at, squares_at
                        )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
                if cutlass.const_expr(config.columnwise):
                    if part < 2:
                        self.columns.write_scales(groups, cols, scales_t, what, part, scales_at)
            stage, _ = self.next_stage(stage, phase, config.num_teams)
            phase ^= copy
            copy ^= 1

    @cute.jit
    def read_descriptor(self, shared: SharedMemory, stage: Int32) -> Descriptor:
        at = shared.descriptors.toint() + stage * (4 * _DESCRIPTOR_WORDS)
        words = load_shared(at, 4) + load_shared(at + 16, 2)
        return Descriptor(*[Int32(word) for word in words])

    @cute.jit
    def tabulate(self, what: Descriptor, factors_at: Int32, team: Int32) -> Level:
        """The second level of a group; the whole team writes its encode factors, one a thread."""
        thread = cute.arch.thread_idx()[0] - team * self.team_threads
        s_dec, mult = second_level(bits_as_f32(Uint32(what.amax)))
        factor = encode_factor(Uint32(thread), s_dec)
        self.sync_team(team)
        store_shared(factors_at + thread * 4, [f32_as_bits(factor)])
        self.sync_team(team)
        return Level(s_dec, mult, factors_at)

    @cute.jit
    def sync_team(self, team: Int32) -> None:
        cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.team_threads)

    @cute.jit
    def clear_rows(self, tile_at: Int32, count: Int32, team: Int32) -> None:
        """Zero the rows from ``count`` to the end of what is converted, for the whole team."""
        thread = cute.arch.thread_idx()[0] - team * self.team_threads
        rows = TILE_ROWS - count
        if cutlass.const_expr(self.columns.skips_rows):
            rows = rows % (TILE_ROWS // 2)
        chunks = rows * (BOX_BYTES // 16)
        for b in cutlass.range_constexpr(self.tile.num_boxes):
            base = tile_at + (b * BOX_SIZE + count * BOX_BYTES)
            for i in cutlass.range(thread, chunks, self.team_threads, unroll=1):
                store_shared(base + i * 16, [Uint32(0)] * 4)
        # The next load of this stage is an asynchronous write after these.
        cute.arch.fence_view_async_shared()
        self.sync_team(team)
