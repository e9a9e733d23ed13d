"""Integer shape maths of the data layout: slots, scale tiles and buffer sizes.

**Slots.** Where rows must be tile-aligned, the rows of each group start on a tile of their own:
group g starts at tile ``start(g) // 128 + g``. Tiles of different groups never overlap, and every
group finds its slot from its own start row alone, without a prefix sum and without the host. A
buffer of ``T // 128 + G`` tiles holds any split of T rows into G groups.

**Scale tiles.** Block scales of NVFP4 and MXFP8 lie in 512-byte tiles of 128 rows by 4 scales, the
order that Blackwell's block-scaled MMA reads (CUTLASS calls the atom ``((32, 4), (vec, 4))`` with
strides ``((16, 4), (0, 1))``). Tiles that follow each other along K are adjacent.

Every function takes and returns plain ints, or ``torch.SymInt`` under ``torch.compile``.
"""

from __future__ import annotations

__all__ = [
    "MEMBER_ALIGNMENT",
    "PIECE_K",
    "PITCH_ALIGNMENT",
    "SF_TILE_BYTES",
    "SF_TILE_COLS",
    "SF_TILE_ROWS",
    "TILE_ROWS",
    "ceil_div",
    "most_rows",
    "num_slot_tiles",
    "round_up",
    "scale_tiles",
    "slot_tile",
    "uniform_tiles",
]

#: Rows of one slot tile; every group starts on a multiple of this in slot order.
TILE_ROWS = 128
#: Elements of K in the pieces in which kernels for sm_90a change the order of NVFP4 products.
PIECE_K = 128
#: Rows, scales a row, and bytes of one block-scale tile.
SF_TILE_ROWS = 128
SF_TILE_COLS = 4
SF_TILE_BYTES = SF_TILE_ROWS * SF_TILE_COLS
#: Where groups have shapes of their own, the codes and scales of each start at a multiple of this
#: many bytes: enough for TMA, and a cache line.
MEMBER_ALIGNMENT = 128
#: TMA takes only row pitches that are a multiple of this many bytes.
PITCH_ALIGNMENT = 16


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b


def slot_tile(start: int, group: int) -> int:
    """First slot tile of group ``group`` whose rows begin at ``start``."""
    return start // TILE_ROWS + group


def num_slot_tiles(rows: int, num_groups: int) -> int:
    """Tiles of a slot buffer that holds any split of ``rows`` rows into ``num_groups`` groups."""
    return rows // TILE_ROWS + num_groups


def most_rows(num_tiles: int, num_groups: int) -> int:
    """The most rows that slots in ``num_tiles`` tiles hold: undoes ``num_slot_tiles``."""
    return (num_tiles - num_groups + 1) * TILE_ROWS - 1


def uniform_tiles(rows: int) -> int:
    """Tiles of each group when every group has ``rows`` rows."""
    return ceil_div(rows, TILE_ROWS)


def scale_tiles(elements: int, sf_vec_size: int) -> int:
    """Scale tiles side by side along the blocked direction of ``elements`` elements."""
    return ceil_div(ceil_div(elements, sf_vec_size), SF_TILE_COLS)
