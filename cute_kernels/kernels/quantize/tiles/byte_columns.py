"""Columnwise half of the tile quantizer for byte codes: a tile's columns to codes and scales.

A lane has 16 rows of the columns of one 16-byte chunk, eight columns of 16-bit types. The eight
lanes of a chunk have all rows of the tile. Transposed, they store 128 bytes of each column
together. Untransposed, the four lanes of a row store 32 bytes of it.

Lanes of a chunk read rows 16 apart, which the swizzle treats alike, four chunks at a time. To touch
all banks, every other lane reads the rows of an eight in another order: its i-th row is row i ^
swizzle_xor.
"""

from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import absmax_packed, split_absmax
from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.memory import (
    load_shared,
    store_global,
    store_global_past_l1,
    store_shared_byte,
)
from cute_kernels.device.ptx import bits_as_f32, select
from cute_kernels.layout.slots import TILE_ROWS

from ..config import DTYPE_BYTES, TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, TileAddresses, TileDescriptor, TileGeometry
from .square_blocks import SquareBlocks

#: Rows of a lane; chunks that a warp has at once; lanes of a chunk.
_ROWS, _CHUNKS, _MATES = 16, 4, 8
_EIGHT = 8
#: XOR of the addresses of neighbouring rows of an eight: the row, and its bits of the swizzle.
_NEXT_ROW = BOX_BYTES + 16


class ByteColumnConverter:
    """Converter of the columns of tiles in shared memory, a quarter of a tile per warp."""

    def __init__(
        self,
        config: TileConfig,
        codec: ByteCodec,
        geometry: TileGeometry,
        squares: SquareBlocks | None,
    ):
        self.config = config
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        self.squares = squares
        #: Columns of a lane at a time, words of them, and how often a warp takes chunks.
        self.num_cols = 16 // DTYPE_BYTES[config.dtype]
        self.steps = TILE_COLS // self.num_cols // (config.warps_per_team * _CHUNKS)
        self.is_transposed = codec.fmt.columnwise == "transposed"
        self.is_tiled = codec.fmt.has_scale_tiles

    @cute.jit
    def convert(
        self,
        groups: GroupCursor,
        cols: Int32,
        global_scale: GlobalScaleRegisters,
        codes_t: cute.Tensor,
        scales_t: cute.Tensor | None,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Convert a warp's quarter of the tile.

        Args:
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            global_scale: Global scale of the group.
            codes_t: (K, P) or (G, K, P). Codes, or (P, K) or (G, P, K) if the format does not
                transpose.
            scales_t: Columnwise block scales. Optional.
            tile: Descriptor of the tile.
            warp_in_team: Warp in the team.
            addresses: Shared-memory addresses of the tile.
            running_absmax: Packed absmax of the group so far.

        Returns:
            ``running_absmax``; raised to the magnitudes of the quarter if the caller gives scales.
        """
        lane = cute.arch.lane_idx()
        mate = lane // _CHUNKS
        swizzle_xor = mate % 2 * 4
        for step in range_constexpr(self.steps):
            chunk = (warp_in_team * self.steps + step) * _CHUNKS + lane % _CHUNKS
            rows = self.load(addresses.tile, chunk, mate, swizzle_xor)
            # One packed absmax per word of the chunk, over all rows.
            packed = [
                absmax_packed([row[w] for row in rows], self.dtype, self.arch) for w in range(4)
            ]
            if const_expr(self.config.fmt.has_given_scale):
                running_absmax = absmax_packed([running_absmax, *packed], self.dtype, self.arch)
            stored, factors = self.scale(packed, global_scale, chunk, mate, addresses)
            col = chunk * self.num_cols
            k = tile.col_tile * TILE_COLS + col
            if const_expr(self.is_tiled):
                self.stage(stored, addresses.scales_t, col, mate)
            # K is a multiple of 16, so all of a lane's columns exist or none.
            if k < cols:
                self.store(groups, codes_t, tile, k, rows, factors, mate, swizzle_xor)
                if const_expr(self.codec.has_scales and not self.is_tiled):
                    if const_expr(self.squares is None):
                        self.store_scales(scales_t, tile, cols, k, stored, mate)
        if const_expr(self.codec.has_scales and not self.is_tiled):
            if const_expr(self.squares is not None):
                self.squares.write_scale(
                    scales_t, global_scale, tile, warp_in_team, addresses.squares
                )
        return running_absmax

    def load(
        self, tile_address: Int32, chunk: Int32, mate: Int32, swizzle_xor: Int32
    ) -> list[list[Uint32]]:
        """Return the words of a lane's rows in swizzled order: the i-th is row i ^ swizzle_xor."""
        per_box = BOX_BYTES // 16
        base = tile_address + chunk // per_box * BOX_SIZE + mate * (_ROWS * BOX_BYTES)
        base += swizzle_xor * BOX_BYTES + (chunk ^ swizzle_xor) % per_box * 16
        eight = [base ^ (i * _NEXT_ROW) for i in range(_EIGHT)]
        return [load_shared(eight[i % 8] + i // 8 * (8 * BOX_BYTES), 4) for i in range(_ROWS)]

    def scale(
        self,
        packed: list[Uint32],
        global_scale: GlobalScaleRegisters,
        chunk: Int32,
        mate: Int32,
        addresses: TileAddresses,
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        """Compute the scales of a lane's columns.

        Args:
            packed: Packed absmax of the lane's rows for each word of the chunk.
            global_scale: Global scale of the group.
            chunk: 16-byte chunk of the tile's row.
            mate: Lane among those of the chunk.
            addresses: Shared-memory addresses of the tile.

        Returns:
            The stored scale and the encode factor of each column.
        """
        if not self.codec.has_scales or self.squares is not None:
            amax = Float32(0.0)
            if self.squares is not None:
                amax = self.squares.amax(addresses.squares, mate // 2, chunk * self.num_cols // 32)
            stored, factor = self.codec.block_scale(amax, global_scale)
            return [stored] * self.num_cols, [factor] * self.num_cols
        sharing = 1
        while sharing < self.codec.block // _ROWS:
            shuffled = [cute.arch.shuffle_sync_bfly(w, offset=sharing * _CHUNKS) for w in packed]
            packed = [
                absmax_packed([w, Uint32(neighbor)], self.dtype, self.arch)
                for w, neighbor in zip(packed, shuffled, strict=True)
            ]
            sharing *= 2
        if self.dtype == "float32":
            amaxes = [bits_as_f32(word) for word in packed]
        else:
            amaxes = [amax for word in packed for amax in split_absmax(word, self.dtype, self.arch)]
        stored, factors = zip(
            *[self.codec.block_scale(amax, global_scale) for amax in amaxes], strict=True
        )
        return list(stored), list(factors)

    @cute.jit
    def store(
        self,
        groups: GroupCursor,
        codes_t: cute.Tensor,
        tile: TileDescriptor,
        k: Int32,
        rows: list[list[Uint32]],
        factors: list[Float32],
        mate: Int32,
        swizzle_xor: Int32,
    ) -> None:
        """Store the codes of a lane's columns from column ``k`` on, for its sixteen slot rows."""
        pitch = Int64(codes_t.stride[len(codes_t.stride) - 2])
        slot = groups.local_tile(tile.slot_tile, tile.group) * TILE_ROWS + mate * _ROWS
        origin = codes_t.iterator.toint()
        if const_expr(groups.offs is None):
            origin += Int64(tile.group) * codes_t.stride[0]
        if const_expr(self.is_transposed):
            target = origin + slot + k * pitch
            per_word = self.num_cols // 4
            for w in range_constexpr(4):
                word_factors = factors[w * per_word : (w + 1) * per_word]
                for codes in self.codec.encode_columns(
                    [row[w] for row in rows], word_factors, swizzle_xor
                ):
                    store_global_past_l1(target, codes)
                    target += pitch
        else:
            target = origin + slot * pitch + k
            # Two pointers, one per four rows. In swizzled order the upper four rows come first.
            fours = [target + swizzle_xor * pitch, target + (4 - swizzle_xor) * pitch]
            for i in range_constexpr(_ROWS):
                store_global_past_l1(fours[i // 4 % 2], self.codec.encode_mixed(rows[i], factors))
                fours[i // 4 % 2] += pitch * (5 if i % 4 == 3 else 1)

    # ---- scales

    @cute.jit
    def store_scales(
        self,
        scales_t: cute.Tensor,
        tile: TileDescriptor,
        cols: Int32,
        k: Int32,
        stored: list[Uint32],
        mate: Int32,
    ) -> None:
        """Store fp32 scales of blocks that span all rows of the tile, four columns per lane."""
        target = scales_t.iterator.toint() + (Int64(tile.slot_tile) * cols + k + mate * 4) * 4
        if mate < self.num_cols // 4:
            values = stored[:4]
            if const_expr(self.num_cols > 4):
                pairs = zip(stored[4:], stored[:4], strict=True)
                values = [select(mate == 1, high, low) for high, low in pairs]
            store_global(target, values)

    def stage(self, stored: list[Uint32], scales_address: Int32, col: Int32, mate: Int32) -> None:
        """Store scale bytes in shared memory, four per column.

        Two lanes write half of the columns each.
        """
        half = self.num_cols // 2
        address = scales_address + (col + mate % 2 * half) * 4 + mate // 2
        for i in range(half):
            store_shared_byte(address + i * 4, select(mate % 2 == 1, stored[half + i], stored[i]))
