"""The scheduler warp: it finds the tiles of this CTA on the device.

Tiles are numbered group by group, and a cluster takes every ``num_clusters``-th. In an m_grouped
product the number of tiles of a group depends on its rows. The warp holds a window of 32 groups,
one per lane, with a running count of tiles, and moves it forward only. The whole walk reads
``offs`` once, however many tiles there are. If several kernels share a product, each takes the
tiles whose rows are in its range. In a k_grouped product all groups have the same number of tiles.

Groups of one row tile wait for memory, groups of several for the tensor cores. A configuration with
dynamic scheduling (``uses_dynamic_scheduling``) has a list of each, and takes tiles of both in
proportion. The tiles take different times. So a cluster takes the next tile from a counter when the
loads of its last tile come to an end: up to 8% less time than every ``num_clusters``-th (H200).

Each tile is handed to the other warps as a record of eight words through a ring in shared memory.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute, pipeline, range_constexpr

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import group_end, group_start, warp_scan
from cute_kernels.device.ptx import asm_volatile
from cute_kernels.layout.slots import TILE_ROWS, slot_tile

from .config import GemmConfig
from .problem import N_ALIGN, Extents

#: Words of a tile record.
TILE_WORDS = 8


class WorkTile(NamedTuple):
    """One tile of the output, or the end of the work.

    Attributes:
        group: Group of the tile. It is -1 at the end of the work. The number of groups stands for
            the tail.
        m_row: First row of operand M.
        m_sf_row: First row of operand M in the order of the block scales.
        n_row: First row of operand N.
        n_sf_row: First row of operand N in the order of the block scales.
        k_start: First element of K. If K is ragged, it is the first one of the slot or row.
        k_blocks: Number of MMA instructions along K. It is 0 for an empty group and for the tail.
        rows: Rows of the group. In an m_grouped product it counts from the tile's first row, and
            with ``balances_row_tiles`` only to the tile's last.
    """

    group: Int32
    m_row: Int32
    m_sf_row: Int32
    n_row: Int32
    n_sf_row: Int32
    k_start: Int32
    k_blocks: Int32
    rows: Int32

    def k_tiles(self, config: GemmConfig) -> Int32:
        """Return the number of stages along K."""
        return (self.k_blocks + (config.k_blocks - 1)) // config.k_blocks


def _record(buffer: cute.Tensor, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Return both halves of a tile record, (4,) int32 each, in shared memory."""
    halves = []
    for half in range(2):
        address = buffer.iterator.toint() + (stage * TILE_WORDS + half * 4) * 4
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
        halves.append(cute.make_tensor(pointer, cute.make_layout(4)))
    return tuple(halves)


class TileReader:
    """A warp's view of the ring of tile records.

    Attributes:
        ring: Pipeline of the records.
        buffer: (stages * 8,) int32 in shared memory.
    """

    def __init__(self, ring: pipeline.PipelineAsync, buffer: cute.Tensor):
        self.ring = ring
        self.buffer = buffer

    @cute.jit
    def next(self, state: Any, keeps: bool = False) -> tuple[WorkTile, Any]:
        """Wait for the record at ``state`` and return it and the next state.

        The place of the record is freed, unless ``keeps`` is set.
        """
        self.ring.consumer_wait(state)
        # One access for all lanes; vectors would be read by eight lanes at a time.
        word = self.buffer[state.index * TILE_WORDS + cute.arch.lane_idx() % TILE_WORDS]
        cute.arch.sync_warp()
        if const_expr(not keeps):
            self.free(state)
        state.advance()
        return WorkTile(*(cute.arch.shuffle_sync(word, i) for i in range(TILE_WORDS))), state

    @cute.jit
    def free(self, state: Any) -> None:
        """Free the place of the record at ``state``."""
        with cute.arch.elect_one():
            self.ring.consumer_release(state)

    def new_state(self) -> Any:
        """Return the state of a reader at the first record."""
        return pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ring.num_stages
        )


class TileScheduler:
    """The scheduler warp.

    Attributes:
        config: Configuration of the kernel.
        ring: Pipeline of the records.
        buffer: (stages * 8,) int32 in shared memory, followed by one word for the tile number that
            CTAs pass on.
        offs: (G,) int32. End rows.
        extents: Sizes of the product.
        counter: (1,) int32 in global memory with dynamic scheduling, otherwise None.
        numbers: Pipeline by which the first CTA of a cluster passes tile numbers on. None for a
            single CTA.
    """

    def __init__(
        self,
        config: GemmConfig,
        ring: pipeline.PipelineAsync,
        buffer: cute.Tensor,
        offs: cute.Tensor,
        extents: Extents,
        counter: cute.Tensor | None = None,
        numbers: Any = None,
    ):
        self.config = config
        self.counter, self.numbers = counter, numbers
        self.ring = ring
        self.buffer = buffer
        self.offs = offs
        self.extents = extents
        self.tile = config.tile

    @cute.jit
    def run(self) -> None:
        """Put the records of all tiles of this CTA, and the end, into the ring."""
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ring.num_stages
        )
        if const_expr(self.config.grouping == "m_grouped"):
            if const_expr(self.config.uses_dynamic_scheduling):
                state = self.walk_dynamic(state)
            else:
                state = self.walk_ragged(state)
        else:
            state = self.walk_uniform(state)
        state = self.put(state, WorkTile(Int32(-1), *[Int32(0)] * (TILE_WORDS - 1)))
        self.ring.producer_tail(state)

    @cute.jit
    def put(self, state: Any, tile: WorkTile) -> Any:
        """Hand a record to the other warps at ``state`` and return the next state."""
        self.ring.producer_acquire(state)
        with cute.arch.elect_one():
            halves = _record(self.buffer, state.index)
            for half, words in zip(halves, (tile[:4], tile[4:]), strict=True):
                registers = cute.make_rmem_tensor(4, Int32)
                for i in range_constexpr(4):
                    registers[i] = words[i]
                cute.autovec_copy(registers, half)
            self.ring.producer_commit(state)
        cute.arch.sync_warp()
        state.advance()
        return state

    def position(self) -> tuple[Int32, Int32]:
        """Return the number of this cluster, and the number of clusters."""
        num_ctas = self.tile.num_ctas
        return cute.arch.block_idx()[0] // num_ctas, cute.arch.grid_dim()[0] // num_ctas

    def num_listed(self) -> Int32:
        """Return the number of groups, with the tail as one more group if it is to be zeroed."""
        return self.offs.shape[0] + int(self.config.zero_tail)

    @cute.jit
    def group_rows(self, group: Int32) -> tuple[Int32, Int32]:
        """Return the first row and the number of rows of a group, clamped to the buffer.

        Groups past the last one have no rows. The tail of the buffer, if it is to be zeroed, is one
        more group.
        """
        start, end = Int32(0), Int32(0)
        if group < self.num_listed():
            end = Int32(self.extents.rows)
            if group < self.offs.shape[0]:
                end = group_end(self.offs, group, self.extents.rows)
            start = group_start(self.offs, group, self.extents.rows)
        return start, cutlass.max(end - start, 0)

    @cute.jit
    def row_tiles(self, rows: Int32) -> tuple[Int32, Int32]:
        """Return how many row tiles of a group this kernel takes, and the row where they begin."""
        handled = self.config.handled_rows
        count, first_row = (rows + (handled.chunk_rows - 1)) // handled.chunk_rows, Int32(0)
        if const_expr((handled.min_rows, handled.max_rows) != (0, handled.chunk_rows)):
            full_rows = rows // handled.chunk_rows
            remaining_rows = rows - full_rows * handled.chunk_rows
            count = full_rows
            if const_expr(handled.max_rows < handled.chunk_rows):
                count, first_row = Int32(0), full_rows * handled.chunk_rows
            if remaining_rows > handled.min_rows and remaining_rows <= handled.max_rows:
                count += 1
        return count, first_row

    @cute.jit
    def window(
        self, first_group: Int32, col_tiles: Int32, is_large: cutlass.Boolean | None = None
    ) -> Any:
        """Return this lane's group of the 32 from ``first_group`` on.

        With ``is_large`` only groups of several row tiles count, or only groups of one.

        Returns:
            The first row of the group, its rows, and what ``listed`` returns for its tiles.
        """
        start, rows = self.group_rows(first_group + cute.arch.lane_idx())
        row_tiles, _ = self.row_tiles(rows)
        if const_expr(is_large is not None):
            if (row_tiles > 1) != is_large:
                row_tiles = Int32(0)
        return start, rows, *self.listed(row_tiles * col_tiles)

    @cute.jit
    def listed(self, tiles: Int32) -> tuple[Int32, Int32, Int32]:
        """Return the tiles before this lane's group, up to its end, and of all lanes."""
        upto = warp_scan(tiles, cute.arch.lane_idx())
        return upto - tiles, upto, cute.arch.shuffle_sync(upto, WARP_SIZE - 1)

    @cute.jit
    def prefetch_offs(self) -> None:
        """Prefetch ``offs`` of the first 1024 groups, a line of 32 per lane.

        A walk that finds few tiles would wait for one line after the other.
        """
        group = cute.arch.lane_idx() * WARP_SIZE
        if group < self.offs.shape[0]:
            address = self.offs.iterator.toint() + Int64(group) * 4
            asm_volatile("prefetch.global.L1 [$0];", [address])

    def extents_in_tiles(self) -> tuple[Int32, Int32]:
        """Return the column tiles of a group, and the MMA instructions along K."""
        num_cols = self.extents.m if self.tile.swap_ab else self.extents.n
        instruction_k = self.config.instruction_k
        return (num_cols + (self.tile.cols - 1)) // self.tile.cols, (
            self.extents.k + (instruction_k - 1)
        ) // instruction_k

    @cute.jit
    def walk_ragged(self, state: Any) -> Any:
        """Put every ``num_clusters``-th tile of an m_grouped product and return the next state."""
        col_tiles, k_blocks = self.extents_in_tiles()
        first_group = Int32(0)
        if const_expr(self.config.handled_rows.min_rows > 0):
            self.prefetch_offs()
        start, rows, before, upto, count = self.window(first_group, col_tiles)
        # The cluster's next tile, from the window's first on.
        index, step = self.position()
        while first_group < self.num_listed():
            if index < count:
                state = self.put(
                    state, self.ragged_tile(first_group, start, rows, before, upto, index, k_blocks)
                )
                index += step
            else:
                index -= count
                first_group += WARP_SIZE
                start, rows, before, upto, count = self.window(first_group, col_tiles)
        return state

    @cute.jit
    def ragged_tile(
        self,
        first_group: Int32,
        start: Int32,
        rows: Int32,
        before: Int32,
        upto: Int32,
        index: Int32,
        k_blocks: Int32,
    ) -> WorkTile:
        """Return the tile with number ``index`` of the window.

        The other arguments are those of the groups of all lanes.
        """
        owner = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= index))
        group, local = first_group + owner, index - cute.arch.shuffle_sync(before, owner)
        group_start, group_rows = (
            cute.arch.shuffle_sync(start, owner),
            cute.arch.shuffle_sync(rows, owner),
        )
        row_tiles, first_row = self.row_tiles(group_rows)
        size = Int32(self.tile.rows)
        if const_expr(self.config.balances_row_tiles):
            size = (group_rows + (row_tiles * N_ALIGN - 1)) // (row_tiles * N_ALIGN) * N_ALIGN
        row = first_row + local % row_tiles * size
        col = local // row_tiles * self.tile.cols
        if const_expr(self.config.zero_tail):
            if group == self.offs.shape[0]:
                k_blocks = Int32(0)
        sf_row = slot_tile(group_start, group) * TILE_ROWS + row
        ragged, uniform = (group_start + row, sf_row), (col, col)
        if const_expr(self.tile.swap_ab):
            ragged, uniform = uniform, ragged
        rows_left = group_rows - row
        if const_expr(self.config.balances_row_tiles):
            rows_left = cutlass.min(rows_left, size)
        return WorkTile(group, *ragged, *uniform, Int32(0), k_blocks, rows_left)

    @cute.jit
    def walk_dynamic(self, state: Any) -> Any:
        """Mix tiles of groups with one and with several row tiles, and return the next state.

        The first tile of a cluster has its number. The number of each later one comes from the
        counter.
        """
        col_tiles, k_blocks = self.extents_in_tiles()
        small, large = self.count(col_tiles)
        tiles = small + large
        # The window of the last tile of each list, and the tiles of the list before it.
        first_groups, passed = (Int32(0), Int32(0)), (Int32(0), Int32(0))
        number, step = self.position()
        phase = Int32(0)
        while number < tiles:
            large_before = self.large_tiles_before(number, large, tiles)
            is_large = self.large_tiles_before(number + 1, large, tiles) > large_before
            first_group, skipped, index = first_groups[0], passed[0], number - large_before
            if is_large:
                first_group, skipped, index = first_groups[1], passed[1], large_before
            start, rows, before, upto, count = self.window(first_group, col_tiles, is_large)
            while index >= skipped + count:
                skipped += count
                first_group += WARP_SIZE
                start, rows, before, upto, count = self.window(first_group, col_tiles, is_large)
            if is_large:
                first_groups, passed = (first_groups[0], first_group), (passed[0], skipped)
            else:
                first_groups, passed = (first_group, first_groups[1]), (skipped, passed[1])
            state = self.put(
                state,
                self.ragged_tile(first_group, start, rows, before, upto, index - skipped, k_blocks),
            )
            self.ring.producer_acquire(state)
            number = self.take(tiles, step, phase)
            phase = phase ^ 1
        return state

    def large_tiles_before(self, number: Int32, large: Int32, tiles: Int32) -> Int32:
        """Return how many of the first ``number`` tiles belong to groups of several row tiles."""
        return Int32((Int64(number) * large + (tiles - 1)) // tiles)

    @cute.jit
    def count(self, col_tiles: Int32) -> tuple[Int32, Int32]:
        """Return the number of tiles of groups of one row tile, and of groups of several."""
        small, large = Int32(0), Int32(0)
        group = cute.arch.lane_idx()
        while group < self.num_listed():
            _, rows = self.group_rows(group)
            row_tiles, _ = self.row_tiles(rows)
            if row_tiles > 1:
                large += row_tiles
            else:
                small += row_tiles
            group += WARP_SIZE
        return self.listed(small)[2] * col_tiles, self.listed(large)[2] * col_tiles

    @cute.jit
    def take(self, tiles: Int32, step: Int32, phase: Int32) -> Int32:
        """Return the number of the next tile that no cluster has taken.

        The first CTA of a cluster takes the number for both CTAs. There are as many additions as
        tiles, and the last one clears the counter.
        """
        number = Int32(0)
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if cta == 0:
            if cute.arch.lane_idx() == 0:
                number = cute.arch.atomic_add(
                    self.counter.iterator, Int32(1), sem="relaxed", scope="gpu"
                )
                if number == tiles - 1:
                    cute.arch.atomic_exch(
                        self.counter.iterator, Int32(0), sem="relaxed", scope="gpu"
                    )
                # Clusters began with their own.
                number += step
            number = cute.arch.shuffle_sync(number, 0)
        if const_expr(self.numbers is not None):
            full, empty = (
                x.get_barrier(0)
                for x in (self.numbers.sync_object_full, self.numbers.sync_object_empty)
            )
            number_pointer = self.buffer.iterator + self.config.num_sched_stage * TILE_WORDS
            if cta == 0:
                cute.arch.mbarrier_wait(empty, phase ^ 1)
                with cute.arch.elect_one():
                    remote_address = Int32(cute.arch.map_dsmem_ptr(number_pointer, 1).toint())
                    asm_volatile("st.shared::cluster.b32 [$0], $1;", [remote_address, number])
                    cute.arch.fence_acq_rel_cluster()
                    cute.arch.mbarrier_arrive(full, 1)
                cute.arch.sync_warp()
            else:
                cute.arch.mbarrier_wait(full, phase)
                cute.arch.fence_acq_rel_cluster()
                number = cute.make_tensor(number_pointer, cute.make_layout(1))[0]
                cute.arch.sync_warp()
                # After the last number the first CTA may be gone.
                if number < tiles:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty, 0)
        return number

    @cute.jit
    def walk_uniform(self, state: Any) -> Any:
        """Put the tiles of a k_grouped product and return the next state."""
        tiles_m = (self.extents.m + (self.tile.rows - 1)) // self.tile.rows
        tiles_n = (self.extents.n + (self.tile.cols - 1)) // self.tile.cols
        tiles = tiles_m * tiles_n
        instruction_k = self.config.instruction_k
        index, step = self.position()
        while index < self.offs.shape[0] * tiles:
            group = index // tiles
            local = index - group * tiles
            start, rows = self.group_rows(group)
            row, col = local % tiles_m * self.tile.rows, local // tiles_m * self.tile.cols
            k_start = start
            if const_expr(not self.config.ragged_k):
                k_start = slot_tile(start, group) * TILE_ROWS
            # An empty group leaves its output alone when accumulating, and zeros it otherwise.
            if rows > 0 or const_expr(not self.config.accumulate):
                state = self.put(
                    state,
                    WorkTile(
                        group,
                        row,
                        row,
                        col,
                        col,
                        k_start,
                        (rows + (instruction_k - 1)) // instruction_k,
                        rows,
                    ),
                )
            index += step
        return state
