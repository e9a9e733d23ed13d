"""The slot rule: positions of the rows of each group in a buffer of tiles of 128 rows.

If rows must be tile-aligned, the rows of each group start on a tile of their own: group g starts at
tile ``start(g) // 128 + g``. Tiles of different groups never overlap. Every group finds its slot
from its own start row, without a prefix sum and without the host. A buffer of ``T // 128 + G``
tiles holds any division of T rows into G groups.

Every function takes and returns plain ints, or ``torch.SymInt`` under ``torch.compile``.
"""

from .shapes import ceil_div

#: Rows of one slot tile; every group starts on a multiple of this in slot order.
TILE_ROWS = 128


def slot_tile(start: int, group: int) -> int:
    """Return the first slot tile of group ``group``, whose rows begin at ``start``."""
    return start // TILE_ROWS + group


def num_slot_tiles(rows: int, num_groups: int) -> int:
    """Return the tiles of a buffer for any division of ``rows`` rows into ``num_groups`` groups."""
    return rows // TILE_ROWS + num_groups


def most_rows(num_tiles: int, num_groups: int) -> int:
    """Return the most rows that fit in ``num_tiles`` tiles: the inverse of ``num_slot_tiles``."""
    return (num_tiles - num_groups + 1) * TILE_ROWS - 1


def uniform_tiles(rows: int) -> int:
    """Return the tiles of each group if every group has ``rows`` rows."""
    return ceil_div(rows, TILE_ROWS)
