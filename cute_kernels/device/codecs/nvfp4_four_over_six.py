"""Choice between two scales of an NVFP4 block for ``four_over_six``.

``reference.codecs.nvfp4`` defines the choice. An error divides by tensor_max. With the reciprocal
of tensor_max in two parts, hi + lo, fl(p / tensor_max) is fl(p hi + fl(p lo)). That was checked for
all significands of p of both bounds. It takes two instructions. If an amax is so large or small
that products may leave the range of normal numbers, the kernel divides.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Float32, Int32, Uint32

from ...formats import NVFP4
from ..ptx import asm, bits_as_f32

#: Range of amaxes for which the two instructions give the quotient.
_NEAR = (2.0**-50, 2.0**100)


class FourOverSixGlobalScale(NamedTuple):
    """Global scale in registers, for blocks whose scale is searched.

    Attributes:
        s_dec: Decode scale: the fp32 factor of a block scale.
        mult: 1, because the number that a block is encoded with is the chosen scale.
        s_enc: fp32 factor of an amax.
        amax: fp32 amax of the group or row.
        far: 1 if quotients are divisions, else 0.
    """

    s_dec: Float32
    mult: Float32
    s_enc: Float32
    amax: Float32
    far: Int32


class Candidate(NamedTuple):
    """A block scale and its encode factor."""

    scale: Float32
    factor: Float32


def is_far(amax: Float32) -> Int32:
    """Return 1 if the quotients of a group must be divisions, else 0."""
    text = """{ .reg .pred low, high;
		setp.ge.f32 low, $1, $2; setp.le.and.f32 high, $1, $3, low; selp.s32 $0, 0, 1, high; }"""
    return asm(text, [Int32], [amax, *map(Float32, _NEAR)])


def candidates(a: Float32, global_scale: FourOverSixGlobalScale) -> tuple[Candidate, Candidate]:
    """Return the scale that maps the amax ``a`` of a block to 6, and the one that maps it to 4."""
    text = """{
		.reg .f32 p, q;
		.reg .b32 h;
		.reg .b16 pair, lo, hi;
		div.rn.f32 p, $4, $7;
		mul.rn.f32 p, p, $6;
		mul.rn.f32 q, p, $8;
		cvt.rn.satfinite.e4m3x2.f32 pair, q, p;
		cvt.rn.f16x2.e4m3x2 h, pair;
		mov.b32 {lo, hi}, h;
		cvt.f32.f16 $0, lo;
		cvt.f32.f16 $2, hi;
		mul.rn.f32 p, $0, $5;
		mul.rn.f32 q, $2, $5;
		rcp.rn.f32 p, p;
		rcp.rn.f32 q, q;
		min.f32 $1, p, $9;
		min.f32 $3, q, $9;
	}"""
    numbers = [Float32(6.0), Float32(1.5), bits_as_f32(Uint32(0x7F7FFFFF))]
    out = asm(text, [Float32] * 4, [a, global_scale.s_dec, global_scale.s_enc, *numbers])
    return Candidate(*out[:2]), Candidate(*out[2:])


def error(
    codes: Sequence[Float32],
    numbers: Sequence[Float32],
    scale: Float32,
    global_scale: FourOverSixGlobalScale,
    fmt: NVFP4,
) -> Float32:
    """Return the error of a block, summed element after element.

    Args:
        codes: fp32 numbers of the codes.
        numbers: fp32 elements.
        scale: Block scale.
        global_scale: Global scale.
        fmt: Record of the format.
    """
    high, low = _reciprocal(fmt.tensor_max)
    measure = "abs.f32 d, d;" if fmt.four_over_six_error == "mae" else "mul.rn.f32 d, d, d;"
    text = f"""{{
		.reg .pred far;
		.reg .f32 d, p;
		setp.ne.s32 far, $6, 0;
		mul.rn.f32 p, $2, $4; mul.rn.f32 p, p, $5;
		mul.rn.f32 d, p, $8; fma.rn.f32 d, p, $7, d;
		@far div.rn.f32 d, p, $9;
		sub.rn.f32 d, d, $3; {measure} add.rn.f32 $0, $1, d;
	}}"""
    constants = [Float32(high), Float32(low), Float32(fmt.tensor_max)]
    total = Float32(0.0)
    for code, number in zip(codes, numbers, strict=True):
        operands = [total, code, number, scale, global_scale.amax, global_scale.far, *constants]
        total = asm(text, [Float32], operands)
    return total


def better(errors: Sequence[Float32], pair: Sequence[Candidate]) -> Float32:
    """Return the scale of the second candidate if its error is smaller, else of the first."""
    text = "{ .reg .pred p; setp.lt.f32 p, $2, $1; selp.f32 $0, $4, $3, p; }"
    return asm(text, [Float32], [*errors, pair[0].scale, pair[1].scale])


def _reciprocal(number: float) -> tuple[float, float]:
    """Return 1 / number as the sum of two fp32 numbers; fp64 is precise enough for it."""
    (high,) = struct.unpack("f", struct.pack("f", 1 / number))
    low = -math.fsum((high * number, -1.0)) / number
    return high, low
