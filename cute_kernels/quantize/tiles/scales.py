"""Scales of blocks in the tile quantizer, with encode factors computed or looked up.

All tiles of a group share a second level, so a block's encode factor depends on its scale byte
alone, and where a reciprocal is dear a team keeps the factors of all bytes in shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Float32, Int32, Uint16, Uint32

from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import asm, bits_as_f32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.device.codecs import Codec, Level

__all__ = ["join_scales", "scale_blocks"]


def scale_blocks(
    codec: Codec, a: Float32, b: Float32, level: Level, table: Int32 | None
) -> tuple[Uint16 | None, Float32, Float32]:
    """Scale bytes of two blocks with amaxes ``a`` and ``b``, that of ``a`` lowest; their factors.

    Args:
        codec: the format's.
        a: amax of the first block.
        b: amax of the second.
        level: their second level.
        table: where in shared memory the level's ``codec.table_size`` encode factors are, as fp32;
            None to compute them.
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
