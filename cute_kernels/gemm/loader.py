"""The load warp: TMA copies of both operands and their block scales into the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gemm.config import RAGGED_ROWS
from cute_kernels.shapes import SF_TILE_COLS, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig
    from cute_kernels.gemm.scheduler import TileReader

__all__ = ["LoadWarp", "OperandLoad", "TmaSource"]


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


class LoadWarp:
    """The load warp.

    Args:
        config: the kernel's configuration.
        operand_m: copies of operand M: elements, then block scales if it has any.
        operand_n: copies of operand N.
        tiles: the tile records.
        ab_pipeline: the stages.
    """

    def __init__(
        self,
        config: GemmConfig,
        operand_m: tuple[OperandLoad, ...],
        operand_n: tuple[OperandLoad, ...],
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
    ):
        self.config = config
        self.operand_m = operand_m
        self.operand_n = operand_n
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline

    @cute.jit
    def run(self) -> None:
        for load in (*self.operand_m, *self.operand_n):
            cpasync.prefetch_descriptor(load.source.atom)
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            k_start, m_group, n_group = tile.k_start, Int32(0), Int32(0)
            if cutlass.const_expr(self.config.ragged_k):
                end = k_start + tile.rows
                k_start = RAGGED_ROWS - tile.rows
                m_group = n_group = (end, Int32(RAGGED_ROWS))
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
            k_tiles = (tile.k_blocks + (self.config.k_blocks - 1)) // self.config.k_blocks
            for k_tile in cutlass.range(k_tiles, unroll=1):
                self.ab_pipeline.producer_acquire(ab_state)
                barrier = self.ab_pipeline.producer_get_barrier(ab_state)
                for load, from_global, to_shared in copies:
                    cute.copy(
                        load.source.atom,
                        from_global[None, k_tile],
                        to_shared[None, ab_state.index],
                        tma_bar_ptr=barrier,
                        mcast_mask=load.mcast_mask,
                    )
                ab_state.advance()
            tile, tile_state = self.tiles.next(tile_state)
        self.ab_pipeline.producer_tail(ab_state)
