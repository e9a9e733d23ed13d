"""Loads of both operands and their block scales into shared memory."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.layout.shapes import SF_TILE_COLS, SF_TILE_ROWS

from ..common.loader import LoadWarp, TmaSource
from ..common.scheduler import WorkTile
from .config import BOX_ROWS, Sm100GemmConfig
from .storage import Layouts


class OperandLoad(NamedTuple):
    """The load of one tensor of one operand into shared memory.

    Attributes:
        source: Tensor in global memory, as TMA reads it.
        shared: Stages, (MMA, MMA_MN, MMA_K, STAGE).
        tiler: Rows and K of a tile.
        partition: Method of a ThrMma that selects the rows of a tile that this CTA loads.
        cta_coord: Number of this CTA among those of ``cta_layout``, which share a multicast.
        cta_layout: CTAs that share a multicast.
        mcast_mask: Mask of the CTAs that receive the copy. None without multicast.
        is_scale: True for block scales.
    """

    source: TmaSource
    shared: cute.Tensor
    tiler: tuple[int, int]
    partition: Any
    cta_coord: Int32
    cta_layout: cute.Layout
    mcast_mask: Any
    is_scale: bool

    @cute.jit
    def copies(self, row: Int32, k_start: Int32, group: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return source tiles, ((atom, rest), K tiles), and stages, ((atom, rest), stages)."""
        tensor = self.source.tensor
        if const_expr(self.is_scale):
            # Scale tiles are addressed by the tile: rows and K within one are hierarchical modes.
            row = ((Int32(0), Int32(0)), row // SF_TILE_ROWS)
            k_start = ((Int32(0), Int32(0)), k_start // (tensor.shape[1][0][0] * SF_TILE_COLS))
        elif const_expr(isinstance(tensor.shape[0], tuple)):
            # Rows alternate between two halves.
            row = (Int32(0), row // 2)
        tiles = cute.local_tile(
            cute.domain_offset((row, k_start, group), tensor), self.tiler, (0, None, 0)
        )
        to_shared, from_global = cpasync.tma_partition(
            self.source.atom,
            self.cta_coord,
            self.cta_layout,
            cute.group_modes(self.shared, 0, 3),
            cute.group_modes(self.partition(tiles), 0, 3),
        )
        if const_expr(self.is_scale):
            to_shared, from_global = cute.filter_zeros(to_shared), cute.filter_zeros(from_global)
        return from_global, to_shared


class StageLoads:
    """Loads of this CTA.

    ``tiled_mma_sf`` is the MMA whose N partition is that of operand N's block scales.
    """

    def __init__(
        self, layouts: Layouts, tiled_mma: cute.TiledMma, tiled_mma_sf: cute.TiledMma, cta: Int32
    ):
        self.layouts = layouts
        self.cta = cta
        self.thr_mma, self.thr_mma_sf = tiled_mma.get_slice(cta), tiled_mma_sf.get_slice(cta)
        self.coord = layouts.cluster.get_flat_coord(cta)
        self.coord_sf = layouts.cluster_sf.get_flat_coord(cta)

    def m(self, source: TmaSource, shared: cute.Tensor, is_scale: bool = False) -> OperandLoad:
        """Return the load of operand M, or of its block scales.

        It is multicast to the CTAs along N of a cluster.
        """
        rows, layouts = self.layouts.tiler[0], self.layouts
        return self._load(
            source, shared, rows, self.thr_mma.partition_A, layouts.cluster, self.coord, 2, is_scale
        )

    def n(self, source: TmaSource, shared: cute.Tensor, is_scale: bool = False) -> OperandLoad:
        """Return the load of operand N, or of its block scales, multicast to the CTAs along M."""
        tiler, mma, cluster, coord = (
            self.layouts.tiler,
            self.thr_mma,
            self.layouts.cluster,
            self.coord,
        )
        if is_scale:
            tiler, mma = self.layouts.tiler_sf, self.thr_mma_sf
            cluster, coord = self.layouts.cluster_sf, self.coord_sf
        return self._load(source, shared, tiler[1], mma.partition_B, cluster, coord, 1, is_scale)

    def _load(
        self,
        source: TmaSource,
        shared: cute.Tensor,
        rows: int,
        partition: Any,
        cluster: cute.Layout,
        coord: tuple[Int32, ...],
        mode: int,
        is_scale: bool,
    ) -> OperandLoad:
        """Return the load of a tensor that is multicast along one mode of the cluster."""
        sharers, mask = tuple(None if i == mode else 0 for i in range(4)), None
        if self.layouts.config.tile.num_ctas > 1:
            mask = cpasync.create_tma_multicast_mask(cluster, coord, mcast_mode=mode)
        return OperandLoad(
            source=source,
            shared=shared,
            tiler=(rows, self.layouts.tiler[2]),
            partition=partition,
            cta_coord=coord[mode],
            cta_layout=cute.make_layout(cute.slice_(cluster, sharers).shape),
            mcast_mask=mask,
            is_scale=is_scale,
        )


class RowBoxes(NamedTuple):
    """Loads of the first rows of a tile of A into its stages.

    ``shared`` are (rows, K, boxes of all stages).
    """

    source: TmaSource
    shared: cute.Tensor


@cute.jit
def _box_copies(boxes: RowBoxes, row: Int32, tile_k: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Return the boxes of A from ``row`` on.

    Returns:
        Source boxes, (atom, boxes, K tiles), and shared ones, (atom, boxes).
    """
    origin = cute.domain_offset((row, 0, 0), boxes.source.tensor)
    tiles = cute.local_tile(origin, (BOX_ROWS, tile_k), (None, None, 0))
    to_shared, from_global = cpasync.tma_partition(
        boxes.source.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(boxes.shared, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return from_global, to_shared


class SwappedPartial(NamedTuple):
    """Loads that differ for a partial tile, whose operands change places.

    Elements stay where they are: only the instructions use one operand for the other. A CTA needs
    block scales of its own rows of operand M and of all rows of operand N, so these change places.

    Attributes:
        boxes: Boxes of elements of A. None if they are gathered.
        cta: Number of this CTA in the pair.
        m_scales: Block scales of operand M. None if absent.
        n_scales: Block scales of operand N. None if absent.
    """

    boxes: RowBoxes | None
    cta: Int32
    m_scales: OperandLoad | None = None
    n_scales: OperandLoad | None = None


class SwappingLoadWarp(LoadWarp):
    """The load warp of a kernel whose partial tiles have swapped operands."""

    config: Sm100GemmConfig

    def __init__(self, config: Sm100GemmConfig, partial: SwappedPartial, *arguments: Any):
        super().__init__(config, *arguments)
        self.partial = partial

    def sources(self) -> list[TmaSource]:
        """Return the TMA sources of all loads, with those of partial tiles."""
        inherited, partial = super().sources(), self.partial
        loads = (partial.boxes, partial.m_scales, partial.n_scales)
        return inherited + [x.source for x in loads if x is not None]

    @cute.jit
    def fill(self, tile: WorkTile, ab_state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Load the stages of one tile, partial or not and return the next state."""
        if tile.rows >= self.config.tile.rows:
            ab_state = self.load(tile, ab_state)
        else:
            ab_state = self.load_partial(tile, ab_state)
        return ab_state

    @cute.jit
    def load_partial(
        self, tile: WorkTile, ab_state: pipeline.PipelineState
    ) -> pipeline.PipelineState:
        """Fill the stages of a partial tile, with as many boxes of A as its instructions read."""
        config, partial = self.config, self.partial
        num_ctas = config.tile.num_ctas
        # A CTA has half of the rows of a pair's instruction.
        rows = config.instruction_n(tile.rows) // num_ctas
        num_boxes = (rows + (BOX_ROWS - 1)) // BOX_ROWS
        box_from = box_to = listed = None
        if const_expr(self.gather is None):
            box_from, box_to = _box_copies(
                partial.boxes, tile.m_row + partial.cta * rows, config.mma_tiler_mnk[2]
            )
        else:
            listed = self.gather.start(tile, rows)
        copies = [
            (load, *load.copies(row, Int32(0), group))
            for load, row, group in (
                # Another warp loads codes that are decoded.
                *((n, tile.n_row, tile.group) for n in self.operand_n[:1]),
                (partial.m_scales, tile.n_sf_row, tile.group),
                (partial.n_scales, tile.m_sf_row, Int32(0)),
            )
            if load is not None
        ]
        all_boxes = config.tile.m // num_ctas // BOX_ROWS
        box_bytes = config.element_stage_bytes[0] // all_boxes
        stage_bytes = config.loaded_bytes - (all_boxes - num_boxes) * box_bytes
        for k_tile in cutlass.range(self.num_k_tiles(tile), unroll=1):
            # As producer_acquire, which would expect the bytes of all boxes.
            self.ab_pipeline.sync_object_empty.wait(ab_state.index, ab_state.phase)
            if self.ab_pipeline.is_leader_cta:
                self.ab_pipeline.sync_object_full.arrive_and_expect_tx(
                    ab_state.index, stage_bytes * num_ctas
                )
            self.copy_stage(copies, k_tile, ab_state)
            barrier = self.ab_pipeline.producer_get_barrier(ab_state)
            if const_expr(self.gather is not None):
                self.gather.copy(
                    listed, tile, k_tile, ab_state.index, barrier, num_boxes * BOX_ROWS
                )
            else:
                for box in cutlass.range(num_boxes, unroll=1):
                    cute.copy(
                        partial.boxes.source.atom,
                        box_from[None, box, k_tile],
                        box_to[None, ab_state.index * all_boxes + box],
                        tma_bar_ptr=barrier,
                    )
            ab_state.advance()
        return ab_state
