"""Largest magnitudes of packed inputs, lanes and warps.

Packed inputs stay packed as long as possible: the absolute maximum of 16-bit inputs is taken two at
a time. ``max`` drops a NaN, which is the rule of most formats for their amaxes. With ``nan`` a NaN
is the result (``Format.amaxes_keep_nan``), by as many instructions.
"""

from collections.abc import Sequence

from cutlass import Float32, Uint32, cute

from ..arch import get_arch
from .convert import unpack_pair
from .ptx import asm, bits_as_f32, f32_as_bits

_PACKED = {"bfloat16": "bf16x2", "float16": "f16x2"}
#: Modifier of a maximum that is NaN if an operand is.
_NAN = {False: "", True: ".NaN"}


def fmax(a: Float32, b: Float32, nan: bool = False) -> Float32:
    """Return the larger number. A NaN is dropped, or with ``nan`` returned."""
    return asm(f"max{_NAN[nan]}.f32 $0, $1, $2;", [Float32], [a, b])


def absmax_pairs(words: Sequence[Uint32], dtype: str, nan: bool = False) -> Uint32:
    """Return the elementwise absmax of words that hold two bf16 or fp16 each.

    The result has two maxima with undefined signs.
    """
    text = f"max{_NAN[nan]}.xorsign.abs.{_PACKED[dtype]} $0, $1, $2;"
    words = list(words)
    while len(words) > 1:
        pairs = [asm(text, [Uint32], words[i : i + 2]) for i in range(0, len(words) - 1, 2)]
        words = pairs + words[len(words) & ~1 :]
    return words[0]


def _fmax_abs(numbers: Sequence[Float32], arch: str, nan: bool) -> Float32:
    """Return the largest magnitude of fp32 numbers."""
    text, step = f"max{_NAN[nan]}.abs.f32 $0, $1, $2, $3;", 2
    if not get_arch(arch).has_three_input_max:
        text, step = f"{{ .reg .f32 t; abs.f32 t, $2; max{_NAN[nan]}.f32 $0, $1, t; }}", 1
    out, numbers = Float32(0.0), [*numbers]
    numbers += numbers[-1:] * (-len(numbers) % step)
    for i in range(0, len(numbers), step):
        out = asm(text, [Float32], [out, *numbers[i : i + step]])
    return out


def split_absmax(pair: Uint32, dtype: str, arch: str, nan: bool = False) -> tuple[Float32, Float32]:
    """Return the two magnitudes of a packed pair of maxima, as fp32.

    NaN gives 0, unless with ``nan``.
    """
    low, high = unpack_pair(pair, dtype)
    return _fmax_abs([low], arch, nan), _fmax_abs([high], arch, nan)


def absmax_packed(words: Sequence[Uint32], dtype: str, arch: str, nan: bool = False) -> Uint32:
    """Return the packed absmax of words: a pair for 16-bit types, bits of a number for fp32."""
    if dtype != "float32":
        return absmax_pairs(words, dtype, nan)
    return f32_as_bits(_fmax_abs([bits_as_f32(word) for word in words], arch, nan))


def unpack_absmax(packed: Uint32, dtype: str, arch: str, nan: bool = False) -> Float32:
    """Return the fp32 number that ``absmax_packed`` stands for."""
    if dtype == "float32":
        return bits_as_f32(packed)
    low, high = unpack_pair(packed, dtype)
    return _fmax_abs([low, high], arch, nan)


def absmax_words(words: Sequence[Uint32], dtype: str, arch: str, nan: bool = False) -> Float32:
    """Return the largest magnitude of all elements of ``words``, as fp32.

    A NaN is ignored, or with ``nan`` returned.
    """
    return unpack_absmax(absmax_packed(words, dtype, arch, nan), dtype, arch, nan)


def warp_max(value: Float32) -> Float32:
    """Return the largest of the warp's non-negative numbers, in every lane.

    A NaN counts as larger than all numbers.
    """
    bits = asm("mov.b32 $0, $1;", [Uint32], [value])
    return bits_as_f32(cute.arch.warp_redux_sync(bits, "max"))
