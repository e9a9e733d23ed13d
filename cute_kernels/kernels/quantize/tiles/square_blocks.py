"""Amaxes of square blocks that no warp has the whole of: a pass over the tile before all others."""

from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr

from cute_kernels.device.absmax import absmax_packed, absmax_words, fmax, unpack_absmax, warp_max
from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.memory import load_shared, store_global, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits

from ..config import DTYPE_BYTES, TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, TileDescriptor, TileGeometry

#: GatheredRows of a warp, one a lane.
_ROWS = 32
#: An fp32 number for each 32x32 square.
SQUARES_BYTES = 4 * (TILE_COLS // _ROWS) ** 2


def _load(row_at: Int32, block: int, chunks: int) -> list[Uint32]:
    """The words of a row of a block of so many 16-byte chunks."""
    addresses = [
        (row_at + c // 8 * BOX_SIZE) ^ (c % 8 * 16)
        for c in range(block * chunks, (block + 1) * chunks)
    ]
    return [word for place in addresses for word in load_shared(place, 4)]


class SquareBlocks:
    """Blocks of 32x32, or of a whole tile: then each warp has the amax of its 32 rows."""

    def __init__(self, config: TileConfig, codec: ByteCodec):
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.across = TILE_COLS // codec.block
        self.chunks = codec.block * DTYPE_BYTES[config.dtype] // 16

    @cute.jit
    def reduce(self, tile_at: Int32, squares_at: Int32, warp_in_team: Int32) -> None:
        """Amaxes of a warp's 32 rows of each block to shared memory."""
        lane = cute.arch.lane_idx()
        row_at = tile_at + (warp_in_team * _ROWS + lane) * BOX_BYTES + lane % 8 * 16
        for b in range_constexpr(self.across):
            packed = absmax_packed(_load(row_at, b, self.chunks), self.dtype, self.arch)
            a = warp_max(unpack_absmax(packed, self.dtype, self.arch))
            if lane == 0:
                store_shared(squares_at + (warp_in_team * self.across + b) * 4, [f32_as_bits(a)])

    def amax(self, squares_at: Int32, quarter: Int32, across: Int32) -> Float32:
        """The amax of the block of a quarter of the rows and of so many 32 columns."""
        if self.across > 1:
            at = squares_at + (quarter * self.across + across) * 4
            return bits_as_f32(load_shared(at, 1)[0])
        of_warps = [bits_as_f32(word) for word in load_shared(squares_at, 4)]
        return fmax(fmax(*of_warps[:2]), fmax(*of_warps[2:]))

    @cute.jit
    def write_scale(
        self,
        scales: cute.Tensor,
        level: GlobalScaleRegisters,
        tile: TileDescriptor,
        warp_in_team: Int32,
        squares_at: Int32,
    ) -> None:
        """The scale of a block that is the whole tile, by one thread of the team."""
        if warp_in_team == 0 and cute.arch.lane_idx() == 0:
            blocks_along_k = Int64(scales.shape[len(scales.shape) - 1])
            stored, _ = self.codec.block_scale(self.amax(squares_at, Int32(0), Int32(0)), level)
            place = (tile.slot_tile * blocks_along_k + tile.col_tile) * 4
            store_global(scales.iterator.toint() + place, [stored])


class SquareScaleChooser:
    """Scales of 16x16 blocks that all elements of a block choose: a lane has a row of the tile."""

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry):
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        self.nan = config.fmt.amaxes_keep_nan

    @cute.jit
    def choose(
        self, tile_at: Int32, squares_at: Int32, warp_in_team: Int32, level: GlobalScaleRegisters
    ) -> None:
        """Scales of the blocks of a warp's 32 rows to shared memory, where amaxes are of others."""
        lane, across = cute.arch.lane_idx(), self.geometry.col_blocks
        row = warp_in_team * _ROWS + lane
        row_at = tile_at + row * BOX_BYTES + lane % 8 * 16
        chunks = self.codec.block * DTYPE_BYTES[self.dtype] // 16
        for b in range_constexpr(across):
            words = _load(row_at, b, chunks)
            a = absmax_words(words, self.dtype, self.arch, self.nan)
            for bit in range_constexpr(self.codec.block.bit_length() - 1):
                a = fmax(a, cute.arch.shuffle_sync_bfly(a, offset=1 << bit), self.nan)
            scale = self.codec.choose_square(words, a, level)
            if lane % self.codec.block == 0:
                at = squares_at + (row // self.codec.block * across + b) * 4
                store_shared(at, [f32_as_bits(scale)])
