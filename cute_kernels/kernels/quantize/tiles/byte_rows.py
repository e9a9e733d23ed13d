"""Rowwise half of the tile quantizer for byte codes: a tile's rows to codes and scales.

A row of a tile is 128 bytes of codes, which the lanes that share the row store together. Lanes that
share a block compute its amax by shuffles. Scales go through the warp's own part of shared memory
and leave four bytes per row: that is what 128 columns have in every layout of scales.
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

#: Bytes of the widest store.
_STORE_BYTES = {"sm_90a": 16, "sm_100a": 32}
_HALF_STORE = 16
#: Rows of a warp in each quarter of a tile, and rows of a quarter.
_EIGHT, _QUARTER, _QUARTERS = 8, 32, 4


class LaneRows(NamedTuple):
    """Rows of a tile that a lane works on.

    Attributes:
        mate: Lane among those that share the rows.
        source: Shared-memory address of the first chunk of the lane's columns in its first row.
        scale_address: Shared-memory address for the scale of its block in its first row.
        live_rows: Rows of the tile from the first row on.
        target: Global address for the codes of its first row.
        pitch: Bytes from one row of codes to the next.
        is_wide: True if all columns of the lane exist, and one store takes their codes.
        remaining: Columns from the lane's first column to K.
    """

    mate: Int32
    source: Int32
    scale_address: Int32
    live_rows: Int32
    target: Int64
    pitch: Int64
    is_wide: Boolean
    remaining: Int32


class ByteRowConverter:
    """Converter of the rows of tiles in shared memory.

    A warp has eight rows of each quarter of the tile, several at a time. Eight lanes at a time read
    16-byte chunks that touch all banks: those of ``near`` mates, lanes that share a row, in
    consecutive rows.
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
        #: True if each row has scales, which go through shared memory.
        self.stages_scales = codec.has_scales and not (config.fmt.is_2d and not self.is_tiled)

    def mate_and_row(self) -> tuple[Int32, Int32]:
        """Return the lane's number among those of its row, and its row among those of the warp."""
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
        global_scale: GlobalScaleRegisters,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        tile: TileDescriptor,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Convert a warp's rows of the tile.

        Args:
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            global_scale: Global scale of the group.
            codes: (T, K) or (G, N, K). Codes.
            scales: Rowwise block scales. Optional.
            tile: Descriptor of the tile.
            warp_in_team: Warp in the team.
            addresses: Shared-memory addresses of the tile.
            running_absmax: Packed absmax of the group so far.

        Returns:
            ``running_absmax``; raised to the magnitudes of the rows if the caller gives scales.
        """
        mate, row = self.mate_and_row()
        lane_row = warp_in_team * _EIGHT + row
        pitch = Int64(codes.stride[len(codes.stride) - 2])
        col = tile.col_tile * TILE_COLS + mate * self.width
        remaining = cols - col
        lane = LaneRows(
            mate=mate,
            source=self.source(addresses.tile, mate, lane_row),
            scale_address=self.scale_address(addresses.scales, mate, lane_row),
            live_rows=tile.num_rows - lane_row,
            target=codes.iterator.toint() + (tile.first_row + lane_row) * pitch + col,
            pitch=pitch,
            is_wide=remaining >= self.width and pitch % self.width == 0,
            remaining=remaining,
        )
        # Number of quarters that have a row of this warp.
        quarters = (tile.num_rows - warp_in_team * _EIGHT + (_QUARTER - 1)) >> 5
        if const_expr(self.is_unrolled):
            for q in range_constexpr(_QUARTERS):
                if q < quarters:
                    running_absmax = self.convert_eight(
                        global_scale, lane, Int32(q), addresses, running_absmax
                    )
        else:
            quarters = cutlass.min(quarters, Int32(_QUARTERS))
            for q in cutlass.range(quarters, unroll=2):
                running_absmax = self.convert_eight(
                    global_scale, lane, q, addresses, running_absmax
                )
        if const_expr(self.codec.has_scales):
            if const_expr(self.stages_scales):
                cute.arch.sync_warp()
                self.write_scales(groups, scales, tile, warp_in_team, addresses.scales)
            else:
                self.squares.write_scale(
                    scales, global_scale, tile, warp_in_team, addresses.squares
                )
        return running_absmax

    @cute.jit
    def convert_eight(
        self,
        global_scale: GlobalScaleRegisters,
        lane: LaneRows,
        q: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Convert the warp's eight rows of quarter ``q`` and return ``running_absmax``."""
        for eight_offset in range_constexpr(0, _EIGHT, self.rows_at_once):
            row_offset = q * _QUARTER + eight_offset
            # The rows of one lane also differ in a bit of the swizzle.
            address = lane.source ^ (eight_offset * 16)
            words = self.load(address, row_offset * BOX_BYTES)
            packed = absmax_packed(words, self.dtype, self.arch)
            if const_expr(self.config.fmt.has_given_scale):
                live_absmax = select(row_offset < lane.live_rows, packed, Uint32(0))
                running_absmax = absmax_packed([running_absmax, live_absmax], self.dtype, self.arch)
            stored, factor = self.scale(packed, global_scale, q, lane.mate, addresses)
            if const_expr(self.stages_scales):
                self.stage(stored, lane.scale_address, q, eight_offset, lane.mate)
            out = self.codec.encode_row(words, factor)
            if row_offset < lane.live_rows and lane.remaining > 0:
                self.store(lane, lane.target + row_offset * lane.pitch, out)
        return running_absmax

    def source(self, tile_address: Int32, mate: Int32, lane_row: Int32) -> Int32:
        """Return the shared-memory address of a lane's first chunk in its first row."""
        chunk = mate * self.chunks
        address = tile_address + lane_row * BOX_BYTES + ((chunk ^ lane_row) % 8) * 16
        return address + mate * self.width // self.geometry.box_cols * BOX_SIZE

    def load(self, address: Int32, offset: Int32) -> list[Uint32]:
        """Load the words of a lane's columns in the row ``offset`` bytes further."""
        chunk_addresses = [(address ^ (c * 16)) + offset for c in range(self.chunks)]
        return [word for chunk_address in chunk_addresses for word in load_shared(chunk_address, 4)]

    def scale(
        self,
        packed: Uint32,
        global_scale: GlobalScaleRegisters,
        q: Int32,
        mate: Int32,
        addresses: TileAddresses,
    ) -> tuple[Uint32 | None, Float32]:
        """Compute the scale of a lane's block.

        Args:
            packed: Packed absmax of the lane's part of the block.
            global_scale: Global scale of the group.
            q: Quarter of the tile that has the row.
            mate: Lane among those of the row.
            addresses: Shared-memory addresses of the tile.

        Returns:
            The stored scale and the encode factor.
        """
        if not self.codec.has_scales:
            return self.codec.block_scale(Float32(0.0), global_scale)
        if self.squares is not None:
            amax = self.squares.amax(addresses.squares, q, mate * self.width // _QUARTER)
            return self.codec.block_scale(amax, global_scale)
        mates = 1
        while mates < self.sharing:
            offset = mates if mates < self.near else mates // self.near * 8
            neighbor = Uint32(cute.arch.shuffle_sync_bfly(packed, offset=offset))
            packed = absmax_packed([packed, neighbor], self.dtype, self.arch)
            mates *= 2
        return self.codec.block_scale(unpack_absmax(packed, self.dtype, self.arch), global_scale)

    # ---- scales

    def scale_address(self, scales_address: Int32, mate: Int32, lane_row: Int32) -> Int32:
        """Return the shared-memory address for the scale of a lane's block in its first row."""
        if self.is_tiled:
            return scales_address + lane_row * 16 + mate * self.width // self.codec.block
        return scales_address + lane_row * 4

    @cute.jit
    def stage(
        self, stored: Uint32, scale_address: Int32, q: Int32, eight_offset: int, mate: Int32
    ) -> None:
        """Store the scale of a block in shared memory, by the first of the lanes that share it."""
        if mate % self.sharing == 0:
            if const_expr(self.is_tiled):
                store_shared_byte(scale_address + q * SF_TILE_COLS + eight_offset * 16, stored)
            else:
                store_shared(scale_address + (q * _QUARTER + eight_offset) * 4, [stored])

    @cute.jit
    def write_scales(
        self,
        groups: GroupCursor,
        scales: cute.Tensor,
        tile: TileDescriptor,
        warp_in_team: Int32,
        scales_address: Int32,
    ) -> None:
        """Write the scales of the warp's rows, one row per lane; missing rows get zeros."""
        lane = cute.arch.lane_idx()
        quarter, in_quarter = lane // _EIGHT, warp_in_team * _EIGHT + lane % _EIGHT
        row = quarter * _QUARTER + in_quarter
        row_offset = row_in_tile(row) if self.is_tiled else row * 4
        word = load_shared(scales_address + row_offset, 1)[0]
        target = scales.iterator.toint() + self.scale_tile(groups, scales, tile) + row_offset
        store_global(target, [select(row < tile.num_rows, word, Uint32(0))])

    def scale_tile(self, groups: GroupCursor, scales: cute.Tensor, tile: TileDescriptor) -> Int64:
        """Return the offset in bytes of the 512 bytes of a tile's scales."""
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
        """Store the codes of a lane's columns in one row."""
        half = _HALF_STORE // 4
        if const_expr(self.width == _HALF_STORE):
            store_global_past_l1(target, words)
        elif lane.is_wide:
            store_global_past_l1(target, words)
        else:
            store_global_past_l1(target, words[:half])
            if lane.remaining >= self.width:
                store_global_past_l1(target + _HALF_STORE, words[half:])
