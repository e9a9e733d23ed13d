"""Integer shape maths of the data layout; where the rows of groups lie is in ``layout.slots``.

Scale tiles: block scales of NVFP4 and MXFP8 lie in 512-byte tiles of 128 rows by 4 scales, the
order that Blackwell's block-scaled MMA reads (CUTLASS calls the atom ``((32, 4), (vec, 4))`` with
strides ``((16, 4), (0, 1))``). Tiles that follow each other along K are adjacent.

Every function takes and returns plain ints, or ``torch.SymInt`` under ``torch.compile``;
``row_in_tile`` also numbers of a kernel.
"""

from typing import TypeVar

T = TypeVar("T")

#: Elements of K in the pieces in which kernels decode codes that they do not multiply as they are;
#: those for sm_90a change the order of NVFP4 products within one.
PIECE_K = 128
#: Rows, scales a row, bytes and 32-bit words of one block-scale tile.
SF_TILE_ROWS = 128
SF_TILE_COLS = 4
SF_TILE_BYTES = SF_TILE_ROWS * SF_TILE_COLS
SF_TILE_WORDS = SF_TILE_BYTES // 4
#: Where groups have shapes of their own, the codes and scales of each start at a multiple of this
#: many bytes: enough for TMA, and a cache line.
MEMBER_ALIGNMENT = 128
#: TMA takes only row pitches that are a multiple of this many bytes.
PITCH_ALIGNMENT = 16


def row_in_tile(row: T) -> T:
    """Where in a scale tile the first of a row's four bytes is: ((32, 4), (vec, 4)) of the module.

    In bits, for a kernel's numbers are signed, and division would ask for the sign.
    """
    return ((row & 31) << 4) + (row >> 3 & 12)  # type: ignore


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b


def scale_tiles(elements: int, sf_vec_size: int) -> int:
    """Scale tiles side by side along the blocked direction of ``elements`` elements."""
    return ceil_div(ceil_div(elements, sf_vec_size), SF_TILE_COLS)
