"""The columnwise half of the tile quantizer where a code is a byte: a tile's columns to codes.

A lane has 16 rows of the columns of one 16-byte chunk, eight columns of 16-bit types; the eight
lanes of a chunk have all rows of the tile. Transposed, they store 128 bytes of each column
together; untransposed, the four lanes of a row store 32 bytes of it.

Lanes of a chunk read rows 16 apart, which the swizzle treats alike, four chunks at a time. To touch
all banks, every other lane reads the rows of an eight in another order, see ``swizzle_xor``.
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

#: GatheredRows of a lane; chunks that a warp has at once; lanes of a chunk.
_ROWS, _CHUNKS, _MATES = 16, 4, 8
_EIGHT = 8
#: What one address is of the next row's in an eight: its row, and its bits of the swizzle.
_NEXT_ROW = BOX_BYTES + 16


class ByteColumnConverter:
    """Converts columns of tiles in shared memory, a quarter of a tile a warp."""

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
        level: GlobalScaleRegisters,
        codes_t: cute.Tensor,
        scales_t: cute.Tensor | None,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """A warp's quarter of the tile; gives ``running_absmax`` with the largest magnitudes, packed."""
        lane = cute.arch.lane_idx()
        mate = lane // _CHUNKS
        swizzle_xor = mate % 2 * 4
        for step in range_constexpr(self.steps):
            chunk = (warp_in_team * self.steps + step) * _CHUNKS + lane % _CHUNKS
            rows = self.load(addresses.tile, chunk, mate, swizzle_xor)
            # A word of the chunk in all rows, for each.
            packed = [
                absmax_packed([row[w] for row in rows], self.dtype, self.arch) for w in range(4)
            ]
            if const_expr(self.config.fmt.has_given_scale):
                running_absmax = absmax_packed([running_absmax, *packed], self.dtype, self.arch)
            stored, factors = self.scale(packed, level, chunk, mate, addresses)
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
                self.squares.write_scale(scales_t, level, tile, warp_in_team, addresses.squares)
        return running_absmax

    def load(
        self, tile_at: Int32, chunk: Int32, mate: Int32, swizzle_xor: Int32
    ) -> list[list[Uint32]]:
        """The words of a lane's rows, in twisted order: the i-th is row i ^ swizzle_xor."""
        per_box = BOX_BYTES // 16
        first = tile_at + chunk // per_box * BOX_SIZE + mate * (_ROWS * BOX_BYTES)
        first += swizzle_xor * BOX_BYTES + (chunk ^ swizzle_xor) % per_box * 16
        eight = [first ^ (i * _NEXT_ROW) for i in range(_EIGHT)]
        return [load_shared(eight[i % 8] + i // 8 * (8 * BOX_BYTES), 4) for i in range(_ROWS)]

    def scale(
        self,
        packed: list[Uint32],
        level: GlobalScaleRegisters,
        chunk: Int32,
        mate: Int32,
        addresses: TileAddresses,
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        """The scale of each of a lane's columns as it is stored, and its encode factor.

        ``packed`` are the largest magnitudes of its rows of each word; it is the ``mate``-th lane
        of the chunk.
        """
        if not self.codec.has_scales or self.squares is not None:
            a = Float32(0.0)
            if self.squares is not None:
                a = self.squares.amax(addresses.squares, mate // 2, chunk * self.num_cols // 32)
            stored, factor = self.codec.block_scale(a, level)
            return [stored] * self.num_cols, [factor] * self.num_cols
        sharing = 1
        while sharing < self.codec.block // _ROWS:
            others = [cute.arch.shuffle_sync_bfly(w, offset=sharing * _CHUNKS) for w in packed]
            packed = [
                absmax_packed([w, Uint32(other)], self.dtype, self.arch)
                for w, other in zip(packed, others, strict=True)
            ]
            sharing *= 2
        if self.dtype == "float32":
            amaxes = [bits_as_f32(word) for word in packed]
        else:
            amaxes = [a for word in packed for a in split_absmax(word, self.dtype, self.arch)]
        stored, factors = zip(*[self.codec.block_scale(a, level) for a in amaxes], strict=True)
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
        """Codes of a lane's columns, from column ``k`` on, of sixteen slot rows."""
        pitch = Int64(codes_t.stride[len(codes_t.stride) - 2])
        slot = groups.local_tile(tile.slot_tile, tile.group) * TILE_ROWS + mate * _ROWS
        origin = codes_t.iterator.toint()
        if const_expr(groups.offs is None):
            origin += Int64(tile.group) * codes_t.stride[0]
        if const_expr(self.is_transposed):
            target = origin + slot + k * pitch
            per_word = self.num_cols // 4
            for w in range_constexpr(4):
                of_word = factors[w * per_word : (w + 1) * per_word]
                for codes in self.codec.encode_columns(
                    [row[w] for row in rows], of_word, swizzle_xor
                ):
                    store_global_past_l1(target, codes)
                    target += pitch
        else:
            target = origin + slot * pitch + k
            # Of each four rows, the upper four of an eight first where the order is twisted.
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
        """fp32 scales of blocks of all rows of the tile: four columns a lane."""
        target = scales_t.iterator.toint() + (Int64(tile.slot_tile) * cols + k + mate * 4) * 4
        if mate < self.num_cols // 4:
            values = stored[:4]
            if const_expr(self.num_cols > 4):
                pairs = zip(stored[4:], stored[:4], strict=True)
                values = [select(mate == 1, high, low) for high, low in pairs]
            store_global(target, values)

    def stage(self, stored: list[Uint32], scales_at: Int32, col: Int32, mate: Int32) -> None:
        """Scale bytes to shared memory, four a column: half of the columns by each of two lanes."""
        half = self.num_cols // 2
        at = scales_at + (col + mate % 2 * half) * 4 + mate // 2
        for i in range(half):
            store_shared_byte(at + i * 4, select(mate % 2 == 1, stored[half + i], stored[i]))
