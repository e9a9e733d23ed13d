"""Largest magnitudes of packed inputs, of lanes and of warps.

Packed inputs stay packed as long as possible: the absolute maximum of 16-bit inputs is taken two at
a time. A NaN is dropped by ``max`` on the way, as the rule of most formats for their amaxes asks;
with ``nan`` it is the result (``Format.amaxes_keep_nan``), by as many instructions.
"""

from collections.abc import Sequence

from cutlass import Float32, Uint32, cute

from ..arch import get_arch
from .convert import unpack_pair
from .ptx import asm, bits_as_f32, f32_as_bits

_PACKED = {"bfloat16": "bf16x2", "float16": "f16x2"}
#: The modifier of a maximum that is NaN where an operand is.
_NAN = {False: "", True: ".NaN"}


def fmax(a: Float32, b: Float32, nan: bool = False) -> Float32:
    """The larger number; a NaN is dropped, or with ``nan`` the result."""
    return asm(f"max{_NAN[nan]}.f32 $0, $1, $2;", [Float32], [a, b])


def absmax_pairs(words: Sequence[Uint32], dtype: str, nan: bool = False) -> Uint32:
    """Elementwise absmax of words that hold two bf16 or fp16 each: two maxima, signs undefined."""
    text = f"max{_NAN[nan]}.xorsign.abs.{_PACKED[dtype]} $0, $1, $2;"
    words = list(words)
    while len(words) > 1:
        pairs = [asm(text, [Uint32], words[i : i + 2]) for i in range(0, len(words) - 1, 2)]
        words = pairs + words[len(words) & ~1 :]
    return words[0]


def _fmax_abs(numbers: Sequence[Float32], arch: str, nan: bool) -> Float32:
    """Return the largest magnitude."""
    text, step = f"max{_NAN[nan]}.abs.f32 $0, $1, $2, $3;", 2
    if not get_arch(arch).has_three_input_max:
        text, step = f"{{ .reg .f32 t; abs.f32 t, $2; max{_NAN[nan]}.f32 $0, $1, t; }}", 1
    out, numbers = Float32(0.0), [*numbers]
    numbers += numbers[-1:] * (-len(numbers) % step)
    for i in range(0, len(numbers), step):
        out = asm(text, [Float32], [out, *numbers[i : i + step]])
    return out


def split_absmax(pair: Uint32, dtype: str, arch: str, nan: bool = False) -> tuple[Float32, Float32]:
    """The two magnitudes of a packed pair of maxima, as fp32; 0 for NaN, unless with ``nan``."""
    low, high = unpack_pair(pair, dtype)
    return _fmax_abs([low], arch, nan), _fmax_abs([high], arch, nan)


def absmax_packed(words: Sequence[Uint32], dtype: str, arch: str, nan: bool = False) -> Uint32:
    """Absmax of words, still packed: a pair for 16-bit types, one number's bits for fp32."""
    if dtype != "float32":
        return absmax_pairs(words, dtype, nan)
    return f32_as_bits(_fmax_abs([bits_as_f32(word) for word in words], arch, nan))


def unpack_absmax(packed: Uint32, dtype: str, arch: str, nan: bool = False) -> Float32:
    """The number that ``absmax_packed`` stands for."""
    if dtype == "float32":
        return bits_as_f32(packed)
    low, high = unpack_pair(packed, dtype)
    return _fmax_abs([low, high], arch, nan)


def absmax_words(words: Sequence[Uint32], dtype: str, arch: str, nan: bool = False) -> Float32:
    """Largest magnitude among all elements of ``words``, as fp32;

    NaN is passed over, or with ``nan`` the result.
    """
    return unpack_absmax(absmax_packed(words, dtype, arch, nan), dtype, arch, nan)


def warp_max(value: Float32) -> Float32:
    """The largest of the warp's non-negative numbers, in every lane; a NaN is larger than others."""
    bits = asm("mov.b32 $0, $1;", [Uint32], [value])
    return bits_as_f32(cute.arch.warp_redux_sync(bits, "max"))
