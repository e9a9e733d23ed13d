"""The rowwise half of the tile quantizer where a code is a byte: a tile's rows to codes and scales.

A row of a tile is 128 bytes of codes, which the lanes that share the row store together; the lanes
that share a block take its amax by shuffles. Scales go through shared memory, each warp's own warp_in_team
of it, and leave four bytes a row, which is tile 128 columns have in every layout of scales.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import absmax_packed, unpack_absmax
from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.memory import (
    load_shared,
    store_global,
    store_global_past_l1,
    store_shared,
    store_shared_byte,
)
from cute_kernels.device.ptx import select
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS, row_in_tile
from cute_kernels.layout.slots import TILE_ROWS

from ..config import DTYPE_BYTES, TileConfig
from .geometry import BOX_BYTES, BOX_SIZE, TILE_COLS, TileAddresses, TileDescriptor, TileGeometry
from .square_blocks import SquareBlocks

#: What one store takes: 16 bytes, and on sm_100a 32.
_STORE_BYTES = {"sm_90a": 16, "sm_100a": 32}
_HALF_STORE = 16
#: GatheredRows of a warp in each quarter of a tile, and rows of a quarter.
_EIGHT, _QUARTER, _QUARTERS = 8, 32, 4


class LaneRows(NamedTuple):
    """What a lane has of a tile's rows.

    ``mate`` is which of its rows' lanes it is. Of its first row, ``source`` is where the first
    chunk of its columns is, ``staged`` where the scale of its block goes and ``target`` where the
    codes go; ``live`` rows of the tile and ``left`` columns follow. If ``is_wide`` all of its
    columns exist, and one store takes their codes.
    """

    mate: Int32
    source: Int32
    staged: Int32
    live: Int32
    target: Int64
    pitch: Int64
    is_wide: Boolean
    left: Int32


class ByteRowConverter:
    """Converts rows of tiles in shared memory, eight of each quarter a warp, several at a time.

    Eight lanes at a time read 16-byte chunks that touch all banks: those of ``near`` mates, lanes
    that share a row, in rows that follow each other.
    """

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
        #: Columns of a lane, and 16-byte chunks of them.
        self.width = _STORE_BYTES[config.arch]
        self.chunks = self.width * DTYPE_BYTES[config.dtype] // 16
        #: Lanes that share a row; those of them among eight lanes that follow each other.
        self.mates = TILE_COLS // self.width
        self.near = min(self.mates, 8 // self.chunks)
        self.rows_at_once = 32 // self.mates
        #: Lanes that share a block.
        self.sharing = max(1, codec.block // self.width) if codec.has_scales else 1
        self.is_tiled = codec.fmt.has_scale_tiles
        #: Unrolled code executes fewer instructions, but was not measured to be faster on sm_90a.
        self.is_unrolled = get_arch(config.arch).tuned_by == "instruction_count"
        #: Whether rows have scales of their own, which are staged.
        self.stages_scales = codec.has_scales and not (config.fmt.is_2d and not self.is_tiled)

    def place(self) -> tuple[Int32, Int32]:
        """Which of its row's lanes a lane is, and which of the rows that a warp has at once."""
        lane = cute.arch.lane_idx()
        far = self.mates // self.near
        eight = lane // 8
        mate = lane % self.near + eight % far * self.near
        return mate, lane % 8 // self.near + eight // far * (8 // self.near)

    @cute.jit
    def convert(
        self,
        groups: GroupCursor,
        cols: Int32,
        level: GlobalScaleRegisters,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Gives ``running_absmax`` with the largest magnitudes of the warp's rows, packed."""
        mate, row = self.place()
        first = warp_in_team * _EIGHT + row
        pitch = Int64(codes.stride[len(codes.stride) - 2])
        col = tile.col_tile * TILE_COLS + mate * self.width
        left = cols - col
        lane = LaneRows(
            mate=mate,
            source=self.source(addresses.tile, mate, first),
            staged=self.staged(addresses.scales, mate, first),
            live=tile.num_rows - first,
            target=codes.iterator.toint() + (tile.first_row + first) * pitch + col,
            pitch=pitch,
            is_wide=left >= self.width and pitch % self.width == 0,
            left=left,
        )
        # Quarters in which a row of the warp's exists.
        quarters = (tile.num_rows - warp_in_team * _EIGHT + (_QUARTER - 1)) >> 5
        if const_expr(self.is_unrolled):
            for q in range_constexpr(_QUARTERS):
                if q < quarters:
                    running_absmax = self.convert_eight(
                        level, lane, Int32(q), addresses, running_absmax
                    )
        else:
            quarters = cutlass.min(quarters, Int32(_QUARTERS))
            for q in cutlass.range(quarters, unroll=2):
                running_absmax = self.convert_eight(level, lane, q, addresses, running_absmax)
        if const_expr(self.codec.has_scales):
            if const_expr(self.stages_scales):
                cute.arch.sync_warp()
                self.write_scales(groups, scales, tile, warp_in_team, addresses.scales)
            else:
                self.squares.write_scale(scales, level, tile, warp_in_team, addresses.squares)
        return running_absmax

    @cute.jit
    def convert_eight(
        self,
        level: GlobalScaleRegisters,
        lane: LaneRows,
        q: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        for after in range_constexpr(0, _EIGHT, self.rows_at_once):
            rows_on = q * _QUARTER + after
            # GatheredRows of one lane differ in a bit of the swizzle besides.
            at = lane.source ^ (after * 16)
            words = self.load(at, rows_on * BOX_BYTES)
            packed = absmax_packed(words, self.dtype, self.arch)
            if const_expr(self.config.fmt.has_given_scale):
                shown = select(rows_on < lane.live, packed, Uint32(0))
                running_absmax = absmax_packed([running_absmax, shown], self.dtype, self.arch)
            stored, factor = self.scale(packed, level, q, lane.mate, addresses)
            if const_expr(self.stages_scales):
                self.stage(stored, lane.staged, q, after, lane.mate)
            out = self.codec.encode_row(words, factor)
            if rows_on < lane.live and lane.left > 0:
                self.store(lane, lane.target + rows_on * lane.pitch, out)
        return running_absmax

    def source(self, tile_at: Int32, mate: Int32, first: Int32) -> Int32:
        """Where the first chunk of a lane's columns of its first row is."""
        chunk = mate * self.chunks
        at = tile_at + first * BOX_BYTES + ((chunk ^ first) % 8) * 16
        return at + mate * self.width // self.geometry.box_cols * BOX_SIZE

    def load(self, at: Int32, after: Int32) -> list[Uint32]:
        addresses = [(at ^ (c * 16)) + after for c in range(self.chunks)]
        return [word for place in addresses for word in load_shared(place, 4)]

    def scale(
        self,
        packed: Uint32,
        level: GlobalScaleRegisters,
        q: Int32,
        mate: Int32,
        addresses: TileAddresses,
    ) -> tuple[Uint32 | None, Float32]:
        """The scale of a lane's block as it is stored, and its encode factor.

        ``packed`` are the largest magnitudes of its warp_in_team of the block, ``q`` the quarter of the
        tile with the row.
        """
        if not self.codec.has_scales:
            return self.codec.block_scale(Float32(0.0), level)
        if self.squares is not None:
            a = self.squares.amax(addresses.squares, q, mate * self.width // _QUARTER)
            return self.codec.block_scale(a, level)
        mates = 1
        while mates < self.sharing:
            offset = mates if mates < self.near else mates // self.near * 8
            other = Uint32(cute.arch.shuffle_sync_bfly(packed, offset=offset))
            packed = absmax_packed([packed, other], self.dtype, self.arch)
            mates *= 2
        return self.codec.block_scale(unpack_absmax(packed, self.dtype, self.arch), level)

    # ---- scales

    def staged(self, scales_at: Int32, mate: Int32, first: Int32) -> Int32:
        """Where in shared memory the scale of a lane's block of its first row goes."""
        if self.is_tiled:
            return scales_at + first * 16 + mate * self.width // self.codec.block
        return scales_at + first * 4

    @cute.jit
    def stage(self, stored: Uint32, staged: Int32, q: Int32, after: int, mate: Int32) -> None:
        if mate % self.sharing == 0:
            if const_expr(self.is_tiled):
                store_shared_byte(staged + q * SF_TILE_COLS + after * 16, stored)
            else:
                store_shared(staged + (q * _QUARTER + after) * 4, [stored])

    @cute.jit
    def write_scales(
        self,
        groups: GroupCursor,
        scales: cute.Tensor,
        tile: TileDescriptor,
        warp_in_team: Int32,
        scales_at: Int32,
    ) -> None:
        """The warp's rows, one a lane: zeros for those that do not exist."""
        lane = cute.arch.lane_idx()
        quarter, in_quarter = lane // _EIGHT, warp_in_team * _EIGHT + lane % _EIGHT
        row = quarter * _QUARTER + in_quarter
        place = row_in_tile(row) if self.is_tiled else row * 4
        word = load_shared(scales_at + place, 1)[0]
        target = scales.iterator.toint() + self.scale_tile(groups, scales, tile) + place
        store_global(target, [select(row < tile.num_rows, word, Uint32(0))])

    def scale_tile(self, groups: GroupCursor, scales: cute.Tensor, tile: TileDescriptor) -> Int64:
        """Bytes before the 512 of a tile's scales."""
        if self.is_tiled:
            tiles_along_k = scales.shape[len(scales.shape) - 2]
            return (Int64(tile.slot_tile) * tiles_along_k + tile.col_tile) * SF_TILE_BYTES
        row = Int64(tile.col_tile)
        if groups.offs is None:
            row += Int64(tile.group) * scales.shape[1]
        slots = Int64(scales.shape[len(scales.shape) - 1])
        return (row * slots + groups.local_tile(tile.slot_tile, tile.group) * TILE_ROWS) * 4

    # ---- codes

    @cute.jit
    def store(self, lane: LaneRows, target: Int64, words: list) -> None:
        half = _HALF_STORE // 4
        if const_expr(self.width == _HALF_STORE):
            store_global_past_l1(target, words)
        elif lane.is_wide:
            store_global_past_l1(target, words)
        else:
            store_global_past_l1(target, words[:half])
            if lane.left >= self.width:
                store_global_past_l1(target + _HALF_STORE, words[half:])
