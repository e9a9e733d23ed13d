"""Filling of a tile whose elements the team computes, from global memory into shared memory.

The tile lies there as the loader's copies would leave it, with zeros for columns past K. Rows that
do not exist hold anything. Consecutive lanes take consecutive units of one row. If a unit takes two
16-byte chunks (fp32 elements of a 16-bit input), eight lanes have half a box each of two rows, so
that they write to all banks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.groups import indexed
from cute_kernels.device.memory import load_global, store_shared
from cute_kernels.device.ptx import in_place

from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, TileDescriptor

if TYPE_CHECKING:
    from .team import Team

#: 16-byte loads that a lane has in flight.
_LOADS = 8
#: Rows of a box after which the swizzle repeats.
_EIGHT = 8


class TileFiller:
    """Loader that computes the elements of tiles. See the module's docstring."""

    def __init__(self, maker: Any, team: Team):
        self.maker, self.team = maker, team
        #: Chunks of a unit, units of a row, and rows that the team has at once.
        self.chunks = maker.words // 4
        self.units = TILE_COLS // maker.unit
        self.rows_at_once = team.threads // self.units
        #: Rows of a lane whose loads are in flight.
        self.batch = _LOADS // maker.loads

    def unit_and_row(self, thread: Int32) -> tuple[Int32, Int32]:
        """Return the unit and the first row of a thread of the team."""
        if self.chunks == 1:
            return thread % self.units, thread // self.units
        unit = thread % 4 + thread // 8 % (self.units // 4) * 4
        return unit, thread // 4 % 2 + thread // (2 * self.units) * 2

    @cute.jit
    def fill(
        self,
        x: cute.Tensor,
        index: Any,
        tile: TileDescriptor,
        team: Int32,
        tile_address: Int32,
        table: cute.Pointer | None,
    ) -> None:
        """Compute the rows of a tile that exist, by the whole team.

        Args:
            x: Input, (R, W).
            index: (R,) int32. Rows of x, or None. For AdamW the tensors of the update.
            tile: Descriptor of the tile.
            team: Team in the CTA.
            tile_address: Shared-memory address of the tile.
            table: Table of activation factors. Optional.
        """
        unit, row = self.unit_and_row(in_place(self.team.thread(team)))
        cols = in_place(self.maker.cols(x))
        col = tile.col_tile * TILE_COLS + unit * self.maker.unit
        chunk = unit * self.chunks
        target = (
            tile_address
            + chunk // _EIGHT * BOX_SIZE
            + row * BOX_BYTES
            + (chunk ^ row) % _EIGHT * 16
        )
        rounds = (tile.num_rows + (self.rows_at_once * self.batch - 1)) // (
            self.rows_at_once * self.batch
        )
        self.team.sync(team)  # before it, a warp may still read the previous tile
        if col < cols:
            self.make_rows(x, index, tile, (target, row, col, cols), rounds, table)
        else:
            for n in cutlass.range(rounds, unroll=1):
                for i in range_constexpr(self.batch):
                    self.store(target, n, i, [Uint32(0)] * self.maker.words)
        self.team.sync(team)

    @cute.jit
    def make_rows(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        tile: TileDescriptor,
        position: tuple[Int32, ...],
        rounds: Int32,
        table: cute.Pointer | None,
    ) -> None:
        """Compute a thread's units of all rounds.

        ``position`` is the shared-memory address of the first unit, its row, its column and the
        number of columns.
        """
        target, row, col, cols = position
        sources = self.maker.sources(x, tile.first_row if index is None else Int32(0), col, cols)
        for n in cutlass.range(rounds, unroll=1):
            rows = [row + (n * self.batch + i) * self.rows_at_once for i in range(self.batch)]
            rows = [cutlass.min(r, tile.num_rows - 1) for r in rows]
            if const_expr(index is not None):
                rows = [indexed(index, tile.first_row + r, x.shape[0]) for r in rows]
            inputs = [
                [load_global(address + Int64(r) * pitch, 4) for address, pitch in sources]
                for r in rows
            ]
            for i in range_constexpr(self.batch):
                self.store(
                    target,
                    n,
                    i,
                    self.maker.make(inputs[i], True, None if table is None else table.toint()),
                )

    def store(self, target: Int32, n: Int32, i: int, words: list[Uint32]) -> None:
        """Store a lane's unit of row ``i`` of batch ``n``."""
        # The team has four or eight rows at once. So the swizzle bits of a row equal those of the
        # first row, or differ from them in the highest bit.
        turned = i * self.rows_at_once % _EIGHT * 16
        address = (target ^ turned) + (n * self.batch + i) * (self.rows_at_once * BOX_BYTES)
        for c in range(self.chunks):
            store_shared(address ^ (c * 16), words[4 * c : 4 * c + 4])
