"""The MMA warp: block scales into tensor memory, then the tensor core's instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.gemm.config import K_BLOCKS, TMEM_LANES
from cute_kernels.gemm.scheduler import WorkTile
from cute_kernels.shapes import SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.scheduler import TileReader

__all__ = ["MmaWarp", "ScaleFactors"]


class ScaleFactors(NamedTuple):
    """Block scales of one operand.

    Attributes:
        shared: its stages in shared memory.
        pointer: where it lies in tensor memory.
        layout: (MMA, MMA_MN, MMA_K) in tensor memory.
    """

    shared: cute.Tensor
    pointer: cute.Pointer
    layout: cute.Layout

    def in_tmem(self, first_row: Int32 | int = 0) -> cute.Tensor:
        """The operand of the MMA, from row ``first_row`` of the first scale tile on."""
        shift = first_row % SF_TILE_ROWS // TMEM_LANES
        pointer = cute.recast_ptr(
            cute.recast_ptr(self.pointer, dtype=cutlass.Int32) + shift, dtype=self.pointer.dtype
        )
        return cute.make_tensor(pointer, self.layout)

    def copy_into_tmem(self, cta_group: tcgen05.CtaGroup) -> tuple:
        """The tiled copy of a stage, its sources by stage and its destination."""
        target = cute.filter_zeros(self.in_tmem())
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(cta_group), self.pointer.dtype)
        tiled_copy = tcgen05.make_s2t_copy(atom, target)
        thread = tiled_copy.get_slice(0)
        source = thread.partition_S(cute.filter_zeros(self.shared))
        source = tcgen05.get_s2t_smem_desc_tensor(tiled_copy, source)
        return tiled_copy, source, thread.partition_D(target)


class MmaWarp:
    """The MMA warp; only that of the leading CTA of a pair issues.

    Args:
        tiled_mma: the instruction and its tile.
        operands: fragments of both operands in shared memory, (MMA, MMA_MN, MMA_K, STAGE).
        scales: block scales of both operands, or None.
        acc: accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        is_leader: whether this CTA issues.
        tiles: the tile records.
        ab_pipeline: the stages.
        acc_pipeline: the accumulators.
    """

    def __init__(
        self,
        tiled_mma: cute.TiledMma,
        operands: tuple[cute.Tensor, cute.Tensor],
        scales: tuple[ScaleFactors, ScaleFactors] | None,
        acc: cute.Tensor,
        is_leader: Boolean,
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.tiled_mma = tiled_mma
        self.operands = operands
        self.scales = scales
        self.acc = acc
        self.is_leader = is_leader
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.acc_pipeline = acc_pipeline

    @cute.jit
    def run(self) -> None:
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ab_pipeline.num_stages
        )
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.acc_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if tile.k_blocks > 0 and self.is_leader:
                self.acc_pipeline.producer_acquire(acc_state)
                # Overlapping accumulators have one barrier and take turns with its phase.
                which = acc_state.index
                if cutlass.const_expr(self.acc_pipeline.num_stages == 1):
                    which = acc_state.phase ^ 1
                acc = self.acc[None, None, None, which]
                k_tiles = (tile.k_blocks + (K_BLOCKS - 1)) // K_BLOCKS
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    self.ab_pipeline.consumer_wait(ab_state)
                    self.multiply_stage(acc, ab_state.index, k_tile * K_BLOCKS, tile)
                    self.ab_pipeline.consumer_release(ab_state)
                    ab_state.advance()
                self.acc_pipeline.producer_commit(acc_state)
                acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)
        self.acc_pipeline.producer_tail(acc_state)

    @cute.jit
    def multiply_stage(
        self, acc: cute.Tensor, stage: Int32, first_k_block: Int32, tile: WorkTile
    ) -> None:
        """Add a stage's K blocks, the tile's from ``first_k_block`` on, to the accumulator.

        What lies behind the tile's last one belongs to another group or to nobody.
        """
        op = self.tiled_mma.op
        if cutlass.const_expr(self.scales is not None):
            for scales in self.scales:
                tiled_copy, source, target = scales.copy_into_tmem(op.cta_group)
                cute.copy(tiled_copy, source[None, None, None, None, stage], target)
        for k_block in cutlass.range_constexpr(K_BLOCKS):
            if first_k_block + k_block < tile.k_blocks:
                at = (None, None, k_block, stage)
                a, b = self.operands[0][at], self.operands[1][at]
                # The tile's first instruction overwrites what the accumulator holds. Fields of an
                # MMA are state that must not outlive this branch, so each has its own.
                tiled_mma = cute.make_tiled_mma(op)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, first_k_block + k_block > 0)
                if cutlass.const_expr(self.scales is not None):
                    sfa = self.scales[0].in_tmem()[None, None, k_block]
                    sfb = self.scales[1].in_tmem(tile.n_sf_row)[None, None, k_block]
                    cute.gemm(tiled_mma, acc, [a, sfa], [b, sfb], acc)
                else:
                    cute.gemm(tiled_mma, acc, a, b, acc)
