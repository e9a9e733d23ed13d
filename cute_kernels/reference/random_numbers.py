"""Random bytes for stochastic rounding of codes: one per element of a copy.

``SeededRandomNumbers`` computes them from a seed. A byte depends only on the seed, the element and
the direction. It does not depend on other quantized elements or on how a kernel divides its work.
One call of Philox4x32 with 7 rounds serves a block of 16 elements:

  key     = the low and the high 32 bits of seed[0]
  counter = block & 0xFFFFFFFF,  block >> 32,  seed[1] & 0xFFFFFFFF,
            bits 32..62 of seed[1], and in bit 31 the direction: 0 rowwise, 1 columnwise
  byte of element i of the block = byte i % 4 of word i / 4, the lowest byte first

  block   = row * (K / 16) + column / 16      rowwise; rows of the whole tensor
          = slot row / 16 * K + column        columnwise

If groups have shapes of their own, the blocks of a group are counted as in a uniform tensor of this
one group, and follow the blocks of the groups before it.

The second number of a seed may count steps; its bit 63 is not read. Both directions of a square
block hold the same codes, which follow the rowwise rule.

Seven rounds are the fewest that pass BigCrush according to the paper. They save three tenths of the
instructions of ten rounds. The byte order fits ``cvt.rs.satfinite.e2m1x4``. In the emulator's model
this instruction rounds each of two pairs of elements by 16 bits in common. It can round by these
bytes all the same, two elements per instruction: neighbours 2j and 2j + 1 have neighbouring bytes,
which one ``prmt`` places on top of the two halves of the random bits, above zeros. How hardware
assigns the bits is not known here.
"""

import abc

import torch
from torch import Tensor

from ..layout.slots import TILE_ROWS
from .philox import philox4x32

#: Number of elements that one call of the generator serves.
BLOCK = 16
_ROUNDS = 7
_WORD = 0xFFFFFFFF


class RandomNumbers(abc.ABC):
    """Random bytes of the elements of a tensor."""

    @abc.abstractmethod
    def rows(self, rows: Tensor) -> Tensor:
        """Return (..., K) uint8 for the rowwise elements of ``rows``, int64 row numbers."""

    @abc.abstractmethod
    def tiles(self, tiles: Tensor) -> Tensor:
        """Return (t, 8, K, 16) uint8 for the columnwise blocks of int64 slot tile numbers.

        Slot tiles are counted through all groups, also in a uniform tensor.
        """


class GivenRandomNumbers(RandomNumbers):
    """Bytes that the caller computed: (rows, K) and (slot rows, K) uint8."""

    def __init__(self, rowwise: Tensor | None = None, columnwise: Tensor | None = None) -> None:
        self._rowwise, self._columnwise = rowwise, columnwise

    def rows(self, rows: Tensor) -> Tensor:
        """Return the bytes of ``RandomNumbers.rows``."""
        if self._rowwise is None:
            raise ValueError("rowwise is None, but the rowwise copy is rounded by it")
        return self._rowwise[rows]

    def tiles(self, tiles: Tensor) -> Tensor:
        """Return the bytes of ``RandomNumbers.tiles``."""
        if self._columnwise is None:
            raise ValueError("columnwise is None, but the columnwise copy is rounded by it")
        slots: Tensor = self._columnwise.unflatten(0, (-1, TILE_ROWS))[tiles]
        return slots.unflatten(1, (-1, BLOCK)).movedim(2, -1)


class SeededRandomNumbers(RandomNumbers):
    """Bytes that follow from a (2,) int64 seed. See the module's docstring.

    Args:
        seed: (2,) int64.
        cols: K, a multiple of 16.
        before: Number of blocks before the first one, rowwise and columnwise.
    """

    def __init__(self, seed: Tensor, cols: int, before: tuple[int, int] = (0, 0)) -> None:
        key, counter = seed.unbind()
        self._key = (key & _WORD, (key >> 32) & _WORD)
        self._low, self._high = counter & _WORD, (counter >> 32) & (_WORD >> 1)
        self._cols, self._before = cols, before

    def rows(self, rows: Tensor) -> Tensor:
        """Return the bytes of ``RandomNumbers.rows``."""
        blocks = self._cols // BLOCK
        block = rows.unsqueeze(-1) * blocks + torch.arange(blocks, device=rows.device)
        return self._bytes(block + self._before[0], self._high).flatten(-2)

    def tiles(self, tiles: Tensor) -> Tensor:
        """Return the bytes of ``RandomNumbers.tiles``."""
        per_tile = TILE_ROWS // BLOCK
        chunk = tiles[:, None] * per_tile + torch.arange(per_tile, device=tiles.device)
        block = chunk.unsqueeze(-1) * self._cols + torch.arange(self._cols, device=tiles.device)
        return self._bytes(block + self._before[1], self._high | 1 << 31)

    def _bytes(self, block: Tensor, high: Tensor) -> Tensor:
        """Return (..., 16) uint8 for the blocks with the given numbers."""
        words = philox4x32((block & _WORD, block >> 32, self._low, high), self._key, _ROUNDS)
        return (
            (words.unsqueeze(-1) >> torch.arange(0, 32, 8, device=block.device))
            .to(torch.uint8)
            .flatten(-2)
        )
