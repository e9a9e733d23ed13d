"""Random numbers for stochastic rounding: one byte per element of a copy.

Philox4x32 with seven rounds. ``cute_kernels.reference.random_numbers`` says which key, counter and
byte an element has. Values that do not depend on the block of 16 elements are computed once, see
``Seed``.
"""

from typing import NamedTuple

from cutlass import Int64, Uint32, cute

from .ptx import asm

#: Elements of a block.
RNG_BLOCK = 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


class Seed(NamedTuple):
    """Seed and direction, as far as they can be evaluated before the block is known.

    Attributes:
        keys: Both words of the first round's key.
        word0: First word that the first round returns or combines by XOR.
        word1: Second word.
        word2: Third word.
        block_offset: Blocks of other tensors with the same seed that come before. None if absent.
    """

    keys: tuple[Uint32, Uint32]
    word0: Uint32
    word1: Uint32
    word2: Uint32
    block_offset: Int64 | None


def seed_of(seed: cute.Tensor, columnwise: bool, block_offset: Int64 | None) -> Seed:
    """Return the ``Seed`` of one direction.

    Args:
        seed: (2,) int64.
        columnwise: True for the columnwise copy.
        block_offset: Blocks of other tensors that come before, or None.
    """
    keys, counters = _words(seed[0]), _words(seed[1])
    high, low = _product(counters[0], _MULTIPLIERS[1])
    high_word = (counters[1] & Uint32(0x7FFFFFFF)) | Uint32(columnwise << 31)
    return Seed(keys, high ^ keys[0], low, high_word ^ keys[1], block_offset)


def random_block(seed: Seed, block: Int64) -> list[Uint32]:
    """Return the bytes of a block of 16 elements in four words, the first in the lowest bits."""
    number = _words(block if seed.block_offset is None else block + seed.block_offset)
    high, low = _product(number[0], _MULTIPLIERS[0])
    c = [number[1] ^ seed.word0, seed.word1, high ^ seed.word2, low]
    for i in range(1, _ROUNDS):
        steps = [Uint32(i * step & 0xFFFFFFFF) for step in _WEYL]
        keys = [key + step for key, step in zip(seed.keys, steps, strict=True)]
        product0, product2 = _product(c[0], _MULTIPLIERS[0]), _product(c[2], _MULTIPLIERS[1])
        c = [
            _xor(product2[0], c[1], keys[0]),
            product2[1],
            _xor(product0[0], c[3], keys[1]),
            product0[1],
        ]
    return c


def _words(number: Int64) -> tuple[Uint32, Uint32]:
    """Return the low and the high word of 64 bits."""
    return asm("mov.b64 {$0, $1}, $2;", [Uint32, Uint32], [Int64(number)])


def _product(a: Uint32, b: int) -> tuple[Uint32, Uint32]:
    """Return the high and the low word of a product."""
    text = f"{{ .reg .b64 p; mul.wide.u32 p, $2, {b:#x}; mov.b64 {{$1, $0}}, p; }}"
    return asm(text, [Uint32, Uint32], [a])


def _xor(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """Return the XOR of three words."""
    return asm("lop3.b32 $0, $1, $2, $3, 0x96;", [Uint32], [a, b, c])
