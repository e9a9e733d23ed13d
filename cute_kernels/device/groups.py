"""Groups on the device: slot tiles, their rows, and the positions of their bytes.

Every kernel supports two groupings. Ragged groups are given by their end rows ``offs`` and lie in
the slots of ``layout.slots.slot_tile``. Uniform groups all have the same number of rows. In both, a
kernel walks slot tiles in ascending order and asks for the rows of each tile.
"""

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..layout.slots import TILE_ROWS
from .constants import WARP_SIZE


@cute.jit
def indexed(index: cute.Tensor, row: Int32, num_rows: Int32) -> Int32:
    """Return ``index[row]``, clamped to a matrix of ``num_rows`` rows."""
    return cutlass.max(cutlass.min(index[row], num_rows - 1), Int32(0))


@cute.jit
def group_end(offs: cute.Tensor, group: Int32, num_rows: Int32) -> Int32:
    """Return ``offs[group]``, clamped to the buffer."""
    return cutlass.max(cutlass.min(offs[group], num_rows), Int32(0))


@cute.jit
def group_start(offs: cute.Tensor, group: Int32, num_rows: Int32) -> Int32:
    """Return the first row of ``group``, clamped to the buffer."""
    start = Int32(0)
    if group > 0:
        start = group_end(offs, group - 1, num_rows)
    return start


@dataclasses.dataclass(frozen=True)
class GroupCursor:
    """Division of the rows of a matrix into groups, as a trace-time object.

    Attributes:
        offs: (G,) int32 end rows, or None for uniform groups.
        num_groups: Number of groups, G.
        num_rows: Rows of the buffer, T.
        rows_per_group: Rows of a uniform group.
    """

    offs: cute.Tensor | None
    num_groups: Int32
    num_rows: Int32
    rows_per_group: Int32

    @classmethod
    def from_tensors(
        cls, x: cute.Tensor, offs: cute.Tensor | None, index: cute.Tensor | None = None
    ) -> "GroupCursor":
        """Return the groups of a tensor.

        Args:
            x: (T, K) with offs, or (G, N, K) without.
            offs: (G,) int32 end rows, or None.
            index: (T,) int32 if the rows of the groups are gathered from x.
        """
        if offs is None:
            return cls(None, x.shape[0], x.shape[0] * x.shape[1], x.shape[1])
        return cls(offs, offs.shape[0], (x if index is None else index).shape[0], Int32(0))

    def tiles_per_group(self) -> Int32:
        """Return the slot tiles of a uniform group."""
        return (self.rows_per_group + (TILE_ROWS - 1)) // TILE_ROWS

    def num_tiles(self) -> Int32:
        """Return the slot tiles of the buffer."""
        if self.offs is None:
            return self.num_groups * self.tiles_per_group()
        return self.num_rows // TILE_ROWS + self.num_groups

    def used_tiles(self) -> Int32:
        """Return an upper bound of the slot tiles up to the last one that holds rows.

        The bound is at most ``num_tiles()``.
        """
        if self.offs is None:
            return self.num_tiles()
        return self.end_row() // TILE_ROWS + self.num_groups

    def locate(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """Find the rows of a slot tile before ``used_tiles()``.

        Returns:
            Its group, the matrix row of its first row, and the number of its rows: at most 128, and
                not above 0 if there are none.
        """
        if self.offs is None:
            return _seek_uniform(self.rows_per_group, self.tiles_per_group(), tile)[1:]
        return _locate_ragged(self.offs, self.num_groups, self.num_rows, tile)

    def locate_in_warp(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """Return ``locate`` of one tile for all lanes of a warp; for ragged groups."""
        return _locate_in_warp(self.offs, self.num_groups, self.num_rows, tile)

    def seek(self, tile: Int32, hint: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Find the first slot tile at or after ``tile`` that holds rows.

        Args:
            tile: Slot tile.
            hint: Group of an earlier, lower tile, or 0.

        Returns:
            The tile, its group, the matrix row of its first row, and the number of its rows, 1 to
            128. Past the last group the tile is ``num_tiles()`` and the other numbers mean nothing.
        """
        if self.offs is None:
            return _seek_uniform(self.rows_per_group, self.tiles_per_group(), tile)
        return _seek_ragged(self.offs, self.num_groups, self.num_rows, tile, hint)

    def tile_span(self, group: Int32) -> tuple[Int32, Int32, Int32]:
        """Return the first tile of a group, its first row and the row after its last."""
        if self.offs is None:
            start = group * self.rows_per_group
            return group * self.tiles_per_group(), start, start + self.rows_per_group
        start = group_start(self.offs, group, self.num_rows)
        end = group_end(self.offs, group, self.num_rows)
        return start // TILE_ROWS + group, start, end

    def end_row(self) -> Int32:
        """Return the end of the last group. The rows from there on are the tail."""
        if self.offs is None:
            return self.num_rows
        return group_end(self.offs, self.num_groups - 1, self.num_rows)

    def group_of_row(self, row: Int32, hint: Int32) -> tuple[Int32, Int32]:
        """Return the group of a row before ``end_row()``, and the end row of the group.

        ``hint`` is a group that is not after the result, such as 0.
        """
        if self.offs is None:
            group = row // self.rows_per_group
            return group, (group + 1) * self.rows_per_group
        return _group_of_ragged_row(self.offs, self.num_groups, self.num_rows, row, hint)

    def local_tile(self, tile: Int32, group: Int32) -> Int32:
        """Return the position of a tile among those that share a transposed matrix.

        All ragged groups share one matrix; each uniform group has its own.
        """
        if self.offs is None:
            return tile - group * self.tiles_per_group()
        return tile


@cute.jit
def _seek_uniform(
    rows_per_group: Int32, tiles_per_group: Int32, tile: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """Return ``GroupCursor.seek`` of uniform groups."""
    group = tile // tiles_per_group
    first_row = (tile - group * tiles_per_group) * TILE_ROWS
    num_rows = cutlass.min(rows_per_group - first_row, Int32(TILE_ROWS))
    return tile, group, group * rows_per_group + first_row, num_rows


@cute.jit
def _starts_at_or_before(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, group: Int32, tile: Int32
) -> Boolean:
    """Return True if ``group`` exists and its first slot tile is at or before ``tile``."""
    result = Boolean(False)
    if group < num_groups:
        result = group_start(offs, group, num_rows) // TILE_ROWS + group <= tile
    return result


@cute.jit
def _seek_ragged(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, tile: Int32, hint: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """Return ``GroupCursor.seek`` of ragged groups."""
    # First tiles ascend strictly with the group: gallop from the hint, then bisect. A kernel that
    # walks tiles in order pays one or two probes per tile.
    group = hint
    step = Int32(1)
    while _starts_at_or_before(offs, num_groups, num_rows, group + step, tile):
        group += step
        step += step
    high = cutlass.min(group + step, num_groups)
    while high - group > 1:
        middle = (group + high) // 2
        if _starts_at_or_before(offs, num_groups, num_rows, middle, tile):
            group = middle
        else:
            high = middle
    start = group_start(offs, group, num_rows)
    end = group_end(offs, group, num_rows)
    first_row = start + (tile - (start // TILE_ROWS + group)) * TILE_ROWS
    if first_row >= end:
        # The tile is past the end of its group: bisect for the next group that has rows.
        end = cutlass.max(start, end)
        high = num_groups
        while high - group > 1:
            middle = (group + high) // 2
            if group_end(offs, middle, num_rows) > end:
                high = middle
            else:
                group = middle
        if high < num_groups:
            group = high
            first_row = group_start(offs, group, num_rows)
            end = group_end(offs, group, num_rows)
            tile = first_row // TILE_ROWS + group
        else:
            tile = num_rows // TILE_ROWS + num_groups
    return tile, group, first_row, cutlass.min(end - first_row, Int32(TILE_ROWS))


@cute.jit
def _locate_ragged(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, tile: Int32
) -> tuple[Int32, Int32, Int32]:
    """Return ``GroupCursor.locate`` of ragged groups, by bisection."""
    group, high = Int32(0), num_groups
    while high - group > 1:
        middle = (group + high) // 2
        if group_end(offs, middle - 1, num_rows) // TILE_ROWS + middle <= tile:
            group = middle
        else:
            high = middle
    return _tile_of_group(offs, num_rows, group, tile)


@cute.jit
def _locate_in_warp(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, tile: Int32
) -> tuple[Int32, Int32, Int32]:
    """Return ``GroupCursor.locate_in_warp``.

    The lanes look at 32 groups between the bounds at a time.
    """
    group, high = Int32(0), num_groups
    while high - group > 1:
        step = (high - group + WARP_SIZE) // (WARP_SIZE + 1)
        middle = group + (cute.arch.lane_idx() + 1) * step
        is_before = Boolean(False)
        if middle < high:
            is_before = group_end(offs, middle - 1, num_rows) // TILE_ROWS + middle <= tile
        group += cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) * step
        high = cutlass.min(group + step, high)
    return _tile_of_group(offs, num_rows, group, tile)


@cute.jit
def _tile_of_group(
    offs: cute.Tensor, num_rows: Int32, group: Int32, tile: Int32
) -> tuple[Int32, Int32, Int32]:
    """Return the group, the first row and the number of rows of a tile of ``group``."""
    start = group_start(offs, group, num_rows)
    first_row = start + (tile - (start // TILE_ROWS + group)) * TILE_ROWS
    return (
        group,
        first_row,
        cutlass.min(group_end(offs, group, num_rows) - first_row, Int32(TILE_ROWS)),
    )


@cute.jit
def warp_scan(value: Any, lane: Int32) -> Any:
    """Return the inclusive sum of ``value`` over the lanes up to this one."""
    for i in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        if lane >= 1 << i:
            value += lower
    return value


@cute.jit
def next_item(item: Int32, step: Int32, tile: Int32, per_tile: Int32) -> Int32:
    """Return the first of ``item``, ``item + step``, ... in slot tile ``tile`` or a later one.

    Items are numbered tile by tile, ``per_tile`` each.
    """
    return item + (tile * per_tile - item + step - 1) // step * step


@cute.jit
def _group_of_ragged_row(
    offs: cute.Tensor, num_groups: Int32, num_rows: Int32, row: Int32, hint: Int32
) -> tuple[Int32, Int32]:
    """Return ``GroupCursor.group_of_row`` of ragged groups, by bisection."""
    # The first group that ends after the row.
    low, high = hint - 1, num_groups - 1
    while high - low > 1:
        middle = (low + high) // 2
        if group_end(offs, middle, num_rows) > row:
            high = middle
        else:
            low = middle
    return high, group_end(offs, high, num_rows)
