"""max |x| of groups before and after the transform of the columnwise copy, from one read.

A warp takes 256 columns of a slot tile, a chunk of 16 rows at a time. A lane has 8 columns.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import absmax_packed, unpack_absmax
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor, next_item
from cute_kernels.device.hadamard import CHUNK, transform_words
from cute_kernels.device.memory import load_global_if

from .amax import AmaxKernels

_WARPS, _CTAS_PER_SM = 8, 2
_LANE_COLS = 8
_STRIP = WARP_SIZE * _LANE_COLS


class ChunkAmaxKernels(AmaxKernels):
    """Amax kernels of transformed copies, for the classes that launch them; for bf16 inputs."""

    @cute.jit
    def launch_chunk_amax(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        column_amax: cute.Tensor,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Clear the amaxes and launch ``reduce_chunks``."""
        self.launch_clear(column_amax, num_sms, stream, group_amax)
        grid, block = [num_sms * _CTAS_PER_SM, 1, 1], [_WARPS * WARP_SIZE, 1, 1]
        self.reduce_chunks(x, offs, group_amax, column_amax).launch(
            grid=grid, block=block, stream=stream
        )

    @cute.kernel
    def reduce_chunks(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        column_amax: cute.Tensor,
    ) -> None:
        """Compute amaxes of groups of x and of its transform.

        Args:
            x: (T, K) or (G, N, K) bf16; its width follows from the activation.
            offs: (G,) int32, None if uniform.
            group_amax: (G,) fp32 output for x, or None.
            column_amax: (G,) fp32 output for the transform.
        """
        cols = x.shape[len(x.shape) - 1] if self.maker is None else self.maker.cols(x)
        groups = GroupCursor.from_tensors(x, offs)
        strips = (cols + (_STRIP - 1)) // _STRIP
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP_SIZE)
        item = cute.arch.block_idx()[0] * _WARPS + warp
        step = cute.arch.grid_dim()[0] * _WARPS
        num_items = groups.num_tiles() * strips
        group = Int32(0)
        while item < num_items:
            slot_tile = item // strips
            column = (item - slot_tile * strips) * _STRIP + cute.arch.lane_idx() * _LANE_COLS
            tile, group, first_row, num_rows = groups.seek(slot_tile, group)
            if tile != slot_tile:
                item = next_item(item, step, tile, strips)
            else:
                if column >= cols:
                    num_rows = Int32(0)
                plain, transformed = self.chunks(self.sources(x, first_row, column, cols), num_rows)
                if const_expr(group_amax is not None):
                    self.merge(
                        group_amax,
                        group,
                        unpack_absmax(plain, self.dtype, self.arch, self.keeps_nan),
                    )
                self.merge(
                    column_amax,
                    group,
                    unpack_absmax(transformed, self.dtype, self.arch, self.keeps_nan),
                )
                item += step

    def sources(
        self, x: cute.Tensor, row: Int32, col: Int32, cols: Int32
    ) -> list[tuple[Int64, Int64]]:
        """Return ``ElementMaker.sources``, or those of the input if no elements are computed."""
        if self.maker is not None:
            return self.maker.sources(x, row, col, cols)
        return [(x.iterator.toint() + (Int64(row) * cols + col) * 2, Int64(cols) * 2)]

    @cute.jit
    def chunks(self, sources: list[tuple[Int64, Int64]], num_rows: Int32) -> tuple[Uint32, Uint32]:
        """Return the packed amaxes of a lane's columns in ``num_rows`` rows.

        Returns:
            The amaxes before and after the transform.
        """
        plain, transformed = Uint32(0), Uint32(0)
        for start in cutlass.range(0, num_rows, CHUNK, unroll=1):
            rows = []
            for r in range_constexpr(CHUNK):
                row = start + r
                words = [
                    load_global_if(address + pitch * row, 16, row, num_rows)
                    for address, pitch in sources
                ]
                rows.append(words[0] if self.maker is None else self.maker.make(words))
            for w in range_constexpr(_LANE_COLS // 2):
                words = [row[w] for row in rows]
                plain = absmax_packed([plain, *words], self.dtype, self.arch, self.keeps_nan)
                words = transform_words(words, self.arch)
                transformed = absmax_packed(
                    [transformed, *words], self.dtype, self.arch, self.keeps_nan
                )
        return plain, transformed
