"""Amaxes of square blocks that no warp holds as a whole: a pass over the tile before all others."""

from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr

from cute_kernels.device.absmax import absmax_packed, absmax_words, fmax, unpack_absmax, warp_max
from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.memory import load_shared, store_global, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits

from ..config import DTYPE_BYTES, TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, TileDescriptor, TileGeometry

#: Rows of a warp, one per lane.
_ROWS = 32
#: An fp32 number for each 32x32 square.
SQUARES_BYTES = 4 * (TILE_COLS // _ROWS) ** 2


def _load(row_address: Int32, block: int, chunks: int) -> list[Uint32]:
    """Load the words of one row of a block, ``chunks`` 16-byte chunks."""
    addresses = [
        (row_address + c // 8 * BOX_SIZE) ^ (c % 8 * 16)
        for c in range(block * chunks, (block + 1) * chunks)
    ]
    return [word for address in addresses for word in load_shared(address, 4)]


class SquareBlocks:
    """Amaxes of 32x32 blocks, or of whole tiles."""

    def __init__(self, config: TileConfig, codec: ByteCodec):
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.across = TILE_COLS // codec.block
        self.chunks = codec.block * DTYPE_BYTES[config.dtype] // 16

    @cute.jit
    def reduce(self, tile_address: Int32, squares_address: Int32, warp_in_team: Int32) -> None:
        """Write the amaxes of a warp's 32 rows of each block to shared memory."""
        lane = cute.arch.lane_idx()
        row_address = tile_address + (warp_in_team * _ROWS + lane) * BOX_BYTES + lane % 8 * 16
        for b in range_constexpr(self.across):
            packed = absmax_packed(_load(row_address, b, self.chunks), self.dtype, self.arch)
            amax = warp_max(unpack_absmax(packed, self.dtype, self.arch))
            if lane == 0:
                store_shared(
                    squares_address + (warp_in_team * self.across + b) * 4, [f32_as_bits(amax)]
                )

    def amax(self, squares_address: Int32, quarter: Int32, across: Int32) -> Float32:
        """Return the amax of the block of a quarter of the rows and 32 columns."""
        if self.across > 1:
            address = squares_address + (quarter * self.across + across) * 4
            return bits_as_f32(load_shared(address, 1)[0])
        warp_amaxes = [bits_as_f32(word) for word in load_shared(squares_address, 4)]
        return fmax(fmax(*warp_amaxes[:2]), fmax(*warp_amaxes[2:]))

    @cute.jit
    def write_scale(
        self,
        scales: cute.Tensor,
        global_scale: GlobalScaleRegisters,
        tile: TileDescriptor,
        warp_in_team: Int32,
        squares_address: Int32,
    ) -> None:
        """Write the scale of a block that is the whole tile, by one thread of the team."""
        if warp_in_team == 0 and cute.arch.lane_idx() == 0:
            blocks_along_k = Int64(scales.shape[len(scales.shape) - 1])
            stored, _ = self.codec.block_scale(
                self.amax(squares_address, Int32(0), Int32(0)), global_scale
            )
            offset = (tile.slot_tile * blocks_along_k + tile.col_tile) * 4
            store_global(scales.iterator.toint() + offset, [stored])


class SquareScaleChooser:
    """Search for the scales of 16x16 blocks. A lane has a row of the tile."""

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry):
        self.codec = codec
        self.dtype = config.dtype
        self.arch = config.arch
        self.geometry = geometry
        self.nan = config.fmt.amaxes_keep_nan

    @cute.jit
    def choose(
        self,
        tile_address: Int32,
        squares_address: Int32,
        warp_in_team: Int32,
        global_scale: GlobalScaleRegisters,
    ) -> None:
        """Write the scales of the blocks of a warp's 32 rows to shared memory.

        They lie where other formats have the amaxes of square blocks.
        """
        lane, across = cute.arch.lane_idx(), self.geometry.col_blocks
        row = warp_in_team * _ROWS + lane
        row_address = tile_address + row * BOX_BYTES + lane % 8 * 16
        chunks = self.codec.block * DTYPE_BYTES[self.dtype] // 16
        for b in range_constexpr(across):
            words = _load(row_address, b, chunks)
            amax = absmax_words(words, self.dtype, self.arch, self.nan)
            for bit in range_constexpr(self.codec.block.bit_length() - 1):
                amax = fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << bit), self.nan)
            scale = self.codec.choose_square(words, amax, global_scale)
            if lane % self.codec.block == 0:
                address = squares_address + (row // self.codec.block * across + b) * 4
                store_shared(address, [f32_as_bits(scale)])
