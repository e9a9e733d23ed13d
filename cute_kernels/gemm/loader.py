"""The load warp: TMA copies of both operands and their block scales into the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gemm.config import RAGGED_ROWS, TAIL_BOX_ROWS
from cute_kernels.shapes import SF_TILE_COLS, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig
    from cute_kernels.gemm.scheduler import TileReader, WorkTile

__all__ = ["LoadWarp", "OperandLoad", "RowBoxes", "TileLoads", "TmaSource"]


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


class RowBoxes(NamedTuple):
    """How the first rows of a tile of A get into its stages, and no others.

    Attributes:
        source: TMA copies of ``TAIL_BOX_ROWS`` rows.
        shared: the stages, (rows, K, boxes of all stages).
    """

    source: TmaSource
    shared: cute.Tensor


class TileLoads(NamedTuple):
    """How a tile gets into shared memory.

    Attributes:
        ragged: copies from A: elements, then block scales if it has any.
        uniform: copies from B.
        boxes: copies of elements of A, if only its first rows are needed.
    """

    ragged: tuple[OperandLoad, ...]
    uniform: tuple[OperandLoad, ...]
    boxes: RowBoxes | None = None


class LoadWarp:
    """The load warp.

    Args:
        config: the kernel's configuration.
        loads: of tiles whose operands are as the configuration's ``swap_ab`` says.
        swapped_loads: of the others; None if there are none.
        cta: number of this CTA in its cluster.
        tiles: the tile records.
        ab_pipeline: the stages.
    """

    def __init__(
        self,
        config: GemmConfig,
        loads: TileLoads,
        swapped_loads: TileLoads | None,
        cta: Int32,
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
    ):
        self.config = config
        self.loads = loads
        self.swapped_loads = swapped_loads
        self.cta = cta
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        rows = config.tile.m // config.tile.num_ctas
        self.boxes_per_stage = rows // TAIL_BOX_ROWS
        self.box_bytes = config.element_stage_bytes[0] // rows * TAIL_BOX_ROWS

    @cute.jit
    def run(self) -> None:
        for loads in (self.loads, self.swapped_loads):
            if cutlass.const_expr(loads is not None):
                for load in (*loads.ragged, *loads.uniform):
                    cpasync.prefetch_descriptor(load.source.atom)
                if cutlass.const_expr(loads.boxes is not None):
                    cpasync.prefetch_descriptor(loads.boxes.source.atom)
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if cutlass.const_expr(self.swapped_loads is None):
                ab_state = self.load(self.loads, tile, ab_state)
            elif tile.rows >= self.config.tile.rows:
                ab_state = self.load(self.loads, tile, ab_state)
            else:
                ab_state = self.load(self.swapped_loads, tile, ab_state)
            tile, tile_state = self.tiles.next(tile_state)
        self.ab_pipeline.producer_tail(ab_state)

    @cute.jit
    def load(
        self, loads: TileLoads, tile: WorkTile, ab_state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Fill the stages of a tile."""
        config = self.config
        k_start, a_group, b_group = tile.k_start, Int32(0), Int32(0)
        if cutlass.const_expr(config.ragged_k):
            k_start = RAGGED_ROWS - tile.rows
            a_group = b_group = (tile.k_start + tile.rows, Int32(RAGGED_ROWS))
        elif cutlass.const_expr(config.grouping == "m_grouped"):
            b_group = tile.group
        a_row, a_sf_row, b_row = tile.m_row, tile.m_sf_row, tile.n_row
        if cutlass.const_expr(config.tile.swap_ab):
            a_row, a_sf_row, b_row = tile.n_row, tile.n_sf_row, tile.m_row
        copies = []
        for load in loads.ragged:
            row = a_sf_row if cutlass.const_expr(load.is_scale) else a_row
            copies.append((load, *load.copies(row, k_start, a_group)))
        for load in loads.uniform:
            copies.append((load, *load.copies(b_row, k_start, b_group)))
        boxes = num_boxes = None
        if cutlass.const_expr(loads.boxes is not None):
            # A CTA has half of the instruction's rows of a pair's tile.
            rows = config.instruction_n(tile.rows) // config.tile.num_ctas
            num_boxes = (rows + (TAIL_BOX_ROWS - 1)) // TAIL_BOX_ROWS
            boxes = _box_copies(loads.boxes, a_row + self.cta * rows, config.mma_tiler_mnk[2])
        k_tiles = (tile.k_blocks + (config.k_blocks - 1)) // config.k_blocks
        for k_tile in cutlass.range(k_tiles, unroll=1):
            if cutlass.const_expr(boxes is None):
                self.ab_pipeline.producer_acquire(ab_state)
            else:
                self.acquire_part(ab_state, num_boxes)
            barrier = self.ab_pipeline.producer_get_barrier(ab_state)
            if cutlass.const_expr(boxes is not None):
                from_global, to_shared = boxes
                for box in cutlass.range(num_boxes, unroll=1):
                    stage_box = ab_state.index * self.boxes_per_stage + box
                    cute.copy(
                        loads.boxes.source.atom,
                        from_global[None, box, k_tile],
                        to_shared[None, stage_box],
                        tma_bar_ptr=barrier,
                    )
            for load, from_global, to_shared in copies:
                cute.copy(
                    load.source.atom,
                    from_global[None, k_tile],
                    to_shared[None, ab_state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=load.mcast_mask,
                )
            ab_state.advance()
        return ab_state

    @cute.jit
    def acquire_part(self, ab_state: pipeline.PipelineState, num_boxes: Int32) -> None:
        """Acquire a stage that gets ``num_boxes`` boxes of rows of A and everything else."""
        config = self.config
        self.ab_pipeline.sync_object_empty.wait(ab_state.index, ab_state.phase)
        if self.ab_pipeline.is_leader_cta:
            missing = (self.boxes_per_stage - num_boxes) * self.box_bytes
            self.ab_pipeline.sync_object_full.arrive_and_expect_tx(
                ab_state.index, (config.stage_bytes - missing) * config.tile.num_ctas
            )
