"""NVFP4 arithmetic, in the order that makes it exact (see ``cute_kernels.reference.nvfp4``).

Packed inputs stay packed as long as possible: the absolute maximum of 16-bit inputs is taken two at
a time, and a NaN is dropped by ``max`` on the way, as the format's rule for the amax asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Float32, Uint16, Uint32, cute

from cute_kernels.device.convert import unpack_pair
from cute_kernels.device.ptx import asm, bits_as_f32, f32_as_bits
from cute_kernels.formats import NVFP4

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "absmax_packed",
    "absmax_pairs",
    "absmax_words",
    "encode_column",
    "encode_factor",
    "encode_row",
    "fmax",
    "scale_bytes",
    "scale_pair",
    "second_level",
    "split_absmax",
    "unpack_absmax",
    "warp_max",
]

_FMAX_BITS = 0x7F7FFFFF
_RCP_ELEMENT_MAX_BITS = 0x3E2AAAAB  # fl(1/6)
_PACKED = {"bfloat16": "bf16x2", "float16": "f16x2"}


def fmax(a: Float32, b: Float32) -> Float32:
    """The larger number; a NaN is dropped."""
    return asm("max.f32 $0, $1, $2;", [Float32], [a, b])


def absmax_pairs(words: Sequence[Uint32], dtype: str) -> Uint32:
    """Elementwise absmax of words that hold two bf16 or fp16 each: two maxima, signs undefined."""
    text = f"max.xorsign.abs.{_PACKED[dtype]} $0, $1, $2;"
    words = list(words)
    while len(words) > 1:
        pairs = [asm(text, [Uint32], words[i : i + 2]) for i in range(0, len(words) - 1, 2)]
        words = pairs + words[len(words) & ~1 :]
    return words[0]


def _fmax_abs(numbers: Sequence[Float32], arch: str) -> Float32:
    """The largest magnitude; a NaN is dropped. sm_100a has a maximum of three."""
    text, step = "max.abs.f32 $0, $1, $2, $3;", 2
    if arch == "sm_90a":
        text, step = "{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }", 1
    out, numbers = Float32(0.0), [*numbers]
    numbers += numbers[-1:] * (-len(numbers) % step)
    for i in range(0, len(numbers), step):
        out = asm(text, [Float32], [out, *numbers[i : i + step]])
    return out


def split_absmax(pair: Uint32, dtype: str, arch: str) -> tuple[Float32, Float32]:
    """The two magnitudes of a packed pair of maxima, as fp32; 0 for NaN."""
    low, high = unpack_pair(pair, dtype)
    return _fmax_abs([low], arch), _fmax_abs([high], arch)


def absmax_packed(words: Sequence[Uint32], dtype: str, arch: str) -> Uint32:
    """Absmax of words, still packed: a pair for 16-bit types, one number's bits for fp32."""
    if dtype != "float32":
        return absmax_pairs(words, dtype)
    return f32_as_bits(_fmax_abs([bits_as_f32(word) for word in words], arch))


def unpack_absmax(packed: Uint32, dtype: str, arch: str) -> Float32:
    """The number that ``absmax_packed`` stands for."""
    if dtype == "float32":
        return bits_as_f32(packed)
    low, high = unpack_pair(packed, dtype)
    return _fmax_abs([low, high], arch)


def absmax_words(words: Sequence[Uint32], dtype: str, arch: str) -> Float32:
    """Largest magnitude among all elements of ``words``, as fp32; NaN is passed over."""
    return unpack_absmax(absmax_packed(words, dtype, arch), dtype, arch)


def warp_max(value: Float32) -> Float32:
    """The largest of the warp's non-negative numbers, in every lane."""
    bits = asm("mov.b32 $0, $1;", [Uint32], [value])
    return bits_as_f32(cute.arch.warp_redux_sync(bits, "max"))


def second_level(g: Float32) -> tuple[Float32, Float32]:
    """(S_dec, S_enc / 6) of a group's or row's amax ``g``.

    S_enc = 2688 / g, at most FMAX, and 1 where g is 0 or infinite.
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
    tensor_max = Float32(NVFP4().tensor_max)
    fmax_, sixth = bits_as_f32(Uint32(_FMAX_BITS)), bits_as_f32(Uint32(_RCP_ELEMENT_MAX_BITS))
    return asm(text, [Float32, Float32], [g, tensor_max, fmax_, sixth])


def scale_pair(
    a: Float32, b: Float32, s_dec: Float32, mult: Float32
) -> tuple[Uint16, Float32, Float32]:
    """Scale bytes and encode factors of two blocks with amaxes ``a`` and ``b``.

    ``cvt.satfinite`` takes infinity to 448 too, so the clamp of a * mult to FMAX needs no code.

    Returns:
        Both E4M3 bytes, that of ``a`` in the low half, and the two encode factors.
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
    fmax_ = bits_as_f32(Uint32(_FMAX_BITS))
    return asm(text, [Uint16, Float32, Float32], [a, b, s_dec, mult, fmax_])


def scale_bytes(a: Float32, b: Float32, mult: Float32) -> Uint16:
    """The scale bytes of ``scale_pair`` alone."""
    text = """{
        .reg .f32 p, q;
        mul.rn.f32 p, $1, $3;
        mul.rn.f32 q, $2, $3;
        cvt.rn.satfinite.e4m3x2.f32 $0, q, p;
    }"""
    return asm(text, [Uint16], [a, b, mult])


def encode_factor(scale_byte: Uint32, s_dec: Float32) -> Float32:
    """The encode factor of ``scale_pair`` that belongs to a scale byte."""
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
    return asm(text, [Float32], [scale_byte, s_dec, bits_as_f32(Uint32(_FMAX_BITS))])


def _encode(pairs: Sequence[str], words: Sequence[Uint32], factor: Float32) -> Uint32:
    """Eight elements as one word of codes; each text of ``pairs`` sets p to two of them in fp32."""
    body = ""
    for i, pair in enumerate(pairs):
        body += f"""{pair}
        mul.rn.f32x2 p, p, f;
        mov.b64 {{lo, hi}}, p;
        cvt.rn.satfinite.e2m1x2.f32 b{i}, hi, lo;
        """
    text = f"""{{
        .reg .b32 lo, hi;
        .reg .b16 h0, h1, h2, h3;
        .reg .b64 p, f;
        .reg .b8 b0, b1, b2, b3;
        mov.b64 f, {{${len(words) + 1}, ${len(words) + 1}}};
        {body}
        mov.b32 $0, {{b0, b1, b2, b3}};
    }}"""
    return asm(text, [Uint32], [*words, factor])


_ROW_PAIR = {
    "bfloat16": "shl.b32 lo, {w}, 16; and.b32 hi, {w}, 0xFFFF0000; mov.b64 p, {{lo, hi}};",
    "float16": "mov.b32 {{h0, h1}}, {w}; cvt.f32.f16 lo, h0; cvt.f32.f16 hi, h1; "
    "mov.b64 p, {{lo, hi}};",
}
_COLUMN_PAIR = {
    ("bfloat16", 0): "shl.b32 lo, {a}, 16; shl.b32 hi, {b}, 16; mov.b64 p, {{lo, hi}};",
    ("bfloat16", 1): "and.b32 lo, {a}, 0xFFFF0000; and.b32 hi, {b}, 0xFFFF0000; "
    "mov.b64 p, {{lo, hi}};",
    ("float16", 0): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; cvt.f32.f16 lo, h0; "
    "cvt.f32.f16 hi, h2; mov.b64 p, {{lo, hi}};",
    ("float16", 1): "mov.b32 {{h0, h1}}, {a}; mov.b32 {{h2, h3}}, {b}; cvt.f32.f16 lo, h1; "
    "cvt.f32.f16 hi, h3; mov.b64 p, {{lo, hi}};",
    ("float32", 0): "mov.b64 p, {{{a}, {b}}};",
}


def encode_row(words: Sequence[Uint32], factor: Float32, dtype: str) -> Uint32:
    """E2M1 codes of eight elements that follow each other in memory, the first in the low nibble.

    Args:
        words: 4 words of two 16-bit elements, or 8 of one fp32.
        factor: the block's encode factor.
        dtype: the elements' type.
    """
    if dtype == "float32":
        return encode_column(words, factor, dtype, 0)
    return _encode([_ROW_PAIR[dtype].format(w=f"${i + 1}") for i in range(4)], words, factor)


def encode_column(words: Sequence[Uint32], factor: Float32, dtype: str, half: int) -> Uint32:
    """E2M1 codes of one element from each of eight words, the first word's in the low nibble.

    Args:
        words: 8 words, one a row.
        factor: the block's encode factor.
        dtype: the elements' type.
        half: which of a word's two 16-bit elements; 0 for fp32.
    """
    text = _COLUMN_PAIR[dtype, half]
    pairs = [text.format(a=f"${i + 1}", b=f"${i + 2}") for i in range(0, 8, 2)]
    return _encode(pairs, words, factor)
