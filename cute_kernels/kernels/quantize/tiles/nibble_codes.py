"""What a team does with a tile where two codes share a byte: columns first, then rows."""

from cutlass import Int32, Uint32, const_expr, cute

from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.device.groups import Grouping
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .column_converter import ColumnConverter
from .geometry import Descriptor, Encoding, TileGeometry, TilePlaces
from .row_converter import RowConverter
from .square_blocks import Chooser
from .team import Copies, Team


class NibbleTiles:
    """Converts tiles to codes of four bits."""

    def __init__(self, config: TileConfig, codec: NibbleCodec, tile: TileGeometry, team: Team):
        self.config = config
        self.team = team
        self.columns = ColumnConverter(config, codec, tile)
        self.rows = RowConverter(config, codec, tile)
        self.chooser = None
        if config.fmt.is_2d and codec.searches_scale:
            self.chooser = Chooser(config, codec, tile)

    @cute.jit
    def convert(
        self,
        groups: Grouping,
        cols: Int32,
        by: tuple[Encoding, Encoding],
        row_amax: cute.Tensor | None,
        out: Copies,
        what: Descriptor,
        team: Int32,
        part: Int32,
        places: TilePlaces,
        seen: Uint32,
    ) -> Uint32:
        """A warp's part of a tile, encoded by row and by column. ``seen`` is left as it is."""
        by_row, by_column = by
        if const_expr(self.config.columnwise or self.config.fmt.is_2d):
            if what.count < TILE_ROWS:
                multiple = TILE_ROWS // 2 if self.columns.skips_rows else TILE_ROWS
                self.team.clear_rows(places.tile, what.count, team, multiple)
            if const_expr(self.chooser is not None):
                self.chooser.choose(places.tile, places.squares, part, by_row.level)
                self.team.sync(team)
            if not self.columns.skips_rows or self.columns.place(part).first_row < what.count:
                self.columns.convert(groups, cols, by_column, out.codes_t, what, part, places)
            elif const_expr(self.config.columnwise):
                self.columns.clear(groups, cols, out.codes_t, what, part, places)
            self.team.sync(team)
        if const_expr(self.config.rowwise):
            for row in self.rows.rows(part):
                by_own = by_row
                if const_expr(self.config.uses_row_amax):
                    level = self.rows.level(row_amax, what, row)
                    by_own = by_row._replace(level=level, table=None)
                self.rows.convert(cols, by_own, out.codes, out.scales, what, row, places)
        return seen
