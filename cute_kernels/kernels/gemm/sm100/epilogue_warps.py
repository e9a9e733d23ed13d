"""The epilogue warps: they pass each tile to its epilogue, or write zeros."""

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr

from ..common.output_store import VECTOR_BYTES, EpilogueTensors, out_offset, vector_at
from ..common.scheduler import TileReader, WorkTile
from .config import Sm100GemmConfig
from .epilogue import Epilogue
from .epilogue_swapped import SwappedEpilogue
from .promotion import Promoter


class EpilogueWarps:
    """The four epilogue warps.

    Args:
        config: Configuration of the kernel.
        tensors: Tensors of the epilogue.
        direct: Epilogue of tiles whose operands are not swapped. None if there are none.
        swapped: Epilogue of tiles whose operands are swapped. None if there are none.
        cta_row: First row of this CTA in the tile.
        tiles: Reader of the tile records.
        promoter: Computes the sums of a tile. None if accumulators hold them.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        tensors: EpilogueTensors,
        direct: Epilogue | None,
        swapped: SwappedEpilogue | None,
        cta_row: Int32,
        tiles: TileReader,
        promoter: Promoter | None,
    ):
        self.config = config
        self.tensors = tensors
        self.direct = direct
        self.swapped = swapped
        self.cta_row = cta_row
        self.tiles = tiles
        self.promoter = promoter

    @cute.jit
    def run(self) -> None:
        """Finish all tiles of this CTA."""
        tile_shape = self.config.tile
        either = self.swapped if self.direct is None else self.direct
        tile_state, acc_state = self.tiles.new_state(), either.acc.new_state()
        stage = Int32(0)
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if tile.k_blocks == 0:
                if const_expr(self.config.writes_zeros):
                    self.store_zeros(tile)
            else:
                if const_expr(self.promoter is not None):
                    acc_state = self.promoter.run(tile, acc_state)
                if const_expr(tile_shape.swap_ab):
                    self.swapped.finish(tile, acc_state)
                elif const_expr(tile_shape.swap_partial):
                    if tile.rows < tile_shape.rows:
                        self.swapped.finish(tile, acc_state)
                    else:
                        stage = self.direct.finish(tile, acc_state, stage)
                else:
                    stage = self.direct.finish(tile, acc_state, stage)
                if const_expr(self.promoter is None):
                    acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)
        if const_expr(self.direct is not None):
            self.direct.store_pipeline.producer_tail()

    @cute.jit
    def store_zeros(self, tile: WorkTile) -> None:
        """Store zeros for this CTA's rows of a tile. They do not depend on the factors."""
        out, config = self.tensors.out, self.config
        z = self.tensors.z
        row, col, rows = tile.m_row, tile.n_row, tile.rows
        if const_expr(config.tile.swap_ab):
            row, col = tile.n_row, tile.m_row
            rows = cutlass.min(rows, config.tile.n)
            num_cols = config.tile.m
        else:
            row += self.cta_row
            if const_expr(config.grouping == "k_grouped"):
                rows = out.shape[1] - row
            else:
                rows -= self.cta_row
            rows = cutlass.min(rows, 128)
            num_cols = config.tile.n
        halves = 1 + config.is_gated
        blocks = [(out, col // halves, num_cols // halves, out.shape[2])]
        if const_expr(z is not None and config.interleaves_halves):
            blocks.append((z, *blocks[0][1:]))
            blocks.append((z, col // 2 + out.shape[2], num_cols // 2, z.shape[2]))
        elif const_expr(z is not None):
            blocks.append((z, col, num_cols, z.shape[2]))
        for i in range_constexpr(len(blocks)):
            self.zero(*blocks[i], tile.group, row, rows)

    @cute.jit
    def zero(
        self,
        x: cute.Tensor,
        col: Int32,
        num_cols: int,
        end: Int32,
        group: Int32,
        row: Int32,
        rows: Int32,
    ) -> None:
        """Store zeros in ``num_cols`` columns, from ``col`` up to ``end``, of ``rows`` rows."""
        per_vector = VECTOR_BYTES * 8 // x.element_type.width
        lanes = num_cols // per_vector
        zeros = cute.make_rmem_tensor(per_vector, x.element_type)
        zeros.fill(0.0)
        thread = cute.arch.thread_idx()[0]
        col += thread % lanes * per_vector
        if col < end:
            for i in cutlass.range(thread // lanes, rows, 128 // lanes, unroll=1):
                offset = out_offset(self.config, x, group, row + i, col)
                cute.autovec_copy(zeros, vector_at(x, offset, per_vector))
