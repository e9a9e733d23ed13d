"""Which of two scales NVFP4's ``four_over_six`` takes for a block; ``reference.codecs.nvfp4`` says.

An error divides by tensor_max. With its reciprocal in two parts, hi + lo, fl(p / tensor_max) is
fl(p hi + fl(p lo)), checked for all significands of p of both bounds: two instructions. Where an
amax is so large or small that products may leave the range of normal numbers it is a division.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Float32, Int32, Uint32

from ...formats import NVFP4
from ..ptx import asm, bits_as_f32

#: Amaxes between which the two instructions give the quotient.
_NEAR = (2.0**-50, 2.0**100)


class FourOverSixGlobalScale(NamedTuple):
    """The second level, beside which a block's scale is chosen instead of computed.

    ``mult`` is 1: what is encoded with is the scale that was chosen. ``far`` is 1 where quotients
    are divisions, else 0.
    """

    s_dec: Float32
    mult: Float32
    s_enc: Float32
    amax: Float32
    far: Int32


class Candidate(NamedTuple):
    """A scale, and the encode factor that belongs to it."""

    scale: Float32
    factor: Float32


def is_far(amax: Float32) -> Int32:
    """Whether quotients of a group are divisions."""
    text = """{ .reg .pred low, high;
		setp.ge.f32 low, $1, $2; setp.le.and.f32 high, $1, $3, low; selp.s32 $0, 0, 1, high; }"""
    return asm(text, [Int32], [amax, *map(Float32, _NEAR)])


def candidates(a: Float32, level: FourOverSixGlobalScale) -> tuple[Candidate, Candidate]:
    """That which takes the amax ``a`` of a block to 6, and that which takes it to 4."""
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
    out = asm(text, [Float32] * 4, [a, level.s_dec, level.s_enc, *numbers])
    return Candidate(*out[:2]), Candidate(*out[2:])


def error(
    codes: Sequence[Float32],
    numbers: Sequence[Float32],
    scale: Float32,
    level: FourOverSixGlobalScale,
    fmt: NVFP4,
) -> Float32:
    """The error of a block's ``numbers`` that ``codes`` stand for, element after element."""
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
        operands = [total, code, number, scale, level.amax, level.far, *constants]
        total = asm(text, [Float32], operands)
    return total


def better(errors: Sequence[Float32], of: Sequence[Candidate]) -> Float32:
    """The scale of the second candidate where its error is smaller, else that of the first."""
    text = "{ .reg .pred p; setp.lt.f32 p, $2, $1; selp.f32 $0, $4, $3, p; }"
    return asm(text, [Float32], [*errors, of[0].scale, of[1].scale])


def _reciprocal(number: float) -> tuple[float, float]:
    """1 / number as the sum of two fp32 numbers: an integer of few bits, so fp64 is enough."""
    (high,) = struct.unpack("f", struct.pack("f", 1 / number))
    low = -math.fsum((high * number, -1.0)) / number
    return high, low
