"""A tile whose elements are made: by its team, from global memory, into shared memory.

It lies there as the loader's copies would leave it, with zeros for columns past K; rows that do not
exist hold anything. Lanes that follow each other take units of one row that follow each other.
Where a unit takes two 16-byte chunks (fp32 elements of a 16-bit input), eight lanes have half a box
each of two rows, so that they write to all banks.
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

#: 16-byte loads that a lane has under way.
_LOADS = 8
#: GatheredRows of a box after which the swizzle repeats.
_EIGHT = 8


class TileFiller:
    """Makes tiles, see the module."""

    def __init__(self, maker: Any, team: Team):
        self.maker, self.team = maker, team
        #: Chunks of a unit, units of a row, and rows that the team has at once.
        self.chunks = maker.words // 4
        self.units = TILE_COLS // maker.unit
        self.rows_at_once = team.threads // self.units
        #: GatheredRows of a lane whose loads are under way.
        self.batch = _LOADS // maker.loads

    def place(self, thread: Int32) -> tuple[Int32, Int32]:
        """The unit and the first row of a thread of the team."""
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
        tile_at: Int32,
        table: cute.Pointer | None,
    ) -> None:
        """Make the rows of a tile that exist; for the whole team."""
        unit, row = self.place(in_place(self.team.thread(team)))
        cols = in_place(self.maker.cols(x))
        col = tile.col_tile * TILE_COLS + unit * self.maker.unit
        chunk = unit * self.chunks
        to = tile_at + chunk // _EIGHT * BOX_SIZE + row * BOX_BYTES + (chunk ^ row) % _EIGHT * 16
        rounds = (tile.num_rows + (self.rows_at_once * self.batch - 1)) // (
            self.rows_at_once * self.batch
        )
        self.team.sync(team)  # until then a warp may still read the tile before
        if col < cols:
            self.make_rows(x, index, tile, (to, row, col, cols), rounds, table)
        else:
            for n in cutlass.range(rounds, unroll=1):
                for i in range_constexpr(self.batch):
                    self.store(to, n, i, [Uint32(0)] * self.maker.words)
        self.team.sync(team)

    @cute.jit
    def make_rows(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        tile: TileDescriptor,
        place: tuple[Int32, ...],
        rounds: Int32,
        table: cute.Pointer | None,
    ) -> None:
        """A thread's units;

        ``place`` is where the first goes, its row and column, and how many columns there are.
        """
        to, row, col, cols = place
        sources = self.maker.sources(x, tile.first_row if index is None else Int32(0), col, cols)
        for n in cutlass.range(rounds, unroll=1):
            rows = [row + (n * self.batch + i) * self.rows_at_once for i in range(self.batch)]
            rows = [cutlass.min(r, tile.num_rows - 1) for r in rows]
            if const_expr(index is not None):
                rows = [indexed(index, tile.first_row + r, x.shape[0]) for r in rows]
            inputs = [
                [load_global(at + Int64(r) * pitch, 4) for at, pitch in sources] for r in rows
            ]
            for i in range_constexpr(self.batch):
                self.store(
                    to,
                    n,
                    i,
                    self.maker.make(inputs[i], True, None if table is None else table.toint()),
                )

    def store(self, to: Int32, n: Int32, i: int, words: list[Uint32]) -> None:
        """A lane's unit of row ``i`` of batch ``n``."""
        # GatheredRows at once are four or eight: a row's bits of the swizzle are the first row's, or those
        # with the highest one turned.
        turned = i * self.rows_at_once % _EIGHT * 16
        place = (to ^ turned) + (n * self.batch + i) * (self.rows_at_once * BOX_BYTES)
        for c in range(self.chunks):
            store_shared(place ^ (c * 16), words[4 * c : 4 * c + 4])
