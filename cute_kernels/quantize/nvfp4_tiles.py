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

Counted by perf.count_quantize at 1024 x 4096 bf16: 5.4 PTX instructions an element rowwise, 5.6
columnwise, 10.5 both, 10.0 both with 16x16 blocks; 2.05 bytes read; all stores in full sectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.device.groups import Grouping, next_item
from cute_kernels.device.memory import (
    load_shared,
    store_global,
    store_shared,
)
from cute_kernels.device.nvfp4 import (
    absmax_pairs,
    absmax_words,
    encode_column,
    encode_row,
    fmax,
    scale_pair,
    second_level,
    split_absmax,
)
from cute_kernels.device.ptx import asm, bits_as_f32, f32_as_bits, select
from cute_kernels.formats import NVFP4
from cute_kernels.quantize.amax import AmaxKernels
from cute_kernels.quantize.config import DTYPE_BYTES, TileConfig
from cute_kernels.quantize.fakes import FakeBuffers, dsl_dtype, env_stream
from cute_kernels.shapes import SF_TILE_BYTES, SF_TILE_COLS, TILE_ROWS

__all__ = ["TileQuantizer"]

_BLOCK = NVFP4.sf_vec_size
_WARP = 32
_TILE_COLS = 128
_BOX_BYTES = 128  # of a row: the width of TMA's widest swizzle
_BOX_SIZE = _BOX_BYTES * TILE_ROWS
_DESCRIPTOR_WORDS = 8
_ROW_BLOCKS = TILE_ROWS // _BLOCK
_COL_BLOCKS = _TILE_COLS // _BLOCK
_SCALES_T_BYTES = _ROW_BLOCKS * _TILE_COLS
_SQUARES_BYTES = 4 * _ROW_BLOCKS * _COL_BLOCKS


class SharedMemory(NamedTuple):
    """Pointers into shared memory.

    Attributes:
        tiles: num_stages stages of one tile.
        scales_t: columnwise scale bytes of each team's tile, two deep.
        squares: amaxes of the 16x16 blocks of each team's tile, two deep.
        descriptors: what each stage holds, see ``Descriptor``.
        full: arrival barriers of each team's tiles, two deep, see ``load``.
        empty: release barriers of the stages.
    """

    tiles: cute.Pointer
    scales_t: cute.Pointer
    squares: cute.Pointer
    descriptors: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class Descriptor(NamedTuple):
    """What a stage holds; ``count`` 0 ends the work.

    Attributes:
        tile: slot tile.
        col_tile: which 128 columns.
        first: matrix row of the tile's first row.
        count: rows that exist, at most 128.
        group: the group.
    """

    tile: Int32
    col_tile: Int32
    first: Int32
    count: Int32
    group: Int32


class TileQuantizer(AmaxKernels):
    """Persistent tile quantizer, see the module."""

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.element_bytes = DTYPE_BYTES[config.dtype]
        self.box_cols = _BOX_BYTES // self.element_bytes
        self.num_boxes = _TILE_COLS // self.box_cols
        self.cols_per_word = 4 // self.element_bytes
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
        box = cute.tile_to_shape(atom, (TILE_ROWS, self.box_cols), order=(0, 1))
        line = cute.make_composed_layout(
            atom.inner, 0, cute.make_layout((1, self.box_cols), stride=(self.box_cols, 1))
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        box_copy, box_source = cpasync.make_tiled_tma_atom(
            op, matrix, box, (TILE_ROWS, self.box_cols)
        )
        line_copy, line_source = cpasync.make_tiled_tma_atom(op, matrix, line, (1, self.box_cols))
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
            self.load(
                groups, cols, (box_copy, box_source, box), (line_copy, line_source, line), shared
            )
        else:
            self.compute(
                groups, cols, row_amax, group_amax, codes, scales, codes_t, scales_t, warp, shared
            )

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
        self, groups: Grouping, cols: Int32, boxes: tuple, lines: tuple, shared: SharedMemory
    ) -> None:
        """Find the tiles that hold rows and load them; rows that do not exist are not read.

        A tile's arrival barrier is its team's, not its stage's: a team waits for its own tiles
        only, so on a stage's barrier it could be ahead of another team's load that has not landed,
        and take the parity of an older phase for its own. Two a team are enough: a stage is
        refilled only after its team has seen its barrier, and that comes before the team's next
        tile but one is loaded.
        """
        stage, phase, group, full = Int32(0), Int32(1), Int32(0), Int32(0)
        col_tiles = (cols + (_TILE_COLS - 1)) // _TILE_COLS
        step = cute.arch.grid_dim()[0]
        item = cute.arch.block_idx()[0]
        num_items = groups.num_tiles() * col_tiles
        while item < num_items:
            wanted = item // col_tiles
            tile, group, first, count = groups.seek(wanted, group)
            if tile != wanted:
                item = next_item(item, step, tile, col_tiles)
            else:
                col_tile = item - wanted * col_tiles
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                self.describe(shared, stage, Descriptor(tile, col_tile, first, count, group))
                with cute.arch.elect_one():
                    size = count * (self.num_boxes * _BOX_BYTES)
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.full + full, size)
                target = shared.tiles + stage * self.config.tile_bytes
                bar = shared.full + full
                for b in cutlass.range_constexpr(self.num_boxes):
                    col = col_tile * _TILE_COLS + b * self.box_cols
                    if count == TILE_ROWS:
                        self.copy_box(boxes, TILE_ROWS, first, col, target + b * _BOX_SIZE, bar)
                    else:
                        for r in cutlass.range(count, unroll=1):
                            place = target + (b * _BOX_SIZE + r * _BOX_BYTES)
                            self.copy_box(lines, 1, first + r, col, place, bar)
                stage, phase = self.next_stage(stage, phase, 1)
                full = self.next_barrier(full)
                item += step
        for _ in cutlass.range(self.config.num_teams, unroll=1):
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            zero = Int32(0)
            self.describe(shared, stage, Descriptor(zero, zero, zero, zero, zero))
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
            store_shared(at + 16, [Uint32(what.group)])

    @cute.jit
    def copy_box(
        self, tma: tuple, rows: int, row: Int32, col: Int32, target: cute.Pointer, bar: cute.Pointer
    ) -> None:
        atom, source, layout = tma
        pointer = cute.recast_ptr(target, layout.inner, dtype=dsl_dtype(self.dtype))
        window = cute.local_tile(
            cute.domain_offset((row, col), source), (rows, self.box_cols), (0, 0)
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
        group_amax: cute.Tensor | None,
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
        while count > 0:
            cute.arch.mbarrier_wait(shared.full + (team * 2 + copy), phase)
            what = self.read_descriptor(shared, stage)
            count = what.count
            if count > 0:
                tile_at = shared.tiles.toint() + stage * config.tile_bytes
                buffer = team * 2 + copy
                scales_at = shared.scales_t.toint() + buffer * _SCALES_T_BYTES
                squares_at = shared.squares.toint() + buffer * _SQUARES_BYTES
                if cutlass.const_expr(config.uses_group_amax):
                    level = second_level(group_amax[what.group])
                if cutlass.const_expr(config.columnwise or config.square_blocks):
                    if count < TILE_ROWS:
                        self.clear_rows(tile_at, count, team)
                    self.convert_columns(
                        groups, cols, level, codes_t, what, part, tile_at, scales_at, squares_at
                    )
                    self.sync_team(team)
                if cutlass.const_expr(config.rowwise):
                    lane = cute.arch.lane_idx()
                    row = part * 8 + lane % 8 + lane // 8 * 32
                    if cutlass.const_expr(config.row_scaled):
                        level = self.row_level(row_amax, what, row)
                    self.convert_rows(cols, level, codes, scales, what, row, tile_at, squares_at)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
                if cutlass.const_expr(config.columnwise):
                    if part < 2:
                        self.write_column_scales(groups, cols, scales_t, what, part, scales_at)
            stage, _ = self.next_stage(stage, phase, config.num_teams)
            phase ^= copy
            copy ^= 1

    @cute.jit
    def read_descriptor(self, shared: SharedMemory, stage: Int32) -> Descriptor:
        at = shared.descriptors.toint() + stage * (4 * _DESCRIPTOR_WORDS)
        words = load_shared(at, 4) + load_shared(at + 16, 1)
        return Descriptor(*[Int32(word) for word in words])

    @cute.jit
    def sync_team(self, team: Int32) -> None:
        cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.team_threads)

    @cute.jit
    def clear_rows(self, tile_at: Int32, count: Int32, team: Int32) -> None:
        """Zero the tile's rows from ``count`` on, for the whole team."""
        thread = cute.arch.thread_idx()[0] - team * self.team_threads
        chunks = (TILE_ROWS - count) * (_BOX_BYTES // 16)
        for b in cutlass.range_constexpr(self.num_boxes):
            base = tile_at + (b * _BOX_SIZE + count * _BOX_BYTES)
            for i in cutlass.range(thread, chunks, self.team_threads, unroll=1):
                store_shared(base + i * 16, [Uint32(0)] * 4)
        # The next load of this stage is an asynchronous write after these.
        cute.arch.fence_view_async_shared()
        self.sync_team(team)

    @cute.jit
    def convert_columns(
        self,
        groups: Grouping,
        cols: Int32,
        level: tuple[Float32, Float32],
        codes_t: cute.Tensor | None,
        what: Descriptor,
        part: Int32,
        tile_at: Int32,
        scales_at: Int32,
        squares_at: Int32,
    ) -> None:
        """A warp's 64 rows of half the tile's columns; a lane takes one word of every row."""
        config = self.config
        s_dec, mult = level
        lane = cute.arch.lane_idx()
        half = part // 2
        # Rows r and r + 8 have the same swizzle.
        places = [r * _BOX_BYTES + ((lane * 4) ^ (r * 16)) for r in range(8)]
        for u in cutlass.range_constexpr(self.num_boxes // 2):
            box = (part % 2) * (self.num_boxes // 2) + u
            base = tile_at + box * _BOX_SIZE + half * (_BOX_SIZE // 2)
            lanes_at = [base + place for place in places]
            col = box * self.box_cols + lane * self.cols_per_word
            codes_of = [[] for _ in range(self.cols_per_word)]
            scales_of = [[] for _ in range(self.cols_per_word)]
            for rb in cutlass.range_constexpr(0, _ROW_BLOCKS // 2, 2):
                blocks = [
                    [
                        load_shared(
                            lanes_at[r % 8] + ((rb + i) * _BLOCK + r // 8 * 8) * _BOX_BYTES, 1
                        )[0]
                        for r in range(_BLOCK)
                    ]
                    for i in range(2)
                ]
                amaxes = [self.column_amaxes(words) for words in blocks]
                if cutlass.const_expr(config.square_blocks):
                    if lane % (_BLOCK // self.cols_per_word) == 0:
                        row_block = half * (_ROW_BLOCKS // 2) + rb
                        at = squares_at + (row_block * _COL_BLOCKS + col // _BLOCK) * 4
                        store_shared(at, [f32_as_bits(amaxes[0][0])])
                        store_shared(at + 4 * _COL_BLOCKS, [f32_as_bits(amaxes[1][0])])
                if cutlass.const_expr(config.columnwise):
                    for c in cutlass.range_constexpr(self.cols_per_word):
                        bytes_, enc0, enc1 = scale_pair(amaxes[0][c], amaxes[1][c], s_dec, mult)
                        scales_of[c].append(bytes_)
                        for words, enc in ((blocks[0], enc0), (blocks[1], enc1)):
                            for part_ in (words[:8], words[8:]):
                                codes_of[c].append(encode_column(part_, enc, self.dtype, c))
            if cutlass.const_expr(config.columnwise):
                store_shared(
                    scales_at + (half * _TILE_COLS + col) * 4,
                    [_pack_halves(*pair) for pair in scales_of],
                )
                k = what.col_tile * _TILE_COLS + col
                if k < cols:
                    pitch = codes_t.stride[len(codes_t.stride) - 2]
                    tile = groups.local_tile(what.tile, what.group)
                    target = codes_t.iterator.toint() + (tile * (TILE_ROWS // 2) + half * 32)
                    if cutlass.const_expr(groups.offs is None):
                        target += what.group * codes_t.stride[0]
                    target += k * pitch
                    for c in cutlass.range_constexpr(self.cols_per_word):
                        store_global(target + c * pitch, codes_of[c])

    def column_amaxes(self, words: list[Uint32]) -> list[Float32]:
        """Amax of each of a lane's columns over a block of rows; of the 16x16 block if square."""
        if self.dtype == "float32":
            amaxes = [absmax_words(words, self.dtype)]
        else:
            amaxes = list(split_absmax(absmax_pairs(words, self.dtype), self.dtype))
        if self.config.square_blocks:
            a = amaxes[0] if len(amaxes) == 1 else fmax(*amaxes)
            offset = 1
            while offset < _BLOCK // self.cols_per_word:
                a = fmax(a, cute.arch.shuffle_sync_bfly(a, offset=offset))
                offset *= 2
            amaxes = [a] * len(amaxes)
        return amaxes

    @cute.jit
    def write_column_scales(
        self,
        groups: Grouping,
        cols: Int32,
        scales_t: cute.Tensor,
        what: Descriptor,
        half: Int32,
        scales_at: Int32,
    ) -> None:
        """A warp writes one 512-byte tile: 128 columns by the 4 row blocks of half a slot tile."""
        lane = cute.arch.lane_idx()
        at = scales_at + (half * _TILE_COLS + lane) * 4
        words = [load_shared(at + q * (32 * 4), 1)[0] for q in range(4)]
        rank = len(scales_t.shape)
        block_tiles = scales_t.shape[rank - 2]
        tile = groups.local_tile(what.tile, what.group)
        index = Int64(what.col_tile) * block_tiles + (2 * tile + half)
        if cutlass.const_expr(groups.offs is None):
            index += Int64(what.group) * (scales_t.shape[1] * block_tiles)
        target = scales_t.iterator.toint() + index * SF_TILE_BYTES + lane * 16
        store_global(target, words)

    @cute.jit
    def row_level(
        self, row_amax: cute.Tensor, what: Descriptor, row: Int32
    ) -> tuple[Float32, Float32]:
        """The second level of a row; of a row that does not exist, that of a zero row."""
        g = Float32(0.0)
        if row < what.count:
            g = row_amax[what.first + row]
        return second_level(g)

    @cute.jit
    def convert_rows(
        self,
        cols: Int32,
        level: tuple[Float32, Float32],
        codes: cute.Tensor,
        scales: cute.Tensor,
        what: Descriptor,
        row: Int32,
        tile_at: Int32,
        squares_at: Int32,
    ) -> None:
        """A lane's row, 64 columns at a time; a warp has eight rows of each quarter of the tile."""
        live = row < what.count
        s_dec, mult = level
        pitch = codes.stride[len(codes.stride) - 2]
        tiles_along_k = (cols + (4 * _BLOCK - 1)) // (4 * _BLOCK)
        row_at = tile_at + row * _BOX_BYTES + row % 8 * 16
        codes_at = codes.iterator.toint() + Int64(what.first + row) * pitch
        scales_at = scales.iterator.toint() + Int64(what.tile) * tiles_along_k * SF_TILE_BYTES
        scales_at += row % 32 * 16 + row // 32 * SF_TILE_COLS
        boxes = 64 // self.box_cols
        for u in cutlass.range_constexpr(_TILE_COLS // 64):
            col = what.col_tile * _TILE_COLS + u * 64
            if col < cols:
                words = []
                for chunk in cutlass.range_constexpr(8 * boxes):
                    box = u * boxes + chunk // 8
                    words += load_shared((row_at + box * _BOX_SIZE) ^ (chunk % 8 * 16), 4)
                per_block = len(words) // 4
                blocks = [words[i : i + per_block] for i in range(0, len(words), per_block)]
                if cutlass.const_expr(self.config.square_blocks):
                    at = squares_at + (row // _BLOCK * _COL_BLOCKS + u * 4) * 4
                    a = [bits_as_f32(word) for word in load_shared(at, 4)]
                else:
                    a = [absmax_words(block, self.dtype) for block in blocks]
                low, enc0, enc1 = scale_pair(a[0], a[1], s_dec, mult)
                high, enc2, enc3 = scale_pair(a[2], a[3], s_dec, mult)
                scale_word = select(live, _pack_halves(low, high), Uint32(0))
                store_global(scales_at + (col // 64) * SF_TILE_BYTES, [scale_word])
                out = []
                for block, enc in zip(blocks, (enc0, enc1, enc2, enc3), strict=True):
                    split = per_block // 2
                    out.append(encode_row(block[:split], enc, self.dtype))
                    out.append(encode_row(block[split:], enc, self.dtype))
                if live:
                    self.store_codes(codes_at + col // 2, out, cols - col, pitch)

    @cute.jit
    def store_codes(self, target: Int64, words: list, left: Int32, pitch: Int64) -> None:
        """Codes of up to 64 columns of a row, of which ``left`` exist; K is a multiple of 16."""
        if left >= 64 and pitch % 32 == 0:
            store_global(target, words)
        else:
            # The pitch is a multiple of 16 bytes, the codes of two blocks.
            for i in cutlass.range_constexpr(0, 4, 2):
                if left >= (i + 2) * _BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 4])
                elif left > i * _BLOCK:
                    store_global(target + i * 8, words[2 * i : 2 * i + 2])


def _pack_halves(low: Uint16, high: Uint16) -> Uint32:
    return asm("mov.b32 $0, {$1, $2};", [Uint32], [low, high])
