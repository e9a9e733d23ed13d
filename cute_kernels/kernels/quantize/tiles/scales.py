"""Scale bytes in the tile quantizer: with encode factors computed or looked up, and in tiles.

All tiles of a group share a second level, so a block's encode factor depends on its scale byte
alone, and where a reciprocal is dear a team keeps the factors of all bytes in shared memory.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr, cute

from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.memory import load_shared, store_global
from cute_kernels.device.ptx import asm, bits_as_f32
from cute_kernels.layout.shapes import SF_TILE_BYTES

from .geometry import TILE_COLS, TileDescriptor


def scale_blocks(
    codec: NibbleCodec, a: Float32, b: Float32, level: GlobalScaleRegisters, table: Int32 | None
) -> tuple[Uint16, Float32, Float32]:
    """Scale bytes of two blocks with amaxes ``a`` and ``b``, that of ``a`` lowest; their factors.

    The level's ``codec.table_size`` encode factors are at ``table`` in shared memory, as fp32; None
    to compute them.
    """
    if table is None:
        return codec.block_scales(a, b, level)
    pair = codec.scale_bytes(a, b, level)
    word, mask = Uint32(pair), 4 * codec.table_size - 4
    enc_a, enc_b = (
        bits_as_f32(load_shared(table + Int32(place & mask), 1)[0])
        for place in (word << 2, word >> 6)
    )
    return pair, enc_a, enc_b


def join_scales(pairs: Sequence[Uint16]) -> Uint32:
    """One word of one pair or two of scale bytes."""
    if len(pairs) == 1:
        return Uint32(pairs[0])
    return asm("mov.b32 $0, {$1, $2};", [Uint32], pairs)


@cute.jit
def write_column_scales(
    groups: GroupCursor,
    scales_t: cute.Tensor,
    tile: TileDescriptor,
    scales_at: Int32,
    index: Int32,
    per_tile: int,
) -> None:
    """A warp writes one 512-byte tile of columnwise scales: 128 columns by 4 row blocks.

    It is the ``index``-th of the ``per_tile`` scale tiles of the slot tile, and lies at
    ``scales_at`` in shared memory, four bytes a column.
    """
    lane = cute.arch.lane_idx()
    at = scales_at + (index * TILE_COLS + lane) * 4
    words = [load_shared(at + q * (32 * 4), 1)[0] for q in range(4)]
    rank = len(scales_t.shape)
    block_tiles = scales_t.shape[rank - 2]
    local_tile = groups.local_tile(tile.slot_tile, tile.group)
    place = Int64(tile.col_tile) * block_tiles + (per_tile * local_tile + index)
    if const_expr(groups.offs is None):
        place += Int64(tile.group) * (scales_t.shape[1] * block_tiles)
    store_global(scales_t.iterator.toint() + place * SF_TILE_BYTES + lane * 16, words)
