"""Scale bytes in the tile quantizer: their encode factors, computed or looked up, and scale tiles.

All tiles of a group share a global scale, so the encode factor of a block depends only on its scale
byte. If a reciprocal is expensive, a team keeps the factors of all scale bytes in shared memory.
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
    codec: NibbleCodec,
    a: Float32,
    b: Float32,
    global_scale: GlobalScaleRegisters,
    table: Int32 | None,
) -> tuple[Uint16, Float32, Float32]:
    """Return the scale bytes of two blocks and their encode factors.

    Args:
        codec: Codec of the format.
        a: fp32 amax of the block whose scale is the low byte.
        b: fp32 amax of the block whose scale is the high byte.
        global_scale: Global scale of the group.
        table: Shared-memory address of ``codec.table_size`` fp32 encode factors, or None to compute
            them.
    """
    if table is None:
        return codec.block_scales(a, b, global_scale)
    pair = codec.scale_bytes(a, b, global_scale)
    word, mask = Uint32(pair), 4 * codec.table_size - 4
    factor_a, factor_b = (
        bits_as_f32(load_shared(table + Int32(offset & mask), 1)[0])
        for offset in (word << 2, word >> 6)
    )
    return pair, factor_a, factor_b


def join_scales(pairs: Sequence[Uint16]) -> Uint32:
    """Return one word of one or two pairs of scale bytes."""
    if len(pairs) == 1:
        return Uint32(pairs[0])
    return asm("mov.b32 $0, {$1, $2};", [Uint32], pairs)


@cute.jit
def write_column_scales(
    groups: GroupCursor,
    scales_t: cute.Tensor,
    tile: TileDescriptor,
    scales_address: Int32,
    index: Int32,
    per_tile: int,
) -> None:
    """Write one 512-byte tile of columnwise scales by one warp: 128 columns by 4 row blocks.

    Args:
        groups: Groups of the rows.
        scales_t: ([G,] column tiles, block tiles, 512) uint8.
        tile: Descriptor of the tile.
        scales_address: Shared-memory address of the scales, four bytes per column.
        index: Number of the scale tile among those of the slot tile.
        per_tile: Scale tiles of a slot tile.
    """
    lane = cute.arch.lane_idx()
    address = scales_address + (index * TILE_COLS + lane) * 4
    words = [load_shared(address + q * (32 * 4), 1)[0] for q in range(4)]
    rank = len(scales_t.shape)
    block_tiles = scales_t.shape[rank - 2]
    local_tile = groups.local_tile(tile.slot_tile, tile.group)
    target_tile = Int64(tile.col_tile) * block_tiles + (per_tile * local_tile + index)
    if const_expr(groups.offs is None):
        target_tile += Int64(tile.group) * (scales_t.shape[1] * block_tiles)
    store_global(scales_t.iterator.toint() + target_tile * SF_TILE_BYTES + lane * 16, words)
