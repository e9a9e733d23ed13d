"""Accumulators on their way out of tensor memory."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from .config import Sm100GemmConfig


class AccReader:
    """Reads the part of the accumulators that a warp may reach, 32 rows, by blocks of columns.

    Two accumulators of 256 columns and the block scales do not fit in tensor memory; they overlap
    then. The first is read from its last block down and the second from its first block up, so that
    the MMA warp may have the columns they share after the first few blocks.

    Args:
        acc: accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        load: the instruction; it decides which elements of a block a thread gets.
        is_partial: of kernels that promote, partial sums are read, otherwise the sums.
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
        #: Where the warp that reads has put what it reads.
        self.own = config.num_acc_stage if config.promotes and not is_partial else None
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
        whole = cute.make_identity_tensor((128, columns))
        self.shape = self.thread_copy.partition_D(whole).shape

    def new_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.acc_pipeline.num_stages
        )

    @cute.jit
    def wait(self, state: pipeline.PipelineState) -> None:
        if const_expr(self.own is None):
            self.acc_pipeline.consumer_wait(state)

    @cute.jit
    def block_at(self, step: Int32, num_blocks: Int32, state: pipeline.PipelineState) -> Int32:
        """The block of ``num_blocks`` to read in the ``step``-th place."""
        block = step
        if const_expr(self.overlap > 0):
            if state.phase == 0:
                block = num_blocks - 1 - step
        return block

    @cute.jit
    def read(self, step: Int32, num_blocks: Int32, state: pipeline.PipelineState) -> cute.Tensor:
        """This thread's elements of the ``step``-th block.

        Frees the accumulator for the MMA warp as soon as it may be overwritten.
        """
        values = cute.make_rmem_tensor(self.shape, Float32)
        stage = state.phase if const_expr(self.overlap > 0) else state.index
        if const_expr(self.own is not None):
            stage = self.own
        # Lanes may have parted ways over the last block; a load takes the whole warp.
        cute.arch.sync_warp()
        block = self.block_at(step, num_blocks, state)
        cute.copy(self.copy, self.blocks[None, None, None, block, stage], values)
        cute.arch.fence_view_async_tmem_load()
        last = num_blocks
        if const_expr(self.overlap > 0):
            last = cutlass.min(Int32(self.shared_blocks), num_blocks)
        if const_expr(self.own is None):
            if step == last - 1:
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.acc_pipeline.consumer_release(state)
        return cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
