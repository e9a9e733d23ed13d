"""The consumer warpgroups: warpgroup MMA over the stages, then the epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.gemm.hopper.config import INSTRUCTION_K, STAGE_K
from cute_kernels.gemm.hopper.decode import FragmentDecoder
from cute_kernels.gemm.hopper.warp_schedule import WARPGROUP_SIZE

if TYPE_CHECKING:
    from cute_kernels.gemm.hopper.config import HopperGemmConfig
    from cute_kernels.gemm.hopper.epilogue import HopperEpilogue
    from cute_kernels.gemm.hopper.storage import HopperLayouts
    from cute_kernels.gemm.scheduler import TileReader, WorkTile

__all__ = ["Consumer"]

_BLOCKS = STAGE_K // INSTRUCTION_K


class Consumer:
    """A consumer warpgroup.

    Args:
        config: the kernel's configuration.
        layouts: its layouts.
        stages: stages of operand M, of its block scales or None, and of operand N.
        tiles: the tile records.
        ab_pipeline: the stages.
        epilogue: what becomes of the accumulators.
    """

    def __init__(
        self,
        config: HopperGemmConfig,
        layouts: HopperLayouts,
        stages: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor],
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaAsync,
        epilogue: HopperEpilogue,
    ):
        self.config = config
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.epilogue = epilogue
        self.tiled_mma = layouts.tiled_mma
        self.tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_SIZE)
        threads = cute.make_layout(config.consumers, stride=WARPGROUP_SIZE)
        thread = layouts.tiled_mma.get_slice(threads(group))
        operand_m, scales, operand_n = stages
        self.n = layouts.tiled_mma.make_fragment_B(thread.partition_B(operand_n))
        shape = thread.partition_shape_C((config.tile.m, config.tile.n))
        self.acc = cute.make_rmem_tensor(shape, Float32)
        if config.is_decoded:
            self.decoder = FragmentDecoder(config, operand_m, scales)
            shape = thread.partition_shape_A((config.tile.m, INSTRUCTION_K))
            self.fragments = [cute.make_rmem_tensor(shape, layouts.element) for _ in range(2)]
        else:
            self.m = layouts.tiled_mma.make_fragment_A(thread.partition_A(operand_m))

    @cute.jit
    def run(self) -> None:
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            self.acc.fill(0.0)
            ab_state = self.multiply(tile, ab_state)
            self.epilogue.store(self.acc, tile)
            tile, tile_state = self.tiles.next(tile_state)

    @cute.jit
    def multiply(self, tile: WorkTile, state: Any) -> Any:
        """Add the tile's products to the accumulators; the next state of the stages.

        A stage is freed when the first instructions of the next one are under way: those before
        them have completed then.
        """
        done = state.clone()
        k_tiles = (tile.k_blocks + (_BLOCKS - 1)) // _BLOCKS
        for k_tile in cutlass.range(k_tiles, unroll=1):
            self.ab_pipeline.consumer_wait(state)
            if cutlass.const_expr(self.config.is_decoded):
                words, scales = self.decoder.load_words(state.index)
                for block in cutlass.range_constexpr(_BLOCKS):
                    self.multiply_block(words, scales, block, state.index)
                    if cutlass.const_expr(block == 0):
                        if k_tile > 0:
                            self.ab_pipeline.consumer_release(done)
                            done.advance()
            else:
                warpgroup.fence()
                for block in cutlass.range_constexpr(_BLOCKS):
                    at = (None, None, block, state.index)
                    cute.gemm(self.tiled_mma, self.acc, self.m[at], self.n[at], self.acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k_tile > 0:
                    self.ab_pipeline.consumer_release(done)
                    done.advance()
            state.advance()
        warpgroup.wait_group(0)
        if k_tiles > 0:
            self.ab_pipeline.consumer_release(done)
        return state

    @cute.jit
    def multiply_block(self, words: list, scales: list, block: int, stage: Int32) -> None:
        """Decode operand M of one block of K while the block before is multiplied."""
        fragment = self.fragments[block % 2]
        bits = cute.recast_tensor(fragment, Uint32)
        repeats = self.decoder.repeats
        target = cute.make_tensor(bits.iterator, cute.make_layout((4, repeats)))
        self.decoder.decode(target, words, scales, block)
        warpgroup.fence()
        at = (None, None, block, stage)
        a = fragment[None, None, 0]
        cute.gemm(self.tiled_mma, self.acc, a, self.n[at], self.acc)
        warpgroup.commit_group()
        # The fragment of the block before is free again.
        warpgroup.wait_group(1)
