"""What a team does with a tile where a code is a byte: squares, then columns, then rows."""

from cutlass import Int32, Uint32, const_expr, cute

from cute_kernels.device.codecs.bytes import ByteCodec
from cute_kernels.device.groups import Grouping
from cute_kernels.layout.slots import TILE_ROWS

from ..config import TileConfig
from .byte_columns import ByteColumnConverter
from .byte_rows import ByteRowConverter
from .geometry import Descriptor, Encoding, TileGeometry, TilePlaces
from .square_blocks import Squares
from .team import Copies, Team


class ByteTiles:
    """Converts tiles to codes of eight bits."""

    def __init__(self, config: TileConfig, codec: ByteCodec, tile: TileGeometry, team: Team):
        self.config = config
        self.team = team
        self.squares = Squares(config, codec) if config.fmt.is_2d else None
        self.columns = ByteColumnConverter(config, codec, tile, self.squares)
        self.rows = ByteRowConverter(config, codec, tile, self.squares)

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
        """A warp's part of a tile; gives ``seen`` with the largest magnitudes of it, packed."""
        config, level = self.config, by[0].level
        if const_expr(config.columnwise or config.fmt.is_2d):
            if what.count < TILE_ROWS:
                self.team.clear_rows(places.tile, what.count, team, TILE_ROWS)
        if const_expr(config.fmt.is_2d):
            self.squares.reduce(places.tile, places.squares, part)
            self.team.sync(team)
        if const_expr(config.columnwise):
            copy = (out.codes_t, out.scales_t)
            seen = self.columns.convert(groups, cols, level, *copy, what, part, places, seen)
        if const_expr(config.rowwise):
            copy = (out.codes, out.scales)
            seen = self.rows.convert(groups, cols, level, *copy, what, part, places, seen)
        if const_expr(self.columns.is_tiled and config.columnwise):
            self.team.sync(team)
        return seen
