"""The random bytes by which codes are rounded stochastically: one for each element of a copy.

Philox4x32 with seven rounds; ``cute_kernels.reference.random_numbers`` says which key, counter and byte an
element has. What does not depend on the block of 16 elements is computed once, see ``Seed``.
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
    """A seed and a direction: the two words of the first round's key, and what that round gives or
    xors with.

    ``before`` are blocks that others with the seed have; None for none.
    """

    keys: tuple[Uint32, Uint32]
    first: Uint32
    second: Uint32
    third: Uint32
    before: Int64 | None


def seed_of(seed: cute.Tensor, columnwise: bool, before: Int64 | None) -> Seed:
    """What (2,) int64 ``seed`` says of one direction."""
    keys, counters = _words(seed[0]), _words(seed[1])
    high, low = _product(counters[0], _MULTIPLIERS[1])
    last = (counters[1] & Uint32(0x7FFFFFFF)) | Uint32(columnwise << 31)
    return Seed(keys, high ^ keys[0], low, last ^ keys[1], before)


def random_block(seed: Seed, block: Int64) -> list[Uint32]:
    """The bytes of the 16 elements of a block in four words, the first in the lowest bits."""
    number = _words(block if seed.before is None else block + seed.before)
    high, low = _product(number[0], _MULTIPLIERS[0])
    c = [number[1] ^ seed.first, seed.second, high ^ seed.third, low]
    for i in range(1, _ROUNDS):
        steps = [Uint32(i * step & 0xFFFFFFFF) for step in _WEYL]
        keys = [key + step for key, step in zip(seed.keys, steps, strict=True)]
        first, second = _product(c[0], _MULTIPLIERS[0]), _product(c[2], _MULTIPLIERS[1])
        c = [_xor(second[0], c[1], keys[0]), second[1], _xor(first[0], c[3], keys[1]), first[1]]
    return c


def _words(number: Int64) -> tuple[Uint32, Uint32]:
    return asm("mov.b64 {$0, $1}, $2;", [Uint32, Uint32], [Int64(number)])


def _product(a: Uint32, b: int) -> tuple[Uint32, Uint32]:
    text = f"{{ .reg .b64 p; mul.wide.u32 p, $2, {b:#x}; mov.b64 {{$1, $0}}, p; }}"
    return asm(text, [Uint32, Uint32], [a])


def _xor(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    return asm("lop3.b32 $0, $1, $2, $3, 0x96;", [Uint32], [a, b, c])
