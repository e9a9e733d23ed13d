"""Promotion: sums of 128 products from tensor memory to fp32 registers, times fp32 block scales.

  y = fma(fl(partial * s), t, y)        see ``reference.dots``

The MMA warp starts a new accumulator every 128 of K. The epilogue warps add them up, one row per
thread, and put the sums where the epilogue finds the accumulator of other products. Scales are read
from global memory, a block of K ahead. Scales of columns, which every thread needs, go through
shared memory.
"""

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline, range_constexpr
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits

from ..common.promotion_scales import scale_at
from ..common.scheduler import WorkTile
from .accumulators import AccReader
from .config import Sm100GemmConfig

#: Columns that are read from tensor memory at a time.
_COLUMNS = 32
#: Scales of columns that are read from shared memory at a time.
_VECTOR = 4


class Promoter:
    """Promotion of the partial sums of the 32 rows of a warp.

    Args:
        config: Configuration of the kernel.
        scales: Scales of operands M and N, (rows or squares, blocks along K, groups) fp32.
        acc: Accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE), the sums' last.
        staged: Shared memory for scales of columns. None if absent.
        cta_row: First row of this CTA in the tile.
        acc_pipeline: Pipeline of the accumulators.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        scales: tuple[cute.Tensor, cute.Tensor],
        acc: cute.Tensor,
        staged: cute.Pointer | None,
        cta_row: Int32,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.config = config
        self.scales = scales
        self.acc_pipeline = acc_pipeline
        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(_COLUMNS))
        self.partial = AccReader(config, acc, _COLUMNS, load, acc_pipeline, is_partial=True)
        self.columns = config.tile.n
        blocks = cute.flat_divide(acc[((None, None), 0, 0, None)], (128, _COLUMNS))
        self.total = blocks[None, None, 0, None, config.num_acc_stage]
        store = tcgen05.St32x32bOp(tcgen05.Repetition(_COLUMNS))
        self.store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(store, Float32), self.total[None, None, 0]
        )
        self.lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.row = cta_row + warp * WARP_SIZE + self.lane
        if staged is not None:
            self.staged = staged.toint() + warp * (2 * self.columns * 4)
        self.has_rows, self.has_columns = config.row_scales
        #: True if s is the scale of rows of operand M.
        self.m_is_first = self.has_rows and not (config.tile.swap_ab and self.has_columns)

    def groups(self, tile: WorkTile) -> tuple[Int32 | None, Int32 | None]:
        """Return the groups of the scales of operands M and N, or None if rows contain them."""
        if self.config.grouping == "k_grouped":
            return None, None
        return (tile.group, None) if self.config.tile.swap_ab else (None, tile.group)

    def row_scale(self, tile: WorkTile, block: Int32) -> Float32:
        """Return the scale of this thread's row in a block of K."""
        row = tile.m_sf_row + self.row
        if not self.has_rows:
            row = (
                self.square(0, row)
                if self.config.tile.swap_ab
                else row // self.config.kind.sf_vec_size
            )
        return scale_at(self.scales[0], row, block, self.groups(tile)[0])

    def square(self, side: int, row: Int32) -> Int32:
        """Return the square of a row of B, operand M (side 0) or N (side 1).

        The rows of a tile may alternate between two halves.
        """
        size = self.config.kind.sf_vec_size
        if not self.config.interleaves_halves:
            return row // size
        return row // 2 // size + row % 2 * (self.scales[side].shape[0] // 2)

    def column_scales(self, tile: WorkTile, block: Int32) -> list[Float32]:
        """Return this lane's share of the scales of columns in a block of K.

        If all columns share a scale, it is that scale; if they alternate between two halves, it is
        both.
        """
        scales, group = self.scales[1], self.groups(tile)[1]
        if not self.has_columns:
            squares = (
                self.square(1, tile.n_sf_row + i) for i in range(1 + self.config.interleaves_halves)
            )
            return [scale_at(scales, square, block, group) for square in squares]
        first_row = tile.n_sf_row + self.lane
        return [
            scale_at(scales, first_row + i, block, group) for i in range(0, self.columns, WARP_SIZE)
        ]

    @cute.jit
    def run(self, tile: WorkTile, state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Promote the partial sums of a tile and return the next state."""
        k_tiles = tile.k_tiles(self.config)
        block = tile.k_start // self.config.mma_tiler_mnk[2]
        live = Int32(self.columns)
        if const_expr(self.config.tile.swap_ab):
            live = cutlass.min(tile.rows, self.columns)
        num_blocks = (live + (_COLUMNS - 1)) // _COLUMNS
        sums = cute.make_rmem_tensor(self.columns, Float32)
        sums.fill(0.0)
        count = 1 + self.config.interleaves_halves
        if const_expr(self.has_columns):
            count = self.columns // WARP_SIZE
        columns = cute.make_rmem_tensor(count, Float32)
        self.fill(columns, self.column_scales(tile, block))
        row = self.row_scale(tile, block)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            m, n, buffer = row, [columns[i % count] for i in range(_VECTOR)], Int32(0)
            if const_expr(self.has_columns):
                buffer = self.staged + k_tile % 2 * (self.columns * 4)
                for i in range_constexpr(count):
                    address = buffer + (i * WARP_SIZE + self.lane) * 4
                    store_shared(address, [f32_as_bits(columns[i])])
                cute.arch.sync_warp()
            row = self.row_scale(tile, block + k_tile + 1)
            self.fill(columns, self.column_scales(tile, block + k_tile + 1))
            self.acc_pipeline.consumer_wait(state)
            for index in range_constexpr(self.columns // _COLUMNS):
                if index < num_blocks:
                    values = self.partial.read(Int32(index), num_blocks, state)
                    self.add(sums, values, index * _COLUMNS, m, n, buffer)
            state.advance()
        self.put(sums)
        return state

    def fill(self, target: cute.Tensor, values: list[Float32]) -> None:
        """Copy values into registers."""
        for i, value in enumerate(values):
            target[i] = value

    def add(
        self,
        sums: cute.Tensor,
        values: cute.Tensor,
        first_column: int,
        m: Float32,
        n: list[Float32],
        buffer: Int32,
    ) -> None:
        """Add partial sums of the columns from ``first_column`` on, times both scales."""
        for i in range(0, _COLUMNS, _VECTOR):
            column_scales = n
            if self.has_columns:
                words = load_shared(buffer + (first_column + i) * 4, _VECTOR)
                column_scales = [bits_as_f32(word) for word in words]
            for j in range(0, _VECTOR, 2):
                factors = (m, m), (column_scales[j], column_scales[j + 1])
                s, t = factors if self.m_is_first else factors[::-1]
                index = first_column + i + j
                pair = values[i + j], values[i + j + 1]
                pair = cute.arch.mul_packed_f32x2(pair, s, rnd="rn")
                total = sums[index], sums[index + 1]
                sums[index], sums[index + 1] = cute.arch.fma_packed_f32x2(pair, t, total, rnd="rn")

    @cute.jit
    def put(self, sums: cute.Tensor) -> None:
        """Store the sums in tensor memory."""
        thread = self.store.get_slice(cute.arch.thread_idx()[0])
        identity = cute.make_identity_tensor((128, _COLUMNS))
        shape = thread.partition_S(identity).shape
        cute.arch.sync_warp()
        for block in range_constexpr(self.columns // _COLUMNS):
            source = cute.make_tensor(sums.iterator + block * _COLUMNS, cute.make_layout(shape))
            target = thread.partition_D(self.total[None, None, block])
            cute.copy(self.store, source, target)
        cute.arch.fence_view_async_tmem_store()
