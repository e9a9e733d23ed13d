"""Integer shape arithmetic of the data layout. ``layout.slots`` has the positions of rows.

Block scales of NVFP4 and MXFP8 lie in 512-byte tiles of 128 rows by 4 scales, the order that
Blackwell's block-scaled MMA reads. (CUTLASS calls the atom ``((32, 4), (vec, 4))`` with strides
``((16, 4), (0, 1))``.) Successive tiles along K are adjacent.

Every function takes and returns plain ints, or ``torch.SymInt`` under ``torch.compile``;
``row_in_tile`` also takes numbers of a kernel.
"""

from typing import TypeVar

T = TypeVar("T")

#: Elements of K in a chunk that kernels decode at once, if tensor cores do not take the codes. On
#: sm_90a the order of NVFP4 products changes within a chunk.
DECODED_CHUNK_K = 128
#: Rows, scales per row, bytes and 32-bit words of one block-scale tile.
SF_TILE_ROWS = 128
SF_TILE_COLS = 4
SF_TILE_BYTES = SF_TILE_ROWS * SF_TILE_COLS
SF_TILE_WORDS = SF_TILE_BYTES // 4
#: Alignment in bytes of each group's codes and scales if groups have shapes of their own: enough
#: for TMA, and one cache line.
MEMBER_ALIGNMENT = 128
#: TMA needs row pitches that are a multiple of this many bytes.
PITCH_ALIGNMENT = 16


def row_in_tile(row: T) -> T:
    """Return the offset in a scale tile of the first of a row's four bytes.

    It uses bit operations: a kernel's numbers are signed, and a division would need the sign.
    """
    return ((row & 31) << 4) + (row >> 3 & 12)  # type: ignore


def scale_offset(row: T, block: T, num_tiles: T) -> T:
    """Return the byte of a block scale in a buffer of 128x4 tiles, (tiles of rows, num_tiles, 512).

    The buffers are the scales of NVFP4 and MXFP8. Numbers may be integers or integer tensors, which
    are broadcast.

    Args:
        row: Slot row in a rowwise copy. Column of the values in a columnwise copy.
        block: Index of the block, along K in a rowwise copy. Along the slot rows in a columnwise
            copy.
        num_tiles: Number of tiles along the blocks: the size of the second to last dimension.

    Returns:
        Index into the flattened buffer. A uniform tensor has one such buffer per group.
    """
    tile = row // SF_TILE_ROWS * num_tiles + block // SF_TILE_COLS  # type: ignore
    return tile * SF_TILE_BYTES + row_in_tile(row) + block % SF_TILE_COLS  # type: ignore


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """Return the smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b


def scale_tiles(elements: int, sf_vec_size: int) -> int:
    """Return the number of scale tiles along the blocked direction of ``elements`` elements."""
    return ceil_div(ceil_div(elements, sf_vec_size), SF_TILE_COLS)
