"""Hadamard transform of chunks of 16 rows, in registers.

The order is that of ``cute_kernels.reference.hadamard``, which tensor cores do not keep: products
with 1/4 and the sign, which are exact and so may be part of an FMA, then four stages of additions.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32, Uint64

from ..arch import get_arch
from .convert import pack_words, unpack_pair
from .ptx import asm

#: Rows that are mixed with each other.
CHUNK = 16
_HALF = CHUNK // 2
#: Bit i is set if row i changes its sign.
_SIGN_MASK = 0xD7E8
_SIGNS = [-1.0 if _SIGN_MASK >> i & 1 else 1.0 for i in range(CHUNK)]
#: DSL type and PTX suffix of the numbers that one instruction adds.
_LANES: dict[str, tuple[type, str]] = {"sm_90a": (Float32, "f32"), "sm_100a": (Uint64, "f32x2")}


def transform_words(words: Sequence[Uint32], arch: str) -> list[Uint32]:
    """Transform two bf16 columns of a chunk in fp32 and round them to bf16.

    Args:
        words: 16 words, one per row, of two bf16 each.
        arch: Name of the architecture.

    Returns:
        16 words of two bf16 each.
    """
    if get_arch(arch).has_f32x2:
        columns = [[_widen(word) for word in words]]
    else:
        columns = list(zip(*(unpack_pair(word, "bfloat16") for word in words), strict=True))
    transformed = [_stages(_first_stage(column, arch), arch, _HALF // 2) for column in columns]
    if get_arch(arch).has_f32x2:
        return [_narrow(pair) for pair in transformed[0]]
    return [pack_words(pair, "bfloat16")[0] for pair in zip(*transformed, strict=True)]


def undo(numbers: Sequence[Float32]) -> list[Float32]:
    """Invert the transform of the 16 ``numbers`` of a column."""
    summed = _stages([_quarter(x) for x in numbers], "sm_90a", _HALF)
    return [x if sign > 0 else -x for x, sign in zip(summed, _SIGNS, strict=True)]


def _quarter(x: Float32) -> Float32:
    """Return a quarter of ``x``, rounded.

    ptxas would turn a product into FMUL.D4, which rounds tiny numbers once.
    """
    text = """{
		.reg .b32 zero;
		and.b32 zero, $1, 0x80000000; fma.rn.f32 $0, $1, 0f3E800000, zero;
	}"""
    return asm(text, [Float32], [x])


def _first_stage(column: Sequence[Any], arch: str) -> list[Any]:
    """Return sums and differences of rows 8 apart, times 1/4 and their signs."""
    sums, differences = [], []
    for i in range(_HALF):
        low = _op("mul", arch, column[i], _constant(0.25 * _SIGNS[i], arch))
        factor, high = 0.25 * _SIGNS[i + _HALF], column[i + _HALF]
        sums.append(_op("fma", arch, high, _constant(factor, arch), low))
        differences.append(_op("fma", arch, high, _constant(-factor, arch), low))
    return sums + differences


def _stages(v: list[Any], arch: str, distance: int) -> list[Any]:
    """Return sums and differences of rows ``distance`` apart, then half as far, and so on."""
    while distance:
        pairs = [(v[i & ~distance], v[i | distance], i & distance) for i in range(CHUNK)]
        v = [_op("sub" if is_high else "add", arch, a, b) for a, b, is_high in pairs]
        distance //= 2
    return v


def _op(name: str, arch: str, *operands: Any) -> Any:
    """Emit one operation that rounds once, for one number or two."""
    kind, suffix = _LANES[arch]
    operand_list = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return asm(f"{name}.rn.{suffix} {operand_list};", [kind], operands)


def _constant(number: float, arch: str) -> Any:
    """Return a number for ``_op``. The high half of its bits must not be zero."""
    if not get_arch(arch).has_f32x2:
        return Float32(number)
    bits = 0x3E800000 | (number < 0) << 31
    return Uint64(bits << 32 | bits)


def _widen(word: Uint32) -> Uint64:
    """Return the two bf16 of a word as a pair of fp32."""
    text = """{
		.reg .b32 lo, hi;
		shl.b32 lo, $1, 16; and.b32 hi, $1, 0xFFFF0000; mov.b64 $0, {lo, hi};
	}"""
    return asm(text, [Uint64], [word])


def _narrow(pair: Uint64) -> Uint32:
    """Return a pair of fp32, rounded to two bf16 in a word."""
    text = "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; cvt.rn.bf16x2.f32 $0, hi, lo; }"
    return asm(text, [Uint32], [pair])
