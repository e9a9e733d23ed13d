"""NVFP4 arithmetic, in the order that makes it exact (see ``cute_kernels.reference``).

``nibbles`` encodes elements. This module computes their scales.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Float32, Int32, Uint16, Uint32, cute

from ...formats import NVFP4
from ..convert import decode_e4m3_pair, unpack_words
from ..ptx import asm, bits_as_f32
from .nibbles import NibbleCodec
from .nvfp4_four_over_six import (
    Candidate,
    FourOverSixGlobalScale,
    better,
    candidates,
    error,
    is_far,
)

_FMAX_BITS = 0x7F7FFFFF
_ADD = "add.rn.f32 $0, $1, $2;"
_RCP_ELEMENT_MAX_BITS = 0x3E2AAAAB  # fl(1/6)
#: Scale bytes that are not negative: entries of a table of encode factors.
_SCALE_CODES = 128


class NVFP4GlobalScale(NamedTuple):
    """Global scale in registers.

    Attributes:
        s_dec: Decode scale: the fp32 factor of a block scale.
        mult: fp32 factor of a block's amax that gives its scale.
    """

    s_dec: Float32
    mult: Float32


class NVFP4Codec(NibbleCodec):
    """E2M1 codes, E4M3 scales of 16 and an amax per group or row."""

    fmt: NVFP4

    def __init__(self, fmt: NVFP4, dtype: str, arch: str | None = None):
        super().__init__(fmt, dtype, arch)
        #: A rounded reciprocal takes about ten instructions. Kernels without packed fp32
        #: instructions look the encode factors up instead.
        self.table_size = 0 if arch is None or self.has_f32x2 else _SCALE_CODES

    def global_scale(self, amax: Float32) -> NVFP4GlobalScale | FourOverSixGlobalScale:
        """Return S_dec and S_enc / 6.

        S_enc = 2688 / amax, at most FMAX, and 1 if S_enc or the amax is 0. S_enc is 0 if the amax
        is infinite.
        """
        text = """{
			.reg .pred zero;
			.reg .f32 enc;
			div.rn.f32 enc, $3, $2;
			min.f32 enc, enc, $4;
			setp.eq.f32 zero, enc, 0f00000000;
			selp.f32 enc, 0f3F800000, enc, zero;
			setp.eq.f32 zero, $2, 0f00000000;
			selp.f32 enc, 0f3F800000, enc, zero;
			rcp.rn.f32 $0, enc;
			mul.rn.f32 $1, enc, $5;
		}"""
        tensor_max = Float32(self.fmt.tensor_max)
        fmax, sixth = bits_as_f32(Uint32(_FMAX_BITS)), bits_as_f32(Uint32(_RCP_ELEMENT_MAX_BITS))
        factor = Float32(1.0) if self.searches_scale else sixth
        s_dec, mult = asm(text, [Float32, Float32], [amax, tensor_max, fmax, factor])
        if self.searches_scale:
            return FourOverSixGlobalScale(s_dec, Float32(1.0), mult, amax, is_far(amax))
        return NVFP4GlobalScale(s_dec, mult)

    def zero_global_scale(self) -> NVFP4GlobalScale | FourOverSixGlobalScale:
        """Return zeros."""
        if self.searches_scale:
            return FourOverSixGlobalScale(*[Float32(0.0)] * 4, Int32(0))
        return NVFP4GlobalScale(Float32(0.0), Float32(0.0))

    def block_scales(
        self, a: Float32, b: Float32, global_scale: NVFP4GlobalScale
    ) -> tuple[Uint16, Float32, Float32]:
        """Return E4M3 bytes and encode factors, see ``NibbleCodec``.

        ``cvt.satfinite`` turns infinity into 448, too, so the clamp of a * mult to FMAX needs no
        code.
        """
        text = """{
			.reg .f32 p, q;
			.reg .b32 h;
			.reg .b16 lo, hi;
			mul.rn.f32 p, $3, $6;
			mul.rn.f32 q, $4, $6;
			cvt.rn.satfinite.e4m3x2.f32 $0, q, p;
			cvt.rn.f16x2.e4m3x2 h, $0;
			mov.b32 {lo, hi}, h;
			cvt.f32.f16 p, lo;
			cvt.f32.f16 q, hi;
			mul.rn.f32 p, p, $5;
			mul.rn.f32 q, q, $5;
			rcp.rn.f32 p, p;
			rcp.rn.f32 q, q;
			min.f32 $1, p, $7;
			min.f32 $2, q, $7;
		}"""
        fmax = bits_as_f32(Uint32(_FMAX_BITS))
        return asm(
            text, [Uint16, Float32, Float32], [a, b, global_scale.s_dec, global_scale.mult, fmax]
        )

    def scale_bytes(self, a: Float32, b: Float32, global_scale: NVFP4GlobalScale) -> Uint16:
        """Return the E4M3 bytes of two blocks with amaxes ``a`` and ``b``."""
        text = """{
			.reg .f32 p, q;
			mul.rn.f32 p, $1, $3;
			mul.rn.f32 q, $2, $3;
			cvt.rn.satfinite.e4m3x2.f32 $0, q, p;
		}"""
        return asm(text, [Uint16], [a, b, global_scale.mult])

    def encode_factor(self, index: Uint32, global_scale: NVFP4GlobalScale) -> Float32:
        """Return the encode factor of the E4M3 byte ``index``."""
        text = """{
			.reg .f32 q;
			.reg .b32 h;
			.reg .b16 lo, hi;
			cvt.u16.u32 lo, $1;
			cvt.rn.f16x2.e4m3x2 h, lo;
			mov.b32 {lo, hi}, h;
			cvt.f32.f16 q, lo;
			mul.rn.f32 q, q, $2;
			rcp.rn.f32 q, q;
			min.f32 $0, q, $3;
		}"""
        return asm(text, [Float32], [index, global_scale.s_dec, bits_as_f32(Uint32(_FMAX_BITS))])

    def choose_row(
        self, words: Sequence[Uint32], a: Float32, global_scale: NVFP4GlobalScale
    ) -> Float32:
        """Return the scale with the smaller error of a block of a row with amax ``a``."""
        pair = candidates(a, global_scale)
        return better(self._row_errors(words, pair, global_scale), pair)

    def choose_columns(
        self, words: Sequence[Uint32], a: Sequence[Float32], global_scale: NVFP4GlobalScale
    ) -> list[Float32]:
        """Return the scales with the smaller errors of a block of rows, one per column."""
        pairs = [candidates(x, global_scale) for x in a]
        columns = zip(*(unpack_words([word], self.dtype) for word in words), strict=True)
        codes = [
            self.encode_columns(words, [candidate_pair[k].factor for candidate_pair in pairs])
            for k in range(2)
        ]
        return [
            better(
                [self._error(codes[k][c], x, pairs[c][k], global_scale) for k in range(2)], pairs[c]
            )
            for c, x in enumerate(columns)
        ]

    def choose_square(
        self, words: Sequence[Uint32], a: Float32, global_scale: NVFP4GlobalScale
    ) -> Float32:
        """Return the scale with the smaller error of a square block; 16 lanes have a row each."""
        pair = candidates(a, global_scale)
        errors = self._row_errors(words, pair, global_scale)
        for distance in (8, 4, 2, 1):
            shuffled = [cute.arch.shuffle_sync_bfly(e, offset=distance) for e in errors]
            errors = [
                asm(_ADD, [Float32], summands) for summands in zip(errors, shuffled, strict=True)
            ]
        return better(errors, pair)

    def _row_errors(
        self,
        words: Sequence[Uint32],
        pair: tuple[Candidate, Candidate],
        global_scale: NVFP4GlobalScale,
    ) -> list[Float32]:
        """Return the errors of a block of a row with both candidates."""
        numbers = unpack_words(words, self.dtype)
        return [
            self._error(self.encode_row(words, c.factor), numbers, c, global_scale) for c in pair
        ]

    def _error(
        self,
        codes: Sequence[Uint32],
        numbers: Sequence[Float32],
        candidate: Candidate,
        global_scale: NVFP4GlobalScale,
    ) -> Float32:
        """Return the error of codes of ``numbers`` with a candidate."""
        return error(self.decode(codes), numbers, candidate.scale, global_scale, self.fmt)

    def decode_scales(self, pair: Uint32) -> tuple[Float32, Float32]:
        """Return the fp32 numbers of two E4M3 bytes."""
        return decode_e4m3_pair(pair)

    def decode_factor(self, scale: Float32 | None, global_scale: Float32 | None) -> Float32:
        """Return fl(fl(scale * amax) * fl(1/2688)), see ``Codec``."""
        return (scale * global_scale) * Float32(self.fmt.global_scale.factor)
