"""Random numbers for the columns of a tile, see ``cute_kernels.reference.random_numbers``."""

import dataclasses

from cutlass import Int32, Int64, Uint32

from cute_kernels.device.philox import RNG_BLOCK, Seed, random_block
from cute_kernels.device.ptx import asm, select
from cute_kernels.layout.slots import TILE_ROWS

from .geometry import TILE_COLS, TileDescriptor


@dataclasses.dataclass(frozen=True)
class ColumnRandomNumbers:
    """Random numbers for a lane's columns, as a trace-time object.

    The lane reads rows in swizzled order. Both copies of square blocks have the same codes: they
    use the random numbers of rows.

    Attributes:
        seed: Seed of the direction.
        is_2d: True if the numbers are those of rows.
        origin: Number of the lane's first random block.
        step: Distance to the random block of the next 16 rows of the column, or of the next row.
        column: First column.
        per_word: Columns per word.
        swizzle_xor: See ``Codec.encode_columns``.
    """

    seed: Seed
    is_2d: bool
    origin: Int64
    step: Int32
    column: Int32
    per_word: int
    swizzle_xor: Int32 | int

    @classmethod
    def create(
        cls,
        seed: Seed,
        is_2d: bool,
        cols: Int32,
        tile: TileDescriptor,
        position: tuple[Int32, Int32, Int32 | int],
        per_word: int,
    ) -> "ColumnRandomNumbers":
        """Return the numbers of a lane at ``position`` = (first row, first column, swizzle_xor)."""
        row, col, swizzle_xor = position
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
        """Return the random numbers of the lane's block ``index``.

        Returns:
            Four words per column, one byte per row, in the order in which the lane reads rows.
        """
        if self.is_2d:
            return self._row_blocks(index * RNG_BLOCK)
        first_block = self.origin + Int64(self.step) * index
        random_words = [random_block(self.seed, first_block + c) for c in range(self.per_word)]
        if isinstance(self.swizzle_xor, int):
            return random_words
        orders = [Uint32(o) ^ Uint32(self.swizzle_xor) * Uint32(0x1111) for o in (0x3210, 0x7654)]
        text = "prmt.b32 $0, $1, $2, $3;"
        return [
            [asm(text, [Uint32], [*words[i : i + 2], o]) for i in (0, 2) for o in orders]
            for words in random_words
        ]

    def _row_blocks(self, first_row: int) -> list[list[Uint32]]:
        """Generate each row's numbers for sixteen columns and select those of the lane.

        ``first_row`` is the first of the 16 rows.
        """
        out = [[Uint32(0)] * 4 for _ in range(self.per_word)]
        word, byte = self.column % RNG_BLOCK // 4, self.column % 4
        for r in range(RNG_BLOCK):
            row = r // 8 * 8 + (r % 8 ^ self.swizzle_xor) + first_row
            a, b, c, d = random_block(self.seed, self.origin + Int64(self.step) * row)
            odd = word % 2 != 0
            row_bytes = select(word >= 2, select(odd, d, c), select(odd, b, a)) >> Uint32(byte * 8)
            for column_words in out:
                column_words[r // 4] |= (row_bytes & Uint32(0xFF)) << (r % 4 * 8)
                row_bytes = row_bytes >> 8
        return out
