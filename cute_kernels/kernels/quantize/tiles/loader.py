"""Loader warps of the tile quantizer: they find tiles that hold rows, and copy them.

CTAs take tiles in bands of ``config.band`` slot tiles: down the band's column of tiles, then the
next column. So the parts of a column of the columnwise copy that are written at about the same time
are contiguous. Gathered rows are those of tokens that several groups have. For them a column of all
slot tiles is one band, so that a token's columns are in L2 when the next group reads them.

The lanes of a warp find the next 32 tiles at once. Finding them one after another took 2 us per
tile with 128 groups, more than all other work (4096 tokens of Qwen3, FP8Block columnwise, H200: 86
us, now 45).

Gathered rows are copied 16 bytes per lane by two warps, which have their own stages and teams.

The arrival barrier of a tile belongs to its team, not to its stage. A team waits for its own tiles
only. On the barrier of a stage it could be ahead of another team's load that has not landed, and
take the parity of an older phase for its own. Two barriers per team are enough: a stage is refilled
only after its team has seen its barrier, and that comes before the team's next tile but one is
loaded.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import DSL_TYPES
from cute_kernels.device.memory import copy_async, load_global_if, load_shared, store_shared
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.kernels.quantize.config import TileConfig
from cute_kernels.layout.slots import TILE_ROWS

from ..config import DTYPE_BYTES
from .geometry import (
    BOX_BYTES,
    BOX_ROWS,
    BOX_SIZE,
    TILE_COLS,
    TileDescriptor,
    TileGeometry,
    TileSharedMemory,
)

DESCRIPTOR_WORDS = 8


class Tma(NamedTuple):
    """TMA copy of a box.

    Attributes:
        atom: Copy atom.
        source: View of the matrix that the atom copies from.
        layout: Layout of the box in shared memory.
    """

    atom: cute.CopyAtom
    source: cute.Tensor
    layout: cute.ComposedLayout


class TileLoader:
    """Loader that finds tiles and copies them by TMA. See the module's docstring."""

    #: Loader warps, and arrivals at the barrier of a tile besides its bytes.
    num_loaders, arrivals = 1, 1

    def __init__(self, config: TileConfig, geometry: TileGeometry, in_bands: bool = True):
        self.config = config
        self.in_bands = in_bands
        self.geometry = geometry
        self.box_rows = BOX_ROWS[config.arch]

    def copy_of(self, x: cute.Tensor, rows: Int32) -> tuple[Any, ...]:
        """Return what copies boxes of the matrix ``x`` with ``rows`` rows.

        Returns:
            Copy atom, source view and shared-memory layout, the fields of ``Tma``.
        """
        cols, box = x.shape[len(x.shape) - 1], (self.box_rows, self.geometry.box_cols)
        matrix = cute.make_tensor(
            x.iterator, cute.make_layout((rows, cols), stride=(Int64(cols), 1))
        )
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, x.element_type)
        layout = cute.tile_to_shape(atom, box, order=(0, 1))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return (*cpasync.make_tiled_tma_atom(op, matrix, layout, box), layout)

    @cute.jit
    def load(
        self,
        groups: GroupCursor,
        cols: Int32,
        group_amax: cute.Tensor | None,
        column_amax: cute.Tensor | None,
        inputs: Any,
        shared: TileSharedMemory,
        loader: Int32 | int = 0,
    ) -> None:
        """Load the tiles of this CTA that hold rows.

        Boxes are copied whole, with rows of the next group at the end.

        Args:
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            group_amax: (G,) fp32. Amax or given scale of each group. Optional.
            column_amax: (G,) fp32. Amax of the columnwise copy. Optional.
            inputs: Source of the tiles. None if teams fill them, so that only descriptors are
                written.
            shared: Shared memory.
            loader: Number of this warp among the loaders.
        """
        stage, phase, full = Int32(loader), Int32(1), Int32(2 * loader)
        lane = cute.arch.lane_idx()
        col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
        step = cute.arch.grid_dim()[0] * self.num_loaders
        item = cute.arch.block_idx()[0] + cute.arch.grid_dim()[0] * loader
        num_tiles = groups.used_tiles()
        num_items = num_tiles * col_tiles
        while item < num_items:
            # Each lane looks up one of the next items; the highest lane has the first.
            lane_item = item + (WARP_SIZE - 1 - lane) * step
            slot_tile, col_tile = self.tile_of(
                cutlass.min(lane_item, num_items - 1), num_tiles, col_tiles
            )
            group, first_row, num_rows = groups.locate(slot_tile)
            is_live = lane_item < num_items and num_rows > 0
            if not is_live:
                num_rows = Int32(0)
            fields = [slot_tile, col_tile, first_row, num_rows, group]
            for amaxes in (group_amax, column_amax):
                if const_expr(amaxes is not None):
                    amax = Int32(0)
                    if is_live:
                        amax = Int32(f32_as_bits(amaxes[group]))
                    fields.append(amax)
            live_lanes = Uint32(cute.arch.vote_ballot_sync(is_live))
            tile = self.first_of(fields, live_lanes)
            ahead = self.read_ahead(tile, inputs)
            while live_lanes != 0:
                live_lanes ^= Uint32(1 << (WARP_SIZE - 1)) >> cute.arch.clz(live_lanes)
                next_tile = self.first_of(fields, live_lanes)
                next_ahead = self.read_ahead(next_tile, inputs)
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                self.describe(shared, stage, tile)
                if const_expr(inputs is not None):
                    self.load_tile(tile, inputs, stage, full, shared, *ahead)
                self.announce(shared, full)
                tile, ahead = next_tile, next_ahead
                stage, phase = self.next_stage(stage, phase, self.num_loaders)
                full = self.next_barrier(full)
            item += WARP_SIZE * step
        for _ in cutlass.range(self.config.num_teams // self.num_loaders, unroll=1):
            cute.arch.mbarrier_wait(shared.empty + stage, phase)
            zero = Int32(0)
            self.describe(shared, stage, TileDescriptor(*[zero] * 7))
            self.announce(shared, full)
            stage, phase = self.next_stage(stage, phase, self.num_loaders)
            full = self.next_barrier(full)

    def first_of(self, fields: list[Int32], live_lanes: Uint32) -> TileDescriptor:
        """Return the tile that the highest of ``live_lanes`` has found.

        Without live lanes, the result is that of some lane.
        """
        lane = WARP_SIZE - 1 - Int32(cute.arch.clz(live_lanes))
        values = [cute.arch.shuffle_sync(value, lane) for value in fields]
        return TileDescriptor(*values, *[Int32(0)] * (len(TileDescriptor._fields) - len(values)))

    def read_ahead(self, tile: TileDescriptor, inputs: Any) -> tuple[Int32, ...]:
        """Return data that ``load_tile`` needs, read before a stage is free."""
        return ()

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        """Arrive at the barrier of a tile."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.full + full)

    def tile_of(self, item: Int32, num_tiles: Int32, col_tiles: Int32) -> tuple[Int32, Int32]:
        """Return the slot tile and the column of tiles of an item."""
        first_tile, tall = Int32(0), num_tiles
        if self.in_bands:
            first_tile = item // (self.config.band * col_tiles) * self.config.band
            tall = cutlass.min(num_tiles - first_tile, Int32(self.config.band))
        within = item - first_tile * col_tiles
        col_tile = within // tall
        return first_tile + (within - col_tile * tall), col_tile

    @cute.jit
    def load_tile(
        self, tile: TileDescriptor, inputs: Any, stage: Int32, full: Int32, shared: TileSharedMemory
    ) -> None:
        """Start the TMA copies of a tile into a stage."""
        strips = (tile.num_rows + (self.box_rows - 1)) // self.box_rows
        full_barrier, target = shared.full + full, shared.tiles + stage * self.config.tile_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(
                full_barrier, strips * (self.config.tile_bytes // TILE_ROWS * self.box_rows)
            )
        for n in cutlass.range(strips, unroll=1):
            row = n * self.box_rows
            for t, (tma, first_column) in enumerate(self.sources(tile, inputs)):
                for b in range(self.geometry.num_boxes):
                    box_target = target + (
                        (t * self.geometry.num_boxes + b) * BOX_SIZE + row * BOX_BYTES
                    )
                    self.copy_box(
                        tma,
                        tile.first_row + row,
                        first_column + b * self.geometry.box_cols,
                        box_target,
                        full_barrier,
                    )

    def sources(self, tile: TileDescriptor, inputs: Any) -> list[tuple[Tma, Int32]]:
        """Return the source of each tile of a stage, and its first column there."""
        return [(inputs, tile.col_tile * TILE_COLS)]

    @cute.jit
    def copy_box(
        self, tma: Tma, row: Int32, col: Int32, target: cute.Pointer, full_barrier: cute.Pointer
    ) -> None:
        """Start the TMA copy of one box, by all lanes."""
        dtype = DSL_TYPES[self.config.dtype]
        pointer = cute.recast_ptr(target, tma.layout.inner, dtype=dtype)
        window = cute.local_tile(
            cute.domain_offset((row, col), tma.source),
            (self.box_rows, self.geometry.box_cols),
            (0, 0),
        )
        target_partition, source_partition = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, tma.layout.outer), 0, 2),
            cute.group_modes(window, 0, 2),
        )
        cute.copy(tma.atom, source_partition, target_partition, tma_bar_ptr=full_barrier)

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32, step: int) -> tuple[Int32, Int32]:
        """Return the stage and phase ``step`` stages later."""
        stage += step
        if stage >= self.config.num_stages:
            stage -= self.config.num_stages
            phase ^= 1
        return stage, phase

    @cute.jit
    def next_barrier(self, full: Int32) -> Int32:
        """Return the arrival barrier of the next tile. The barriers of each team alternate."""
        full += 2 * self.num_loaders
        if full >= 2 * self.config.num_teams:
            full = full - 2 * self.config.num_teams ^ 1
        return full

    @cute.jit
    def describe(self, shared: TileSharedMemory, stage: Int32, tile: TileDescriptor) -> None:
        """Write the descriptor of a stage."""
        address = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
        with cute.arch.elect_one():
            store_shared(address, [Uint32(value) for value in tile[:4]])
            words = [Uint32(value) for value in tile[4:]]
            store_shared(
                address + 16, [*words, Uint32(0)] if self.config.has_column_amax else words[:2]
            )

    @cute.jit
    def read_descriptor(self, shared: TileSharedMemory, stage: Int32) -> TileDescriptor:
        """Read the descriptor of a stage."""
        address = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
        words = load_shared(address, 4)
        words += load_shared(address + 16, 4 if self.config.has_column_amax else 2)
        # The second amax, or the first one again.
        return TileDescriptor(*[Int32(word) for word in (words + words[5:6])[:7]])


class GatheredRows(NamedTuple):
    """Rows of a matrix by an index.

    Attributes:
        x: (R, K) matrix.
        index: (T,) int32, the row of x for each row.
    """

    x: cute.Tensor
    index: cute.Tensor


class GatheredRowsLoader(TileLoader):
    """Loads tiles of gathered rows, 16 bytes per lane at a time."""

    #: One per lane for its copies, and one for the descriptor.
    arrivals = WARP_SIZE + 1

    def __init__(self, config: TileConfig, geometry: TileGeometry, in_bands: bool = True):
        super().__init__(config, geometry, in_bands)
        self.num_loaders = config.num_loaders
        self.size = DTYPE_BYTES[config.dtype]
        #: Chunks of 16 bytes of a row, and rows that the warp copies at once.
        self.chunks = TILE_COLS * self.size // 16
        self.rows_at_once = WARP_SIZE // self.chunks

    def read_ahead(self, tile: TileDescriptor, inputs: GatheredRows) -> tuple[Int32, ...]:
        """Return the index of a lane's row in each 32 rows, clamped to the matrix."""
        lane = cute.arch.lane_idx()
        address = inputs.index.iterator.toint() + Int64(tile.first_row + lane) * 4
        loaded = [
            load_global_if(address + i * 128, 4, lane + i * WARP_SIZE, tile.num_rows)[0]
            for i in range(4)
        ]
        last_row = inputs.x.shape[0] - 1
        return tuple(cutlass.max(cutlass.min(Int32(row), last_row), Int32(0)) for row in loaded)

    @cute.jit
    def load_tile(
        self,
        tile: TileDescriptor,
        inputs: GatheredRows,
        stage: Int32,
        full: Int32,
        shared: TileSharedMemory,
        *index: Int32,
    ) -> None:
        """Start the asynchronous copies of a tile's rows into a stage; zeros past K."""
        lane, cols = cute.arch.lane_idx(), inputs.x.shape[1]
        chunk, row = lane % self.chunks, lane // self.chunks
        col = tile.col_tile * TILE_COLS + chunk * (16 // self.size)
        pitch = Int32(cols * self.size)
        source = inputs.x.iterator.toint() + Int64(col) * self.size
        target = shared.tiles.toint() + stage * self.config.tile_bytes
        target += chunk // 8 * BOX_SIZE + row * BOX_BYTES + (chunk ^ row) % 8 * 16
        for i in range_constexpr(TILE_ROWS // WARP_SIZE):
            if i * WARP_SIZE < tile.num_rows:
                for half in range_constexpr(0, WARP_SIZE, 16):
                    rows = range(half, half + 16, self.rows_at_once)
                    # Compute all addresses first: a copy occupies its address for a while.
                    sources = [
                        source + Int64(cute.arch.shuffle_sync(index[i], row + n)) * pitch
                        for n in rows
                    ]
                    for n, address in zip(rows, sources, strict=True):
                        copy_async(
                            (target ^ (n % 8 * 16)) + (i * WARP_SIZE + n) * BOX_BYTES,
                            address,
                            col < cols,
                        )

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        """Arrive at the barrier of a tile once the lane's copies have landed."""
        cute.arch.cp_async_mbarrier_arrive_noinc(shared.full + full)
        TileLoader.announce(self, shared, full)
