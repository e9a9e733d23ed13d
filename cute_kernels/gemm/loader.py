"""The load warp: TMA copies of both operands and their block scales into the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gemm.config import RAGGED_ROWS, TAIL_BOX_ROWS
from cute_kernels.gemm.scheduler import WorkTile
from cute_kernels.layout.shapes import SF_TILE_COLS, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig
    from cute_kernels.gemm.scheduler import TileReader

__all__ = ["LoadWarp", "OperandLoad", "RowBoxes", "SwappedTail", "TmaSource"]


class TmaSource(NamedTuple):
    """A tensor in global memory that TMA reads tiles of.

    Attributes:
        atom: the copy.
        tensor: coordinates of (rows, K, L), see ``operands``.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


class OperandLoad(NamedTuple):
    """How one tensor of one operand gets into shared memory.

    Attributes:
        source: where it comes from.
        shared: its stages, (MMA, MMA_MN, MMA_K, STAGE).
        tiler: rows and K of a tile.
        partition: the part of a tile that this CTA loads, a method of a ThrMma.
        cta_coord: number of this CTA among those that share a multicast.
        cta_layout: the CTAs that share one.
        mcast_mask: who receives it; None without a cluster.
        is_scale: it holds block scales.
    """

    source: TmaSource
    shared: cute.Tensor
    tiler: tuple[int, int]
    partition: Any
    cta_coord: Int32
    cta_layout: cute.Layout
    mcast_mask: Any
    is_scale: bool

    def copies(self, row: Int32, k_start: Int32, group: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Source tiles along K from ``k_start`` on, and stages to put them in."""
        return _tile_copies(self, row, k_start, group)


@cute.jit
def _tile_copies(
    load: OperandLoad, row: Int32, k_start: Int32, group: Any
) -> tuple[cute.Tensor, cute.Tensor]:
    """Source tiles along K, ((atom, rest), K tiles), and stages ((atom, rest), stages)."""
    if cutlass.const_expr(load.is_scale):
        # Scale tiles are addressed by the tile: rows and K within one are hierarchical modes.
        row = ((Int32(0), Int32(0)), row // SF_TILE_ROWS)
        vec_size = load.source.tensor.shape[1][0][0]
        k_start = ((Int32(0), Int32(0)), k_start // (vec_size * SF_TILE_COLS))
    origin = cute.domain_offset((row, k_start, group), load.source.tensor)
    tiles = cute.local_tile(origin, load.tiler, (0, None, 0))
    to_shared, from_global = cpasync.tma_partition(
        load.source.atom,
        load.cta_coord,
        load.cta_layout,
        cute.group_modes(load.shared, 0, 3),
        cute.group_modes(load.partition(tiles), 0, 3),
    )
    if cutlass.const_expr(load.is_scale):
        to_shared, from_global = cute.filter_zeros(to_shared), cute.filter_zeros(from_global)
    return from_global, to_shared


class RowBoxes(NamedTuple):
    """How the first rows of a tile of A get into its stages, and no others.

    Attributes:
        source: TMA copies of ``TAIL_BOX_ROWS`` rows.
        shared: the stages, (rows, K, boxes of all stages).
    """

    source: TmaSource
    shared: cute.Tensor


@cute.jit
def _box_copies(boxes: RowBoxes, row: Int32, tile_k: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Source boxes from ``row`` on, (atom, boxes, K tiles), and their places, (atom, boxes)."""
    origin = cute.domain_offset((row, 0, 0), boxes.source.tensor)
    tiles = cute.local_tile(origin, (TAIL_BOX_ROWS, tile_k), (None, None, 0))
    to_shared, from_global = cpasync.tma_partition(
        boxes.source.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(boxes.shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return from_global, to_shared


class SwappedTail(NamedTuple):
    """What is loaded otherwise for the tail of a group whose operands change places.

    Elements stay where they are: only the instructions take one operand for the other. A CTA needs
    block scales of its own rows of operand M and of all rows of operand N, so these change places.

    Attributes:
        boxes: elements of A.
        b_scales: block scales of B, now operand M.
        a_scales: block scales of A, now operand N.
        cta: number of this CTA among those that share a tile.
    """

    boxes: RowBoxes
    b_scales: OperandLoad
    a_scales: OperandLoad
    cta: Int32


class LoadWarp:
    """The load warp.

    Args:
        config: the kernel's configuration.
        operand_m: copies of operand M: elements, then block scales if it has any.
        operand_n: copies of operand N.
        tiles: the tile records.
        ab_pipeline: the stages.
        tail: what differs for tails that swap operands; None if they do not.
    """

    def __init__(
        self,
        config: GemmConfig,
        operand_m: tuple[OperandLoad, ...],
        operand_n: tuple[OperandLoad, ...],
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
        tail: SwappedTail | None = None,
    ):
        self.config = config
        self.operand_m = operand_m
        self.operand_n = operand_n
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.tail = tail

    @cute.jit
    def run(self) -> None:
        sources = [load.source for load in (*self.operand_m, *self.operand_n)]
        if cutlass.const_expr(self.tail is not None):
            sources += [x.source for x in self.tail[:3]]
        for source in sources:
            cpasync.prefetch_descriptor(source.atom)
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if cutlass.const_expr(self.tail is None):
                ab_state = self.load(tile, ab_state)
            elif tile.rows >= self.config.tile.rows:
                ab_state = self.load(tile, ab_state)
            else:
                ab_state = self.load_tail(tile, ab_state)
            tile, tile_state = self.tiles.next(tile_state)
        self.ab_pipeline.producer_tail(ab_state)

    @cute.jit
    def load(self, tile: WorkTile, ab_state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Fill the stages of a tile."""
        k_start, m_group, n_group = tile.k_start, Int32(0), Int32(0)
        if cutlass.const_expr(self.config.ragged_k):
            k_start = RAGGED_ROWS - tile.rows
            m_group = n_group = (tile.k_start + tile.rows, Int32(RAGGED_ROWS))
        elif cutlass.const_expr(self.config.grouping == "m_grouped"):
            if cutlass.const_expr(self.config.tile.swap_ab):
                m_group = tile.group
            else:
                n_group = tile.group
        copies = []
        for load in self.operand_m:
            row = tile.m_sf_row if cutlass.const_expr(load.is_scale) else tile.m_row
            copies.append((load, *load.copies(row, k_start, m_group)))
        for load in self.operand_n:
            row = tile.n_sf_row if cutlass.const_expr(load.is_scale) else tile.n_row
            copies.append((load, *load.copies(row, k_start, n_group)))
        for k_tile in cutlass.range(self.num_k_tiles(tile), unroll=1):
            self.ab_pipeline.producer_acquire(ab_state)
            self.copy_stage(copies, k_tile, ab_state)
            ab_state.advance()
        return ab_state

    def num_k_tiles(self, tile: WorkTile) -> Int32:
        """Stages of a tile."""
        return (tile.k_blocks + (self.config.k_blocks - 1)) // self.config.k_blocks

    def copy_stage(
        self,
        copies: list[tuple[OperandLoad, cute.Tensor, cute.Tensor]],
        k_tile: Int32,
        ab_state: pipeline.PipelineState,
    ) -> None:
        """Fill a stage with ``k_tile``-th tiles along K."""
        barrier = self.ab_pipeline.producer_get_barrier(ab_state)
        for load, from_global, to_shared in copies:
            cute.copy(
                load.source.atom,
                from_global[None, k_tile],
                to_shared[None, ab_state.index],
                tma_bar_ptr=barrier,
                mcast_mask=load.mcast_mask,
            )

    @cute.jit
    def load_tail(self, tile: WorkTile, ab_state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Fill the stages of a tail, with as many boxes of rows of A as its instructions take."""
        config, tail = self.config, self.tail
        num_ctas = config.tile.num_ctas
        # A CTA has half of the rows of a pair's instruction.
        rows = config.instruction_n(tile.rows) // num_ctas
        num_boxes = (rows + (TAIL_BOX_ROWS - 1)) // TAIL_BOX_ROWS
        box_from, box_to = _box_copies(
            tail.boxes, tile.m_row + tail.cta * rows, config.mma_tiler_mnk[2]
        )
        copies = [
            (load, *load.copies(row, Int32(0), group))
            for load, row, group in (
                (self.operand_n[0], tile.n_row, tile.group),
                (tail.b_scales, tile.n_sf_row, tile.group),
                (tail.a_scales, tile.m_sf_row, Int32(0)),
            )
        ]
        all_boxes = config.tile.m // num_ctas // TAIL_BOX_ROWS
        box_bytes = config.element_stage_bytes[0] // all_boxes
        stage_bytes = config.stage_bytes - (all_boxes - num_boxes) * box_bytes
        for k_tile in cutlass.range(self.num_k_tiles(tile), unroll=1):
            # As producer_acquire, which would expect the bytes of all boxes.
            self.ab_pipeline.sync_object_empty.wait(ab_state.index, ab_state.phase)
            if self.ab_pipeline.is_leader_cta:
                self.ab_pipeline.sync_object_full.arrive_and_expect_tx(
                    ab_state.index, stage_bytes * num_ctas
                )
            self.copy_stage(copies, k_tile, ab_state)
            for box in cutlass.range(num_boxes, unroll=1):
                cute.copy(
                    tail.boxes.source.atom,
                    box_from[None, box, k_tile],
                    box_to[None, ab_state.index * all_boxes + box],
                    tma_bar_ptr=self.ab_pipeline.producer_get_barrier(ab_state),
                )
            ab_state.advance()
        return ab_state
