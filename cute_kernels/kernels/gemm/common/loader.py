"""The load warp: TMA copies of both operands and their block scales into the stages."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int16, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.layout.shapes import SF_TILE_ROWS

from .config import GemmConfig
from .problem import RAGGED_ROWS
from .scheduler import TileReader, WorkTile

#: The next tile is taken from the counter when a tile has this many stages left to load. Earlier
#: would take it from clusters that need it sooner.
_AHEAD = 8


class TmaSource(NamedTuple):
    """A tensor in global memory from which TMA reads tiles.

    Coordinates are (rows, K, L), see ``views``.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


def source_attributes(cls: type, sources: Any, attribute: str) -> Any:
    """Return a tuple ``cls`` of one attribute of each ``TmaSource`` of ``sources``."""
    return cls(*(getattr(source, attribute, None) for source in sources))


def paired_sources(cls: type, atoms: Any, tensors: Any) -> Any:
    """Return a tuple ``cls`` of the ``TmaSource`` of each atom and its tensor."""
    pairs = zip(atoms, tensors, strict=True)
    return cls(*(None if atom is None else TmaSource(atom, x) for atom, x in pairs))


class StageLoad(NamedTuple):
    """The load of one tensor into shared memory.

    Attributes:
        source: Tensor in global memory, (rows, K, G). For block scales see ``views``.
        shared: Stages, (rows, K, STAGE), or for scale tiles (row tiles, K tiles, words, STAGE).
        tiler: Extents in one stage, without the last mode. Interleaved rows have two.
        k_divisor: Elements of K for one element of the tensor along K.
        first_row: First row of this CTA in the cluster's tile.
        cta: Number of this CTA among the ``sharers``.
        sharers: Number of CTAs that share the rows. Each loads a part for all of them.
        is_scale: True for block scales.
    """

    source: TmaSource
    shared: cute.Tensor
    tiler: tuple[Any, ...]
    k_divisor: int
    first_row: Int32
    cta: Int32
    sharers: int
    is_scale: bool

    @property
    def mcast_mask(self) -> Int16 | None:
        """Mask of the CTAs that receive the copy, or None without multicast."""
        return Int16((1 << self.sharers) - 1) if self.sharers > 1 else None

    @cute.jit
    def copies(self, row: Int32, k_start: Int32, group: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the source tiles along K and the stages, both partitioned for TMA.

        Args:
            row: First row of the tile.
            k_start: First element of K.
            group: Coordinate of the group.
        """
        k_start = k_start // self.k_divisor
        row += self.first_row
        modes, pairs = len(self.tiler), isinstance(self.tiler[0], tuple)
        if const_expr(modes == 3):
            row = row // SF_TILE_ROWS
        if const_expr(pairs):
            row = (Int32(0), row // 2)
        if const_expr(modes == 3):
            coordinate = (row, k_start, Int32(0), group)
            tile_coordinate = (0, None, 0, 0)
        else:
            coordinate, tile_coordinate = (row, k_start, group), (0, None, 0)
        origin = cute.domain_offset(coordinate, self.source.tensor)
        tiles = cute.local_tile(origin, self.tiler, tile_coordinate)
        to_shared, from_global = cpasync.tma_partition(
            self.source.atom,
            self.cta,
            cute.make_layout(self.sharers),
            cute.group_modes(self.shared, 0, modes),
            cute.group_modes(tiles, 0, modes),
        )
        return from_global, to_shared


class LoadWarp:
    """The load warp, which copies tiles of both operands to shared memory.

    Each architecture has a class that loads one tensor of an operand. Its ``source`` is a
    ``TmaSource``. Its method ``copies(row, k_start, group)`` returns the source tiles along K and
    the stages. ``mcast_mask`` is the mask of the receivers, and ``is_scale`` is True for block
    scales. An operand has one such load for its elements, and a second one if it has block scales.
    ``gather`` copies rows by an index.
    """

    def __init__(
        self,
        config: GemmConfig,
        operand_m: tuple[Any, ...],
        operand_n: tuple[Any, ...],
        tiles: TileReader,
        ab_pipeline: Any,
        gather: Any = None,
    ):
        self.config = config
        self.gather = gather
        self.operand_m = operand_m
        self.operand_n = operand_n
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline

    def sources(self) -> list[TmaSource]:
        """Return the TMA sources of all loads."""
        return [load.source for load in (*self.operand_m, *self.operand_n)]

    @cute.jit
    def run(self) -> None:
        """Load the stages of all tiles of this CTA."""
        for source in self.sources():
            cpasync.prefetch_descriptor(source.atom)
        if const_expr(self.gather is not None):
            cpasync.prefetch_descriptor(self.gather.atom)
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        keeps = self.config.uses_dynamic_scheduling
        tile, tile_state = self.tiles.next(tile_state, keeps)
        while tile.group >= 0:
            ab_state = self.fill(tile, ab_state)
            tile, tile_state = self.tiles.next(tile_state, keeps)
        if const_expr(keeps):
            self.tiles.free(tile_state)
        self.ab_pipeline.producer_tail(ab_state)

    def fill(self, tile: WorkTile, ab_state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Load the stages of one tile; return the next state."""
        return self.load(tile, ab_state)

    @cute.jit
    def load(self, tile: WorkTile, ab_state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Load the stages of one tile; return the next state."""
        k_start, m_group, n_group = tile.k_start, Int32(0), Int32(0)
        if const_expr(self.config.ragged_k):
            k_start = RAGGED_ROWS - tile.rows
            m_group = n_group = (tile.k_start + tile.rows, Int32(RAGGED_ROWS))
        elif const_expr(self.config.grouping == "m_grouped"):
            if const_expr(self.config.tile.swap_ab):
                m_group = tile.group
            else:
                n_group = tile.group
        copies = []
        for load in self.operand_m:
            row = tile.m_sf_row if const_expr(load.is_scale) else tile.m_row
            copies.append((load, *load.copies(row, k_start, m_group)))
        for load in self.operand_n:
            row = tile.n_sf_row if const_expr(load.is_scale) else tile.n_row
            copies.append((load, *load.copies(row, k_start, n_group)))
        rows = None
        if const_expr(self.gather is not None):
            rows = self.gather.start(tile, self.gather.cta_rows)
        num_k_tiles = self.num_k_tiles(tile)
        if const_expr(self.config.uses_dynamic_scheduling):
            if num_k_tiles < _AHEAD:
                self.tiles.free(self.tiles.new_state())
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            if const_expr(self.config.uses_dynamic_scheduling):
                if k_tile == num_k_tiles - _AHEAD:
                    self.tiles.free(self.tiles.new_state())
            self.ab_pipeline.producer_acquire(ab_state)
            self.copy_stage(copies, k_tile, ab_state)
            if const_expr(self.gather is not None):
                barrier = self.ab_pipeline.producer_get_barrier(ab_state)
                self.gather.copy(rows, tile, k_tile, ab_state.index, barrier, self.gather.rows)
            ab_state.advance()
        return ab_state

    def num_k_tiles(self, tile: WorkTile) -> Int32:
        """Return the number of stages of a tile."""
        return tile.k_tiles(self.config)

    def copy_stage(
        self,
        copies: list[tuple[Any, cute.Tensor, cute.Tensor]],
        k_tile: Int32,
        ab_state: pipeline.PipelineState,
    ) -> None:
        """Issue the copies of one stage."""
        barrier = self.ab_pipeline.producer_get_barrier(ab_state)
        for load, from_global, to_shared in copies:
            cute.copy(
                load.source.atom,
                from_global[None, k_tile],
                to_shared[None, ab_state.index],
                tma_bar_ptr=barrier,
                mcast_mask=load.mcast_mask,
            )
