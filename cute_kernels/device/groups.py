"""Finding groups on the device: slot tiles, their rows, and where their bytes go.

Two groupings share every kernel. Ragged groups are given by their end rows ``offs`` and lie in the
slots of ``cute_kernels.shapes.slot_tile``; uniform groups all have the same number of rows. In both
a kernel walks slot tiles in ascending order and asks what each of them holds.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cute_kernels.shapes import TILE_ROWS

__all__ = ["Grouping", "group_end", "group_start"]


@cute.jit
def group_end(offs: cute.Tensor, group: Int32, num_rows: Int32) -> Int32:
    """``offs[group]``, clamped to the buffer."""
    return cutlass.max(cutlass.min(offs[group], num_rows), Int32(0))


@cute.jit
def group_start(offs: cute.Tensor, group: Int32, num_rows: Int32) -> Int32:
    """First row of ``group``, clamped to the buffer."""
    start = Int32(0)
    if group > 0:
        start = group_end(offs, group - 1, num_rows)
    return start


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the rows of a matrix fall into groups; a trace-time object.

    Attributes:
        offs: (G,) int32 end rows, or None for uniform groups.
        num_groups: G.
        num_rows: T, the rows of the buffer.
        rows_each: rows of each uniform group; unused when ragged.
    """

    offs: cute.Tensor | None
    num_groups: Int32
    num_rows: Int32
    rows_each: Int32

    def tiles_each(self) -> Int32:
        """Slot tiles of a uniform group."""
        return (self.rows_each + (TILE_ROWS - 1)) // TILE_ROWS

    def num_tiles(self) -> Int32:
        """Slot tiles of the whole buffer."""
        if self.offs is None:
            return self.num_groups * self.tiles_each()
        return self.num_rows // TILE_ROWS + self.num_groups

    def find(self, tile: Int32, hint: Int32) -> tuple[Int32, Int32, Int32]:
        """What slot tile ``tile`` holds.

        Args:
            tile: a slot tile.
            hint: the group that an earlier, lower tile was found in, or 0.

        Returns:
            The group, the matrix row of the tile's first row, and the number of rows that the tile
            holds, at most 128. No rows means that the tile belongs to no group.
        """
        if self.offs is None:
            return _find_uniform(self.rows_each, self.tiles_each(), tile)
        return _find_ragged(self.offs, self.num_groups, self.num_rows, tile, hint)


@cute.jit
def _find_uniform(rows_each: Int32, tiles_each: Int32, tile: Int32) -> tuple[Int32, Int32, Int32]:
    group = tile // tiles_each
    first = (tile - group * tiles_each) * TILE_ROWS
    return group, group * rows_each + first, cutlass.min(rows_each - first, Int32(TILE_ROWS))


@cute.jit
def _starts_by(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, group: Int32, tile: Int32
) -> Boolean:
    """Whether ``group`` exists and its first slot tile is at or before ``tile``."""
    result = Boolean(False)
    if group < num_groups:
        result = group_start(offs, group, num_rows) // TILE_ROWS + group <= tile
    return result


@cute.jit
def _find_ragged(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, tile: Int32, hint: Int32
) -> tuple[Int32, Int32, Int32]:
    # First tiles ascend strictly with the group: gallop from the hint, then bisect. A kernel that
    # walks tiles in order pays one or two probes a tile.
    low = hint
    step = Int32(1)
    while _starts_by(offs, num_groups, num_rows, low + step, tile):
        low += step
        step += step
    high = cutlass.min(low + step, num_groups)
    while high - low > 1:
        middle = (low + high) // 2
        if _starts_by(offs, num_groups, num_rows, middle, tile):
            low = middle
        else:
            high = middle
    start = group_start(offs, low, num_rows)
    first = start + (tile - (start // TILE_ROWS + low)) * TILE_ROWS
    rows = cutlass.min(group_end(offs, low, num_rows) - first, Int32(TILE_ROWS))
    return low, first, cutlass.max(rows, Int32(0))
