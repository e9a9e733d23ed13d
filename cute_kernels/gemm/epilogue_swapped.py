"""The epilogue of swapped operands: a thread owns one column of the output, for few rows a group.

The arithmetic is that of ``epilogue``. Here the factors of rows lie along the accumulator's
columns: each lane folds one of 32 and the warp passes them around. The 32 lanes of a warp store 32
columns of one output row together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cute_kernels.gemm.epilogue import AccReader, EpilogueTensors, pairwise
from cute_kernels.gemm.scheduler import TileReader, WorkTile
from cute_kernels.gemm.warp_schedule import WARP_SIZE

if TYPE_CHECKING:
    from cutlass import pipeline

    from cute_kernels.gemm.config import GemmConfig

__all__ = ["SwappedEpilogue"]


class SwappedEpilogue:
    """The four epilogue warps.

    Args:
        config: the kernel's configuration.
        tensors: what is read and written in global memory.
        acc: accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        tiles: the tile records.
        acc_pipeline: the accumulators.
    """

    def __init__(
        self,
        config: GemmConfig,
        tensors: EpilogueTensors,
        acc: cute.Tensor,
        tiles: TileReader,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.config = config
        self.tensors = tensors
        self.tiles = tiles
        self.acc = AccReader(config, acc, WARP_SIZE, acc_pipeline)
        self.lane = cute.arch.lane_idx()

    @cute.jit
    def run(self) -> None:
        tile_state, acc_state = self.tiles.new_state(), self.acc.new_state()
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            col = tile.m_row + cute.arch.thread_idx()[0]
            in_output = col < self.tensors.out.shape[2]
            bias = Float32(0.0)
            if cutlass.const_expr(self.tensors.bias is not None):
                if in_output and tile.k_blocks > 0:
                    bias = self.tensors.bias[tile.group, col].to(Float32)
            if tile.k_blocks > 0:
                self.acc.acc_pipeline.consumer_wait(acc_state)
            for step in cutlass.range(self.acc.num_blocks, unroll=1):
                values = self.acc.read(step, acc_state, tile.k_blocks == 0)
                first = step * WARP_SIZE
                if first < tile.rows:
                    if tile.k_blocks > 0:
                        self.rescale(values, tile, first)
                    self.store(values, tile, first, col, in_output, bias)
            if tile.k_blocks > 0:
                acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)

    @cute.jit
    def rescale(self, values: cute.Tensor, tile: WorkTile, first: Int32) -> None:
        """Multiply rows ``first`` to ``first + 31`` of the tile by their factors."""
        if cutlass.const_expr(self.tensors.has_factor):
            factor = Float32(1.0)
            if first + self.lane < tile.rows:
                row = tile.n_row + first + self.lane
                at = row if cutlass.const_expr(self.config.row_scaled) else tile.group
                factor = self.tensors.factor(tile.group, at)
            cute.arch.sync_warp()
            factors = cute.make_rmem_tensor(WARP_SIZE, Float32)
            for i in cutlass.range_constexpr(WARP_SIZE):
                factors[i] = cute.arch.shuffle_sync(factor, i)
            pairwise(cute.arch.mul_packed_f32x2, values, factors)

    @cute.jit
    def store(
        self,
        values: cute.Tensor,
        tile: WorkTile,
        first: Int32,
        col: Int32,
        in_output: Boolean,
        bias: Float32,
    ) -> None:
        """Add to rows ``first`` to ``first + 31`` of the tile's column, cast and store them."""
        out = self.tensors.out
        terms = cute.make_rmem_tensor(WARP_SIZE, Float32)
        if cutlass.const_expr(self.tensors.bias is not None):
            terms.fill(bias)
            pairwise(cute.arch.add_packed_f32x2, values, terms)
        offset = Int64(tile.n_row + first) * out.stride[1] + col
        column = cute.make_tensor(
            out.iterator + offset, cute.make_layout(WARP_SIZE, stride=out.stride[1])
        )
        if cutlass.const_expr(self.config.accumulate):
            terms.fill(0.0)
            for i in cutlass.range_constexpr(WARP_SIZE):
                if in_output and first + i < tile.rows:
                    terms[i] = column[i].to(Float32)
            pairwise(cute.arch.add_packed_f32x2, values, terms)
        rounded = cute.make_rmem_tensor(WARP_SIZE, out.element_type)
        rounded.store(values.load().to(out.element_type))
        for i in cutlass.range_constexpr(WARP_SIZE):
            if in_output and first + i < tile.rows:
                column[i] = rounded[i]
