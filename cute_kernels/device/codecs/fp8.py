"""FP8 with one scale per group, from the amax of this tensor ("current" scaling).

scale = fl(FP8_MAX / amax), scale_inv = fl(1 / scale), code = sat_rn_fp8(fl(x * scale)). No blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cutlass import Float32, Int32, Uint32

from cute_kernels.device.codecs.base import Codec
from cute_kernels.device.codecs.pairs import REGISTERS, column_pairs, row_pairs
from cute_kernels.device.ptx import asm, bits_as_f32, select

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FP8Codec"]

_FMAX_BITS = 0x7F7FFFFF
#: Codes of a word; rows of a block of columns that two words of codes are of.
_PER_WORD, _HALF_BLOCK = 4, 8
#: Two fp32 numbers times the factor: at once, or one after the other.
_TIMES = {
    "sm_100a": "mul.rn.f32x2 p, p, f; mov.b64 {lo, hi}, p;",
    "sm_90a": "mov.b64 {lo, hi}, p; mul.rn.f32 lo, lo, f; mul.rn.f32 hi, hi, f;",
}
_FACTOR = {"sm_100a": "mov.b64 f, {{{f}, {f}}};", "sm_90a": "mov.b32 f, {f};"}


class Level(NamedTuple):
    """What the codes of a group are relative to.

    Attributes:
        scale: what an element is multiplied by.
        scale_inv: what a code is multiplied by.
    """

    scale: Float32
    scale_inv: Float32


class FP8Codec(Codec):
    """E4M3 or E5M2 codes, and a scale a group."""

    def second_level(self, amax: Float32) -> Level:
        """The scale, at most FMAX, and 1 where the amax is 0, infinite or NaN; its reciprocal."""
        text = """{
            .reg .pred ok;
            .reg .f32 s;
            div.rn.f32 s, $3, $2;
            min.f32 s, s, $4;
            setp.lt.f32 ok, $2, 0f7F800000;
            selp.f32 s, s, 0f3F800000, ok;
            setp.neu.f32 ok, $2, 0f00000000;
            selp.f32 $0, s, 0f3F800000, ok;
            rcp.rn.f32 $1, $0;
        }"""
        limit, fmax = Float32(self.fmt.element.max), bits_as_f32(Uint32(_FMAX_BITS))
        return Level(*asm(text, [Float32, Float32], [amax, limit, fmax]))

    def zero_level(self) -> Level:
        """Zeros, see ``Codec``."""
        return Level(Float32(0.0), Float32(0.0))

    def level_results(self, level: Level) -> tuple[Float32, ...]:
        """``scale_inv`` and ``scale``."""
        return tuple(getattr(level, name) for name in self.level_names)

    def block_scales(self, a: Float32, b: Float32, level: Level) -> tuple[None, Float32, Float32]:
        """No scales; the group's for both blocks."""
        return None, level.scale, level.scale

    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Code words of a block, see ``Codec``."""
        step = len(words) // self.code_words
        pairs = row_pairs(self.dtype, step)
        return [
            self._encode(pairs, words[i : i + step], factor) for i in range(0, len(words), step)
        ]

    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], twist: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Code words of each column, see ``Codec``."""
        columns = []
        for part, factor in enumerate(factors):
            pairs = column_pairs(self.dtype, _PER_WORD, part)
            codes = [
                self._encode(pairs, words[i : i + _PER_WORD], factor)
                for i in range(0, len(words), _PER_WORD)
            ]
            columns.append(_untwisted(codes, twist))
        return columns

    def _encode(self, pairs: Sequence[str], words: Sequence[Uint32], factor: Float32) -> Uint32:
        """Four elements, two texts of ``codecs.pairs`` with operands ``words``, as a code word."""
        assert self.arch is not None
        body = "".join(
            f"""{pair} {_TIMES[self.arch]}
            cvt.rn.satfinite.{self.fmt.element.name}x2.f32 c{i}, hi, lo;
            """
            for i, pair in enumerate(pairs)
        )
        registers = REGISTERS
        if self.arch == "sm_90a":
            registers = registers.replace(".b64 p, f;", ".b64 p; .reg .f32 f;")
            registers = registers.replace(".b32 lo, hi;", ".f32 lo, hi;")
        text = f"""{{
            {registers}
            .reg .b16 c0, c1;
            {_FACTOR[self.arch].format(f=f"${len(words) + 1}")}
            {body}
            mov.b32 $0, {{c0, c1}};
        }}"""
        return asm(text, [Uint32], [*words, factor])

    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        """The numbers of the codes, see ``Codec``; fp16 holds all of them."""
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

    def decode_factor(self, scale: Float32 | None, level: Float32 | None) -> Float32:
        """``scale_inv``."""
        return level


def _untwisted(codes: list[Uint32], twist: Int32 | int) -> list[Uint32]:
    """Codes of a column whose rows came in twisted order, see ``Codec``, in order."""
    if isinstance(twist, int):
        return codes
    # A twist of 2 trades the halves of words, one of 4 the words of eight rows.
    turn = (Uint32(twist) & Uint32(2)) * Uint32(8)
    turned = [asm("shf.l.wrap.b32 $0, $1, $1, $2;", [Uint32], [word, turn]) for word in codes]
    swapped = (twist & 4) != 0
    distance = _HALF_BLOCK // _PER_WORD // 2
    return [select(swapped, turned[i ^ distance], word) for i, word in enumerate(turned)]
