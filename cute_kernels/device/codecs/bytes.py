"""Base of formats with 8-bit codes: FP8 codes of elements times a factor, and their numbers.

  code = fp8(fl(x * factor))                                    saturating, to nearest even

A power of two times a bf16 is exact in bf16, except for products below 2^-126, whose codes are zero
either way. There two elements are multiplied at once.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32, Uint64

from cute_kernels.device.ptx import asm, f32_as_bits, select

from .base import Codec
from .pairs import REGISTERS, Pair, column_pairs, products, row_pairs

#: Codes per word, and rows whose codes of a column fill two words.
_PER_WORD, _EIGHT = 4, 8


class ByteCodec(Codec):
    """Base of the codecs of FP8 elements."""

    @property
    def multiplies_bf16(self) -> bool:
        """True if bf16 elements are multiplied without conversion, two at once."""
        return self.dtype == "bfloat16" and self.fmt.has_pow2_scales

    # ---- encoding

    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Return the code words of a multiple of four consecutive elements."""
        step = _PER_WORD if self.dtype == "float32" else _PER_WORD // 2
        if self.multiplies_bf16:
            words = _products(words, _bf16_pair(factor, factor))
        factor = self._factor_operand(factor)
        pairs = row_pairs(self.dtype, step)
        return [
            self._encode(pairs, words[i : i + step], [factor]) for i in range(0, len(words), step)
        ]

    def encode_eight(self, words: Sequence[Uint32], factor: Float32) -> Uint64:
        """Return the codes of eight 16-bit elements that share a factor."""
        if self.multiplies_bf16:
            words = _products(words, _bf16_pair(factor, factor))
        return self._encode(
            row_pairs(self.dtype, len(words)), words, [self._factor_operand(factor)]
        )

    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], swizzle_xor: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Return the code words of each column of a multiple of eight rows."""
        if self.multiplies_bf16:
            words = _products(words, _bf16_pair(*factors))
        columns = []
        for half, factor in enumerate(factors):
            pairs, factor = column_pairs(self.dtype, _PER_WORD, half), self._factor_operand(factor)
            codes = [
                self._encode(pairs, words[i : i + _PER_WORD], [factor])
                for i in range(0, len(words), _PER_WORD)
            ]
            columns.append(_unswizzled(codes, swizzle_xor))
        return columns

    def encode_mixed(self, words: Sequence[Uint32], factors: Sequence[Float32]) -> list[Uint32]:
        """Return the code words of consecutive elements, each with its own factor."""
        per_word = len(factors) // len(words)
        if self.multiplies_bf16:
            words = [
                _products([word], _bf16_pair(*factors[2 * i : 2 * i + 2]))[0]
                for i, word in enumerate(words)
            ]
        step = _PER_WORD // per_word
        pairs = row_pairs(self.dtype, step)
        return [
            self._encode(pairs, words[i : i + step], factors[i * per_word :][:_PER_WORD])
            for i in range(0, len(words), step)
        ]

    def _factor_operand(self, factor: Float32) -> Float32 | Uint64:
        """Return the factor of several elements as an operand.

        If two elements are multiplied at once, a register pair holds it twice.
        """
        if self.multiplies_bf16 or not self.has_f32x2:
            return factor
        return asm("mov.b64 $0, {$1, $1};", [Uint64], [factor])

    def _encode(
        self, pairs: Sequence[Pair], words: Sequence[Uint32], factors: Sequence[Float32 | Uint64]
    ) -> Any:
        """Encode four elements as a code word, or eight as two words in one register pair.

        Args:
            pairs: PTX of pairs of elements from the operands ``words``.
            words: Words of the elements.
            factors: ``_factor_operand`` of one factor for all elements, or one factor each. They
                are unused if ``words`` are products already.
        """
        assert self.arch is not None
        factor_operands = [] if self.multiplies_bf16 else list(factors)
        names = [f"${len(words) + 1 + i}" for i in range(len(factor_operands))] * (
            _PER_WORD // len(factors)
        )
        body, is_paired = "", self.has_f32x2 and not self.multiplies_bf16
        if is_paired and len(factor_operands) == 1:
            pairs = products(pairs, names[0])
        for i, pair in enumerate(pairs):
            if is_paired and len(factor_operands) > 1:
                body += f"mov.b64 f, {{{names[2 * i]}, {names[2 * i + 1]}}};\n"
                (pair,) = products([pair], "f")
            low, high = pair.low, pair.high
            body += pair.text
            if factor_operands and not is_paired:
                body += f"mul.rn.f32 lo, {low}, {names[2 * i]}; "
                body += f"mul.rn.f32 hi, {high}, {names[2 * i + 1]};"
                low, high = "lo", "hi"
            body += f"\ncvt.rn.satfinite.{self.fmt.element.name}x2.f32 c{i}, {high}, {low};\n"
        codes = ", ".join(f"c{i}" for i in range(len(pairs)))
        text = f"""{{
			{REGISTERS}
			.reg .b16 {codes};
			{body}
			mov.b{16 * len(pairs)} $0, {{{codes}}};
		}}"""
        return asm(text, [Uint64 if len(pairs) > 2 else Uint32], [*words, *factor_operands])

    # ---- decoding

    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        """Return the fp32 numbers of four codes per word."""
        text = f"""{{
			.reg .b16 low, high, a, b;
			.reg .b32 numbers;
			mov.b32 {{low, high}}, $4;
			cvt.rn.f16x2.{self.fmt.element.name}x2 numbers, low;
			mov.b32 {{a, b}}, numbers; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
			cvt.rn.f16x2.{self.fmt.element.name}x2 numbers, high;
			mov.b32 {{a, b}}, numbers; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b;
		}}"""
        return [number for word in words for number in asm(text, [Float32] * 4, [word])]

    def decode_factor(self, scale: Float32 | None, global_scale: Float32 | None) -> Float32:
        """Return the block's scale, or the stored global scale of formats without block scales."""
        return global_scale if scale is None else scale


def _bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Return two fp32 factors, which are exact in bf16, as a pair of bf16."""
    return asm("prmt.b32 $0, $1, $2, 0x7632;", [Uint32], [f32_as_bits(low), f32_as_bits(high)])


def _products(words: Sequence[Uint32], factors: Uint32) -> list[Uint32]:
    """Return pairs of bf16 times a pair of factors."""
    return [asm("mul.rn.bf16x2 $0, $1, $2;", [Uint32], [word, factors]) for word in words]


def _unswizzled(codes: list[Uint32], swizzle_xor: Int32 | int) -> list[Uint32]:
    """Return the codes of a column, whose rows came in swizzled order, in order."""
    if isinstance(swizzle_xor, int):
        return codes
    # A swizzle_xor of 4 exchanges the words of eight rows.
    swapped = (swizzle_xor & 4) != 0
    distance = _EIGHT // _PER_WORD // 2
    return [select(swapped, codes[i ^ distance], word) for i, word in enumerate(codes)]
