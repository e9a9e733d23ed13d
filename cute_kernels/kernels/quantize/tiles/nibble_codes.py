"""Conversion of a tile whose codes share bytes in pairs: columns first, then rows."""

from cutlass import Int32, Uint32, const_expr, cute

from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.groups import GroupCursor
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .column_converter import ColumnConverter
from .geometry import TileAddresses, TileDescriptor, TileEncoding, TileGeometry
from .row_converter import RowConverter
from .square_blocks import SquareScaleChooser
from .team import CopyBuffers, Team


class NibbleTiles:
    """Converter of tiles to 4-bit codes."""

    def __init__(self, config: TileConfig, codec: NibbleCodec, geometry: TileGeometry, team: Team):
        self.config = config
        self.team = team
        self.columns = ColumnConverter(config, codec, geometry)
        self.rows = RowConverter(config, codec, geometry)
        self.chooser = None
        if config.fmt.is_2d and codec.searches_scale:
            self.chooser = SquareScaleChooser(config, codec, geometry)

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
            row_amax: (T,) fp32. Amax of each row. Optional.
            out: Buffers of the copies.
            tile: Descriptor of the tile.
            team: Team in the CTA.
            warp_in_team: Warp in the team.
            addresses: Shared-memory addresses of the tile.
            running_absmax: Returned unchanged.
        """
        row_encoding, column_encoding = encodings
        if const_expr(self.config.columnwise or self.config.fmt.is_2d):
            if tile.num_rows < TILE_ROWS:
                multiple = TILE_ROWS // 2 if self.columns.skips_rows else TILE_ROWS
                self.team.clear_rows(addresses.tile, tile.num_rows, team, multiple)
            if const_expr(self.chooser is not None):
                self.chooser.choose(
                    addresses.tile, addresses.squares, warp_in_team, row_encoding.global_scale
                )
                self.team.sync(team)
            if (
                not self.columns.skips_rows
                or self.columns.lane_position(warp_in_team).first_row < tile.num_rows
            ):
                self.columns.convert(
                    groups, cols, column_encoding, out.codes_t, tile, warp_in_team, addresses
                )
            elif const_expr(self.config.columnwise):
                self.columns.clear(groups, cols, out.codes_t, tile, warp_in_team, addresses)
            self.team.sync(team)
        if const_expr(self.config.rowwise):
            for row in self.rows.rows(warp_in_team):
                encoding = row_encoding
                if const_expr(self.config.uses_row_amax):
                    global_scale = self.rows.row_global_scale(row_amax, tile, row)
                    encoding = row_encoding._replace(global_scale=global_scale, table=None)
                self.rows.convert(cols, encoding, out.codes, out.scales, tile, row, addresses)
        return running_absmax
