"""Accumulators on their way out of tensor memory."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from .config import Sm100GemmConfig


class AccReader:
    """Reader of the accumulators that a warp may reach, 32 rows, by blocks of columns.

    Two accumulators of 256 columns and the block scales do not fit in tensor memory; then they
    overlap. The first is read from its last block down and the second from its first block up, so
    that the MMA warp may have the columns they share after the first few blocks.

    Args:
        config: Configuration of the kernel.
        acc: Accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        columns: Columns of a block.
        load: The load instruction. It decides which elements of a block a thread gets.
        acc_pipeline: Pipeline of the accumulators.
        is_partial: Read partial sums in kernels that promote; otherwise the promoted sums are read.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        acc: cute.Tensor,
        columns: int,
        load: Any,
        acc_pipeline: pipeline.PipelineUmmaAsync,
        is_partial: bool = False,
    ):
        #: Accumulator in which this warp has put the promoted sums, or None if it reads the MMA's.
        self.promoted_stage = config.num_acc_stage if config.promotes and not is_partial else None
        self.overlap = config.acc_overlap
        self.columns = columns
        self.shared_blocks = (config.acc_overlap + columns - 1) // columns
        self.acc_pipeline = acc_pipeline
        # (rows, columns, blocks, STAGE), then by thread (T2R, T2R_M, T2R_N, blocks, STAGE)
        blocks = cute.flat_divide(acc[((None, None), 0, 0, None)], (128, columns))
        blocks = blocks[None, None, 0, None, None]
        self.copy = tcgen05.make_tmem_copy(
            cute.make_copy_atom(load, Float32), blocks[None, None, 0, 0]
        )
        self.thread_copy = self.copy.get_slice(cute.arch.thread_idx()[0])
        self.blocks = self.thread_copy.partition_S(blocks)
        identity = cute.make_identity_tensor((128, columns))
        self.shape = self.thread_copy.partition_D(identity).shape

    def new_state(self) -> pipeline.PipelineState:
        """Return the state of a reader at the first accumulator."""
        return pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.acc_pipeline.num_stages
        )

    @cute.jit
    def wait(self, state: pipeline.PipelineState) -> None:
        """Wait for the accumulator at ``state``."""
        if const_expr(self.promoted_stage is None):
            self.acc_pipeline.consumer_wait(state)

    @cute.jit
    def block_at(self, step: Int32, num_blocks: Int32, state: pipeline.PipelineState) -> Int32:
        """Return the block to read in the ``step``-th step of ``num_blocks``."""
        block = step
        if const_expr(self.overlap > 0):
            if state.phase == 0:
                block = num_blocks - 1 - step
        return block

    @cute.jit
    def read(self, step: Int32, num_blocks: Int32, state: pipeline.PipelineState) -> cute.Tensor:
        """Return this thread's elements of the ``step``-th block.

        The accumulator is freed for the MMA warp as soon as it may be overwritten.
        """
        values = cute.make_rmem_tensor(self.shape, Float32)
        stage = state.phase if const_expr(self.overlap > 0) else state.index
        if const_expr(self.promoted_stage is not None):
            stage = self.promoted_stage
        # Lanes may have diverged at the last block; a load needs all lanes of the warp.
        cute.arch.sync_warp()
        block = self.block_at(step, num_blocks, state)
        cute.copy(self.copy, self.blocks[None, None, None, block, stage], values)
        cute.arch.fence_view_async_tmem_load()
        last_block = num_blocks
        if const_expr(self.overlap > 0):
            last_block = cutlass.min(Int32(self.shared_blocks), num_blocks)
        if const_expr(self.promoted_stage is None):
            if step == last_block - 1:
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.acc_pipeline.consumer_release(state)
        return cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
