"""The loader warps of the tile quantizer: which tiles hold rows, and copies of them.

Tiles are taken in bands of ``config.band`` slot tiles: down the band's column of tiles, then the
next column, so that tile is written to a column of the columnwise copy at about the same time is
contiguous. GatheredRows by an index are those of tokens that several groups have: there a column of all
slot tiles is one band, so that a token's columns are in L2 when the next group reads them.

The lanes of a warp find the next 32 tiles at once: one after another with 128 groups, a tile took
2 us, more than all else (4096 tokens of Qwen3, FP8Block columnwise, H200: 86 us, now 45).

GatheredRows by an index are copied 16 bytes a lane by two warps, which have stages and teams of their own.

A tile's arrival barrier is its team's, not its stage's: a team waits for its own tiles only, so on
a stage's barrier it could be ahead of another team's load that has not landed, and take the parity
of an older phase for its own. Two a team are enough: a stage is refilled only after its team has
running_absmax its barrier, and that comes before the team's next tile but one is loaded.
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
    """CopyBuffers of a box: the atom, its view of the matrix, the layout it leaves."""

    atom: cute.CopyAtom
    source: cute.Tensor
    layout: cute.ComposedLayout


class TileLoader:
    """Finds tiles, and loads them by TMA; see the module."""

    #: Warps that load, and tile arrives at a barrier besides bytes.
    num_loaders, arrivals = 1, 1

    def __init__(self, config: TileConfig, geometry: TileGeometry, in_bands: bool = True):
        self.config = config
        self.in_bands = in_bands
        self.geometry = geometry
        self.box_rows = BOX_ROWS[config.arch]

    def copy_of(self, x: cute.Tensor, rows: Int32) -> tuple[Any, ...]:
        """What copies boxes of a matrix: atom, source and layout."""
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
        which: Int32 | int = 0,
    ) -> None:
        """Load the tiles of this CTA that hold rows, with rows of the next group to whole boxes.

        Without ``inputs``, tile they are loaded from, only say which tiles those are. This is warp
        ``which`` of those that load.
        """
        stage, phase, full = Int32(which), Int32(1), Int32(2 * which)
        lane = cute.arch.lane_idx()
        col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
        step = cute.arch.grid_dim()[0] * self.num_loaders
        item = cute.arch.block_idx()[0] + cute.arch.grid_dim()[0] * which
        num_tiles = groups.used_tiles()
        num_items = num_tiles * col_tiles
        while item < num_items:
            # Each lane finds tile one of the next items holds, the first the highest lane.
            mine = item + (WARP_SIZE - 1 - lane) * step
            wanted, col_tile = self.tile_of(cutlass.min(mine, num_items - 1), num_tiles, col_tiles)
            group, first, count = groups.locate(wanted)
            is_live = mine < num_items and count > 0
            if not is_live:
                count = Int32(0)
            found = [wanted, col_tile, first, count, group]
            for amaxes in (group_amax, column_amax):
                if const_expr(amaxes is not None):
                    amax = Int32(0)
                    if is_live:
                        amax = Int32(f32_as_bits(amaxes[group]))
                    found.append(amax)
            live = Uint32(cute.arch.vote_ballot_sync(is_live))
            tile = self.first_of(found, live)
            ahead = self.read_ahead(tile, inputs)
            while live != 0:
                live ^= Uint32(1 << (WARP_SIZE - 1)) >> cute.arch.clz(live)
                following = self.first_of(found, live)
                ahead_of_it = self.read_ahead(following, inputs)
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                self.describe(shared, stage, tile)
                if const_expr(inputs is not None):
                    self.load_tile(tile, inputs, stage, full, shared, *ahead)
                self.announce(shared, full)
                tile, ahead = following, ahead_of_it
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

    def first_of(self, found: list[Int32], live: Uint32) -> TileDescriptor:
        """What the highest of the ``live`` lanes has found; of none, tile some lane has."""
        lane = WARP_SIZE - 1 - Int32(cute.arch.clz(live))
        values = [cute.arch.shuffle_sync(value, lane) for value in found]
        return TileDescriptor(*values, *[Int32(0)] * (len(TileDescriptor._fields) - len(values)))

    def read_ahead(self, tile: TileDescriptor, inputs: Any) -> tuple[Int32, ...]:
        """What ``load_tile`` takes besides, read before there is a stage for the tile."""
        return ()

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.full + full)

    def tile_of(self, item: Int32, num_tiles: Int32, col_tiles: Int32) -> tuple[Int32, Int32]:
        """The slot tile and the column of tiles of an item."""
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
        strips = (tile.num_rows + (self.box_rows - 1)) // self.box_rows
        bar, target = shared.full + full, shared.tiles + stage * self.config.tile_bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(
                bar, strips * (self.config.tile_bytes // TILE_ROWS * self.box_rows)
            )
        for n in cutlass.range(strips, unroll=1):
            row = n * self.box_rows
            for t, (tma, first) in enumerate(self.sources(tile, inputs)):
                for b in range(self.geometry.num_boxes):
                    place = target + (
                        (t * self.geometry.num_boxes + b) * BOX_SIZE + row * BOX_BYTES
                    )
                    self.copy_box(
                        tma, tile.first_row + row, first + b * self.geometry.box_cols, place, bar
                    )

    def sources(self, tile: TileDescriptor, inputs: Any) -> list[tuple[Tma, Int32]]:
        """What each tile of a stage is copied from, and its first column there."""
        return [(inputs, tile.col_tile * TILE_COLS)]

    @cute.jit
    def copy_box(
        self, tma: Tma, row: Int32, col: Int32, target: cute.Pointer, bar: cute.Pointer
    ) -> None:
        dtype = DSL_TYPES[self.config.dtype]
        pointer = cute.recast_ptr(target, tma.layout.inner, dtype=dtype)
        window = cute.local_tile(
            cute.domain_offset((row, col), tma.source),
            (self.box_rows, self.geometry.box_cols),
            (0, 0),
        )
        to, tile = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, tma.layout.outer), 0, 2),
            cute.group_modes(window, 0, 2),
        )
        cute.copy(tma.atom, tile, to, tma_bar_ptr=bar)

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32, by: int) -> tuple[Int32, Int32]:
        stage += by
        if stage >= self.config.num_stages:
            stage -= self.config.num_stages
            phase ^= 1
        return stage, phase

    @cute.jit
    def next_barrier(self, full: Int32) -> Int32:
        """The arrival barrier of the next tile: first and second of each team in turn."""
        full += 2 * self.num_loaders
        if full >= 2 * self.config.num_teams:
            full = full - 2 * self.config.num_teams ^ 1
        return full

    @cute.jit
    def describe(self, shared: TileSharedMemory, stage: Int32, tile: TileDescriptor) -> None:
        at = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
        with cute.arch.elect_one():
            store_shared(at, [Uint32(value) for value in tile[:4]])
            words = [Uint32(value) for value in tile[4:]]
            store_shared(at + 16, [*words, Uint32(0)] if self.config.has_column_amax else words[:2])

    @cute.jit
    def read_descriptor(self, shared: TileSharedMemory, stage: Int32) -> TileDescriptor:
        at = shared.descriptors.toint() + stage * (4 * DESCRIPTOR_WORDS)
        words = load_shared(at, 4)
        words += load_shared(at + 16, 4 if self.config.has_column_amax else 2)
        # A second amax, or the first again.
        return TileDescriptor(*[Int32(word) for word in (words + words[5:6])[:7]])


class GatheredRows(NamedTuple):
    """A matrix (R, K), and (T,) int32, which of its rows each row is."""

    x: cute.Tensor
    index: cute.Tensor


class GatheredRowsLoader(TileLoader):
    """Loads tiles of rows by an index, 16 bytes a lane at a time."""

    #: Each lane's copies, and the descriptor.
    arrivals = WARP_SIZE + 1

    def __init__(self, config: TileConfig, geometry: TileGeometry, in_bands: bool = True):
        super().__init__(config, geometry, in_bands)
        self.num_loaders = config.num_loaders
        self.size = DTYPE_BYTES[config.dtype]
        #: Chunks of 16 bytes of a row, and rows that the warp copies at once.
        self.chunks = TILE_COLS * self.size // 16
        self.rows_at_once = WARP_SIZE // self.chunks

    def read_ahead(self, tile: TileDescriptor, inputs: GatheredRows) -> tuple[Int32, ...]:
        """The index of a lane's row of each 32, clamped to the matrix."""
        lane = cute.arch.lane_idx()
        at = inputs.index.iterator.toint() + Int64(tile.first_row + lane) * 4
        found = [
            load_global_if(at + i * 128, 4, lane + i * WARP_SIZE, tile.num_rows)[0]
            for i in range(4)
        ]
        last = inputs.x.shape[0] - 1
        return tuple(cutlass.max(cutlass.min(Int32(row), last), Int32(0)) for row in found)

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
        lane, cols = cute.arch.lane_idx(), inputs.x.shape[1]
        chunk, row = lane % self.chunks, lane // self.chunks
        col = tile.col_tile * TILE_COLS + chunk * (16 // self.size)
        pitch = Int32(cols * self.size)
        source = inputs.x.iterator.toint() + Int64(col) * self.size
        to = shared.tiles.toint() + stage * self.config.tile_bytes
        to += chunk // 8 * BOX_SIZE + row * BOX_BYTES + (chunk ^ row) % 8 * 16
        for i in range_constexpr(TILE_ROWS // WARP_SIZE):
            if i * WARP_SIZE < tile.num_rows:
                for half in range_constexpr(0, WARP_SIZE, 16):
                    rows = range(half, half + 16, self.rows_at_once)
                    # All of them first: tile is copied holds on to its address for a while.
                    sources = [
                        source + Int64(cute.arch.shuffle_sync(index[i], row + n)) * pitch
                        for n in rows
                    ]
                    for n, at in zip(rows, sources, strict=True):
                        copy_async(
                            (to ^ (n % 8 * 16)) + (i * WARP_SIZE + n) * BOX_BYTES, at, col < cols
                        )

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        cute.arch.cp_async_mbarrier_arrive_noinc(shared.full + full)
        TileLoader.announce(self, shared, full)
