"""The random bytes by which codes are rounded stochastically: one for each element of a copy.

``KeyedDraws`` makes them from a seed, so that a byte depends on the seed, the element and the
direction alone: not on what else is quantized with it, nor on how a kernel divides its work. One
call of Philox4x32 with 7 rounds serves a block of 16 elements:

  key     = the low and the high 32 bits of seed[0]
  counter = block & 0xFFFFFFFF,  block >> 32,  seed[1] & 0xFFFFFFFF,
              bits 32..62 of seed[1], and in bit 31 the direction: 0 rowwise, 1 columnwise
  byte of element i of the block = byte i % 4 of word i / 4, the lowest byte first

  block   = row * (K / 16) + column / 16      rowwise; rows are those of the whole tensor
      = slot row / 16 * K + column        columnwise

Where groups have shapes of their own, a group's blocks are counted as those of a uniform tensor of
this one group and come after those of the groups before it.

So a seed's second number may count steps, and bit 63 of it is not read. Both directions of a square
block hold the same codes, those of the rowwise rule.

Seven rounds are the fewest that pass BigCrush by the paper, and make three tenths of the
instructions of ten go away. Of the byte order: in the emulator's model ``cvt.rs.satfinite.e2m1x4``
rounds each of two pairs of elements by 16 bits in common. It can round by these bytes all the same,
two elements an instruction: neighbours 2j and 2j + 1 have neighbouring bytes, which one ``prmt``
puts on top of the two halves of the random bits, above zeros. How hardware assigns them is not
known here.
"""

import abc

import torch
from torch import Tensor

from ..layout.slots import TILE_ROWS
from .philox import philox4x32

#: Elements that one call of the generator serves.
BLOCK = 16
_ROUNDS = 7
_WORD = 0xFFFFFFFF


class Draws(abc.ABC):
    """Random bytes of the elements of a tensor."""

    @abc.abstractmethod
    def rows(self, rows: Tensor) -> Tensor:
        """(..., K) uint8 of the rowwise elements of ``rows``, int64 row numbers."""

    @abc.abstractmethod
    def tiles(self, tiles: Tensor) -> Tensor:
        """(t, 8, K, 16) uint8 of the columnwise blocks of ``tiles``, int64 numbers of slot tiles.

        As slots are counted in a uniform tensor, too: through all groups.
        """


class GivenDraws(Draws):
    """Bytes that the caller made: (rows, K) and (slot rows, K) uint8."""

    def __init__(self, rowwise: Tensor | None = None, columnwise: Tensor | None = None) -> None:
        self._rowwise, self._columnwise = rowwise, columnwise

    def rows(self, rows: Tensor) -> Tensor:
        if self._rowwise is None:
            raise ValueError("rowwise is None, but the rowwise copy is rounded by it")
        return self._rowwise[rows]

    def tiles(self, tiles: Tensor) -> Tensor:
        if self._columnwise is None:
            raise ValueError("columnwise is None, but the columnwise copy is rounded by it")
        slots: Tensor = self._columnwise.unflatten(0, (-1, TILE_ROWS))[tiles]
        return slots.unflatten(1, (-1, BLOCK)).movedim(2, -1)


class KeyedDraws(Draws):
    """Bytes made from a (2,) int64 seed; see the module's docstring.

    ``before`` are blocks that come before the first one, rowwise and columnwise. K is a multiple of
    16.
    """

    def __init__(self, seed: Tensor, cols: int, before: tuple[int, int] = (0, 0)) -> None:
        first, second = seed.unbind()
        self._key = (first & _WORD, (first >> 32) & _WORD)
        self._low, self._high = second & _WORD, (second >> 32) & (_WORD >> 1)
        self._cols, self._before = cols, before

    def rows(self, rows: Tensor) -> Tensor:
        blocks = self._cols // BLOCK
        block = rows.unsqueeze(-1) * blocks + torch.arange(blocks, device=rows.device)
        return self._bytes(block + self._before[0], self._high).flatten(-2)

    def tiles(self, tiles: Tensor) -> Tensor:
        per_tile = TILE_ROWS // BLOCK
        chunk = tiles[:, None] * per_tile + torch.arange(per_tile, device=tiles.device)
        block = chunk.unsqueeze(-1) * self._cols + torch.arange(self._cols, device=tiles.device)
        return self._bytes(block + self._before[1], self._high | 1 << 31)

    def _bytes(self, block: Tensor, high: Tensor) -> Tensor:
        """(..., 16) uint8 of the blocks of given numbers."""
        words = philox4x32((block & _WORD, block >> 32, self._low, high), self._key, _ROUNDS)
        return (
            (words.unsqueeze(-1) >> torch.arange(0, 32, 8, device=block.device))
            .to(torch.uint8)
            .flatten(-2)
        )
