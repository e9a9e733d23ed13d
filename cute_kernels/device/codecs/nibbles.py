"""Base of formats with 4-bit codes: E2M1 codes of elements times a factor, and their numbers.

  code = e2m1(fl(x * factor))                                   saturating, to nearest even

sm_100a encodes with its own instruction, sm_90a as ``e2m1_sm90`` says.
"""

import abc
from collections.abc import Sequence

from cutlass import Float32, Int32, Uint16, Uint32

from ..convert import decode_e2m1
from ..ptx import asm
from . import e2m1_sm90, e2m1_stochastic
from .base import Codec, GlobalScaleRegisters
from .pairs import REGISTERS, Pair, column_pairs, products, row_pairs

#: Codes per word.
_PER_WORD = 8


class NibbleCodec(Codec):
    """Base of the codecs of E2M1 elements."""

    # ---- encoding

    @abc.abstractmethod
    def block_scales(
        self, a: Float32, b: Float32, global_scale: GlobalScaleRegisters
    ) -> tuple[Uint16, Float32, Float32]:
        """Return the scale bytes of two blocks, and their encode factors.

        ``a`` and ``b`` are the amaxes of the blocks; the scale of ``a`` is the lower byte.
        """

    def block_scale(self, a: Float32, global_scale: GlobalScaleRegisters) -> tuple[Uint32, Float32]:
        """Return the scale of a block with amax ``a``, and its encode factor."""
        pair, factor, _ = self.block_scales(a, a, global_scale)
        return Uint32(pair) & Uint32(0xFF), factor

    def two_scales(
        self, a: Float32, b: Float32, global_scale: GlobalScaleRegisters
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        """Return ``block_scale`` of two blocks; bits above a scale may be arbitrary."""
        pair, *factors = self.block_scales(a, b, global_scale)
        return [Uint32(pair), Uint32(pair) >> 8], factors

    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Return the code words of a multiple of eight consecutive elements."""
        step, positions = self._row_positions()
        chunks = [words[i : i + step] for i in range(0, len(words), step)]
        if not self.has_fp4_convert:
            return [e2m1_sm90.encode(chunk, positions, factor, self.dtype) for chunk in chunks]
        pairs = row_pairs(self.dtype, step)
        return [_encode(pairs, chunk, factor) for chunk in chunks]

    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], swizzle_xor: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Return the code words of each column of a multiple of eight rows."""
        codes = []
        for c, factor in enumerate(factors):
            if not self.has_fp4_convert:
                codes.append(
                    [
                        e2m1_sm90.encode(
                            chunk, _column_positions(c), factor, self.dtype, swizzle_xor
                        )
                        for chunk in _eights(words)
                    ]
                )
            else:
                pairs = column_pairs(self.dtype, _PER_WORD, c)
                codes.append([_encode(pairs, chunk, factor) for chunk in _eights(words)])
        return codes

    def round_row(
        self, words: Sequence[Uint32], factor: Float32, random_words: Sequence[Uint32]
    ) -> list[Uint32]:
        """Return ``encode_row``, rounded stochastically."""
        step, positions = self._row_positions()
        return [
            e2m1_stochastic.encode(
                words[i * step :][:step],
                positions,
                factor,
                random_words[2 * i :][:2],
                self.dtype,
                self.arch,
            )
            for i in range(len(words) // step)
        ]

    def round_columns(
        self,
        words: Sequence[Uint32],
        factors: Sequence[Float32],
        random_words: Sequence[Sequence[Uint32]],
        swizzle_xor: Int32 | int = 0,
    ) -> list[list[Uint32]]:
        """Return ``encode_columns``, rounded stochastically."""
        return [
            [
                e2m1_stochastic.encode(
                    chunk,
                    _column_positions(c),
                    factor,
                    random_words[c][2 * i :][:2],
                    self.dtype,
                    self.arch,
                    swizzle_xor,
                )
                for i, chunk in enumerate(_eights(words))
            ]
            for c, factor in enumerate(factors)
        ]

    def _row_positions(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the words of eight consecutive elements, and the position of each element.

        A position is a word and the element's half of the word.
        """
        per_word = 1 if self.dtype == "float32" else 2
        return _PER_WORD // per_word, [divmod(i, per_word) for i in range(_PER_WORD)]

    # ---- decoding

    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        """Return the fp32 numbers of eight codes per word."""
        return [number for word in words for number in decode_e2m1(word)]


def _column_positions(half: int) -> list[tuple[int, int]]:
    """Return the positions of eight elements of one column, one per word."""
    return [(word, half) for word in range(_PER_WORD)]


def _eights(words: Sequence[Uint32]) -> list[Sequence[Uint32]]:
    """Return ``words`` in groups of eight."""
    return [words[i : i + _PER_WORD] for i in range(0, len(words), _PER_WORD)]


def _encode(pairs: Sequence[Pair], words: Sequence[Uint32], factor: Float32) -> Uint32:
    """Encode eight elements as one word of codes, by the instruction of sm_100a.

    Args:
        pairs: PTX of pairs of elements from the operands ``words``.
        words: Words of the elements.
        factor: Encode factor.
    """
    body = ""
    for i, pair in enumerate(products(pairs, "f")):
        body += f"{pair.text}\ncvt.rn.satfinite.e2m1x2.f32 b{i}, {pair.high}, {pair.low};\n"
    text = f"""{{
		{REGISTERS}
		.reg .b8 b0, b1, b2, b3;
		mov.b64 f, {{${len(words) + 1}, ${len(words) + 1}}};
		{body}
		mov.b32 $0, {{b0, b1, b2, b3}};
	}}"""
    return asm(text, [Uint32], [*words, factor])
