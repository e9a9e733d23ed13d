"""Conversion of a tile whose codes are bytes: amaxes of squares, then columns, then rows."""

from cutlass import Int32, Uint32, const_expr, cute

from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.groups import GroupCursor
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .byte_columns import ByteColumnConverter
from .byte_rows import ByteRowConverter
from .geometry import TileAddresses, TileDescriptor, TileEncoding, TileGeometry
from .square_blocks import SquareBlocks
from .team import CopyBuffers, Team


class ByteTiles:
    """Converter of tiles to 8-bit codes."""

    def __init__(self, config: TileConfig, codec: ByteCodec, geometry: TileGeometry, team: Team):
        self.config = config
        self.team = team
        self.squares = SquareBlocks(config, codec) if config.fmt.is_2d else None
        self.columns = ByteColumnConverter(config, codec, geometry, self.squares)
        self.rows = ByteRowConverter(config, codec, geometry, self.squares)

    @cute.jit
    def convert(
        self,
        groups: GroupCursor,
        cols: Int32,
        encodings: tuple[TileEncoding, TileEncoding],
        row_amax: cute.Tensor | None,
        out: CopyBuffers,
        tile: TileDescriptor,
        team: Int32,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Convert a warp's share of a tile.

        Args:
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            encodings: Parameters of the rowwise and the columnwise copy.
            row_amax: Unused. Formats with 8-bit codes have no amax per row here.
            out: Buffers of the copies.
            tile: Descriptor of the tile.
            team: Team in the CTA.
            warp_in_team: Warp in the team.
            addresses: Shared-memory addresses of the tile.
            running_absmax: Packed absmax of the group so far.

        Returns:
            ``running_absmax``, raised to the largest magnitudes of the warp's share.
        """
        config, global_scale = self.config, encodings[0].global_scale
        if const_expr(config.columnwise or config.fmt.is_2d):
            if tile.num_rows < TILE_ROWS:
                self.team.clear_rows(addresses.tile, tile.num_rows, team, TILE_ROWS)
        if const_expr(config.fmt.is_2d):
            self.squares.reduce(addresses.tile, addresses.squares, warp_in_team)
            self.team.sync(team)
        if const_expr(config.columnwise):
            running_absmax = self.columns.convert(
                groups,
                cols,
                global_scale,
                out.codes_t,
                out.scales_t,
                tile,
                warp_in_team,
                addresses,
                running_absmax,
            )
        if const_expr(config.rowwise):
            running_absmax = self.rows.convert(
                groups,
                cols,
                global_scale,
                out.codes,
                out.scales,
                tile,
                warp_in_team,
                addresses,
                running_absmax,
            )
        if const_expr(self.columns.is_tiled and config.columnwise):
            self.team.sync(team)
        return running_absmax
