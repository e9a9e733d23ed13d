"""Random bytes of the columns of a tile, see ``cute_kernels.reference.random_numbers``."""

import dataclasses

from cutlass import Int32, Int64, Uint32

from cute_kernels.device.philox import RNG_BLOCK, Seed, random_block
from cute_kernels.device.ptx import asm, select
from cute_kernels.layout.slots import TILE_ROWS

from .geometry import TILE_COLS, TileDescriptor


@dataclasses.dataclass(frozen=True)
class ColumnRandomNumbers:
    """Those of a lane's columns, whose words are read in a twisted order; a trace-time object.

    Both copies of square blocks have the same codes: theirs are drawn by row.

    Attributes:
        seed: of the direction by which bytes are drawn.
        is_2d: whether that is by row.
        origin: the number of the lane's first block.
        step: from there to that of the next 16 rows of the column, or to that of the next row.
        column: the first column.
        per_word: columns of a word.
        swizzle_xor: see ``Codec.encode_columns``.
    """

    seed: Seed
    is_2d: bool
    origin: Int64
    step: Int32
    column: Int32
    per_word: int
    swizzle_xor: Int32 | int

    @classmethod
    def of(
        cls,
        seed: Seed,
        is_2d: bool,
        cols: Int32,
        tile: TileDescriptor,
        place: tuple[Int32, Int32, Int32 | int],
        per_word: int,
    ) -> "ColumnRandomNumbers":
        """Those of a lane whose ``place`` in the tile is (first row, first column, swizzle_xor)."""
        row, col, swizzle_xor = place
        column = tile.col_tile * TILE_COLS + col
        if is_2d:
            step, block = cols // RNG_BLOCK, column // RNG_BLOCK
            origin = Int64(tile.first_row + row) * step + block
        else:
            step = cols
            origin = (
                Int64(tile.slot_tile) * (TILE_ROWS // RNG_BLOCK) + row // RNG_BLOCK
            ) * step + column
        return cls(seed, is_2d, origin, step, column, per_word, swizzle_xor)

    def block(self, index: int) -> list[list[Uint32]]:
        """Four words a column of the lane's block ``index``, a byte a word that it reads."""
        if self.is_2d:
            return self._of_rows(index * RNG_BLOCK)
        first = self.origin + Int64(self.step) * index
        drawn = [random_block(self.seed, first + c) for c in range(self.per_word)]
        if isinstance(self.swizzle_xor, int):
            return drawn
        orders = [Uint32(o) ^ Uint32(self.swizzle_xor) * Uint32(0x1111) for o in (0x3210, 0x7654)]
        text = "prmt.b32 $0, $1, $2, $3;"
        return [
            [asm(text, [Uint32], [*words[i : i + 2], o]) for i in (0, 2) for o in orders]
            for words in drawn
        ]

    def _of_rows(self, first: int) -> list[list[Uint32]]:
        """Each row's bytes are drawn for sixteen columns, of which the lane takes its own."""
        out = [[Uint32(0)] * 4 for _ in range(self.per_word)]
        word, byte = self.column % RNG_BLOCK // 4, self.column % 4
        for r in range(RNG_BLOCK):
            row = r // 8 * 8 + (r % 8 ^ self.swizzle_xor) + first
            a, b, c, d = random_block(self.seed, self.origin + Int64(self.step) * row)
            odd = word % 2 != 0
            drawn = select(word >= 2, select(odd, d, c), select(odd, b, a)) >> Uint32(byte * 8)
            for of_column in out:
                of_column[r // 4] |= (drawn & Uint32(0xFF)) << (r % 4 * 8)
                drawn = drawn >> 8
        return out
