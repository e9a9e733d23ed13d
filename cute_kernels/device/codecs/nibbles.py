"""What formats of four bits a code share: E2M1 codes of elements times a factor, and their numbers.

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

#: Elements of a word of codes.
_PER_WORD = 8


class NibbleCodec(Codec):
    """Base of the codecs of E2M1 elements."""

    # ---- encoding

    @abc.abstractmethod
    def block_scales(
        self, a: Float32, b: Float32, level: GlobalScaleRegisters
    ) -> tuple[Uint16, Float32, Float32]:
        """The scale bytes of two blocks with amaxes ``a`` and ``b``, that of ``a`` lowest; their
        encode factors.
        """

    def block_scale(self, a: Float32, level: GlobalScaleRegisters) -> tuple[Uint32, Float32]:
        pair, factor, _ = self.block_scales(a, a, level)
        return Uint32(pair) & Uint32(0xFF), factor

    def two_scales(
        self, a: Float32, b: Float32, level: GlobalScaleRegisters
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        pair, *factors = self.block_scales(a, b, level)
        return [Uint32(pair), Uint32(pair) >> 8], factors

    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Of a multiple of eight elements."""
        step, places = self._in_rows()
        parts = [words[i : i + step] for i in range(0, len(words), step)]
        if not self.has_fp4_convert:
            return [e2m1_sm90.encode(part, places, factor, self.dtype) for part in parts]
        pairs = row_pairs(self.dtype, step)
        return [_encode(pairs, part, factor) for part in parts]

    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], swizzle_xor: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Of a multiple of eight rows."""
        codes = []
        for c, factor in enumerate(factors):
            if not self.has_fp4_convert:
                how = _in_columns(c), factor, self.dtype, swizzle_xor
                codes.append([e2m1_sm90.encode(part, *how) for part in _eights(words)])
            else:
                pairs = column_pairs(self.dtype, _PER_WORD, c)
                codes.append([_encode(pairs, part, factor) for part in _eights(words)])
        return codes

    def round_row(
        self, words: Sequence[Uint32], factor: Float32, random_words: Sequence[Uint32]
    ) -> list[Uint32]:
        step, places = self._in_rows()
        how = self.dtype, self.arch
        return [
            e2m1_stochastic.encode(
                words[i * step :][:step], places, factor, random_words[2 * i :][:2], *how
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
        how = self.dtype, self.arch, swizzle_xor
        return [
            [
                e2m1_stochastic.encode(
                    part, _in_columns(c), factor, random_words[c][2 * i :][:2], *how
                )
                for i, part in enumerate(_eights(words))
            ]
            for c, factor in enumerate(factors)
        ]

    def _in_rows(self) -> tuple[int, list[tuple[int, int]]]:
        """Words of eight elements that follow each other, and where each is: its word, and which
        part of it.
        """
        per_word = 1 if self.dtype == "float32" else 2
        return _PER_WORD // per_word, [divmod(i, per_word) for i in range(_PER_WORD)]

    # ---- decoding

    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        return [number for word in words for number in decode_e2m1(word)]


def _in_columns(part: int) -> list[tuple[int, int]]:
    """As ``_in_rows``, of a column of eight words."""
    return [(word, part) for word in range(_PER_WORD)]


def _eights(words: Sequence[Uint32]) -> list[Sequence[Uint32]]:
    return [words[i : i + _PER_WORD] for i in range(0, len(words), _PER_WORD)]


def _encode(pairs: Sequence[Pair], words: Sequence[Uint32], factor: Float32) -> Uint32:
    """Eight elements, pairs of the operands ``words``, as one word of codes, by the instruction of
    sm_100a.
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
