"""Column sums of groups in a fixed order, from one read of the rows that exist.

The order is that of ``cute_kernels.reference.reductions.grouped_dbias``: a binary tree over the 128
rows of a tile, row i with row i + 64 first, and the tiles of a group one after another. A lane has
the rows of one residue class, so it computes the upper levels of the tree alone. The last levels
are exchanges within the warp. The exchanges add the same two numbers in both lanes, and the order
of two operands does not matter.

A work item is one group and one strip of columns, 128 bytes of a row. The warps of a CTA take
consecutive tiles of the group at the same time and leave their sums in shared memory, where one
thread per column adds them in order. So a group keeps at most N / 64 CTAs busy (for bf16; N / 32
for fp32), however many rows it has: few groups of few columns do not fill the GPU. Splitting a
group over CTAs would pass the sums of its tiles through global memory.

Buffers:   sums of a round, one row per warp, in two buffers. A barrier of the CTA separates the
           writers of a round from its readers; the barrier of the next round frees the buffer.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import unpack_words
from cute_kernels.device.groups import group_end, group_start
from cute_kernels.device.launch import DSL_TYPES, GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, load_shared, store_global, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits
from cute_kernels.layout.slots import TILE_ROWS

from .config import DTYPE_BYTES
from .pass_config import DbiasConfig

_WARPS = 4
#: Rows that a lane loads before it adds any.
_BATCH = 16


class DbiasReducer(GridKernel):
    """Kernel of the column sums of ragged groups. See the module's docstring."""

    ctas_per_sm, num_threads = 4, _WARPS * WARP_SIZE

    def __init__(self, config: DbiasConfig):
        self.dtype = config.dtype
        self.columns = config.columns_per_lane
        self.lanes_per_row = 8 if config.vectorized else WARP_SIZE
        #: Residue classes of rows: lanes that share a column.
        self.classes = WARP_SIZE // self.lanes_per_row
        #: Columns of an item.
        self.strip = self.lanes_per_row * self.columns

    @staticmethod
    def fake_args(config: DbiasConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``DbiasConfig.kernel``."""
        element = DTYPE_BYTES[config.dtype]
        rows, groups = cute.sym_int(), cute.sym_int()
        cols = cute.sym_int(divisibility=config.columns_per_lane)
        return (
            compact(DSL_TYPES[config.dtype], rows, cols, align=config.columns_per_lane * element),
            compact(Int32, groups, align=4),
            compact(Float32, groups, cols, align=4),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(self, dy: cute.Tensor, offs: cute.Tensor, dbias: cute.Tensor) -> None:
        """Compute the column sums.

        Args:
            dy: (T, N).
            offs: (G,) int32.
            dbias: (G, N) fp32 output.
        """
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_array(Float32, 2 * _WARPS * self.strip, byte_alignment=16).toint()
        num_rows, cols = dy.shape[0], dbias.shape[1]
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(tid // WARP_SIZE)
        strips = (cols + self.strip - 1) // self.strip
        buffer = Int32(0)
        first_item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for item in cutlass.range(first_item, offs.shape[0] * strips, step, unroll=1):
            group = item // strips
            column = (item - group * strips) * self.strip
            row = group_start(offs, group, num_rows)
            end = group_end(offs, group, num_rows)
            total = Float32(0.0)
            while row < end:
                base = sums + buffer * (4 * _WARPS * self.strip)
                first_row = row + warp * TILE_ROWS
                self.store_tile(dy, cols, base, first_row, end, column, warp)
                cute.arch.sync_threads()
                if tid < self.strip:
                    # Tiles past the end of the group are zeros, which change nothing.
                    for w in range_constexpr(_WARPS):
                        address = base + (w * self.strip + tid) * 4
                        total += bits_as_f32(load_shared(address, 1)[0])
                buffer ^= 1
                row += _WARPS * TILE_ROWS
            if tid < self.strip:
                if column + tid < cols:
                    address = Int64(group) * cols + column + tid
                    store_global(dbias.iterator.toint() + address * 4, [f32_as_bits(total)])

    @cute.jit
    def store_tile(
        self,
        dy: cute.Tensor,
        cols: Int32,
        base: Int32,
        row: Int32,
        end: Int32,
        column: Int32,
        warp: Int32,
    ) -> None:
        """Write the column sums of a warp's tile to its row of the buffer at address ``base``."""
        lane = cute.arch.lane_idx()
        totals = cute.make_rmem_tensor(self.columns, Float32)
        totals.fill(0.0)
        if row < end:
            lane_column = column + lane % self.lanes_per_row * self.columns
            row += lane // self.lanes_per_row
            if lane_column >= cols:
                end = Int32(0)  # no loads
            pitch = Int64(cols) * DTYPE_BYTES[self.dtype]
            address = dy.iterator.toint() + row * pitch + lane_column * DTYPE_BYTES[self.dtype]
            numbers = self.tree(address, pitch, row, end, 0, self.classes)
            for c in range_constexpr(self.columns):
                number = numbers[c]
                lanes = WARP_SIZE // 2
                while lanes >= self.lanes_per_row:
                    number += cute.arch.shuffle_sync_bfly(number, lanes)
                    lanes //= 2
                totals[c] = number
        if lane < self.lanes_per_row:
            address = base + (warp * self.strip + lane * self.columns) * 4
            for c in range_constexpr(0, self.columns, 4):
                count = min(4, self.columns)
                store_shared(address + c * 4, [f32_as_bits(totals[c + i]) for i in range(count)])

    def tree(
        self, address: Int64, pitch: Int64, row: Int32, end: Int32, first_row: int, step: int
    ) -> list[Float32]:
        """Return sums over rows of the tile, one per column.

        The rows are ``first_row``, ``first_row + step``, ..., counted from the lane's first row at
        global address ``address``. Rows from ``end`` on are zeros.
        """
        if TILE_ROWS // step > _BATCH:
            return _elementwise_sum(
                *(
                    self.tree(address, pitch, row, end, start, 2 * step)
                    for start in (first_row, first_row + step)
                )
            )
        num_bytes, offsets = (
            self.columns * DTYPE_BYTES[self.dtype],
            range(first_row, TILE_ROWS, step),
        )
        loaded = [load_global_if(address + pitch * i, num_bytes, row + i, end) for i in offsets]
        rows = [unpack_words(words, self.dtype)[: self.columns] for words in loaded]
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [_elementwise_sum(rows[i], rows[i + half]) for i in range(half)]
        return rows[0]


def _elementwise_sum(a: list[Float32], b: list[Float32]) -> list[Float32]:
    """Return the elementwise sum."""
    return [x + y for x, y in zip(a, b, strict=True)]
