"""Conversions between fp32 and the element types, and the packing of E2M1 codes.

All conversions saturate and round to nearest even, as the ``cvt.rn.satfinite`` instructions do,
except the stochastic one. E8M0 scales are rounded up (``cvt.rp.satfinite``).
"""

import torch
from torch import Tensor

from ..formats import E2M1, ElementType, UnsupportedError
from ..formats.base import FP8_ELEMENTS

#: Magnitude of E2M1 codes 0..7; bit 3 is the sign.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_MANTISSA_BITS = 23
_ONE = 127 << _MANTISSA_BITS  # the bits of 1.0
_EXPONENT_MASK = 0xFF << _MANTISSA_BITS
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_HALF = 1 << _MANTISSA_BITS - 1  # the bits of 2^-127
_E8M0_MAX, _E8M0_NAN = 254, 255


def f32(value: float) -> float:
    """Round a number to fp32."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu").item())


def mark_nan(x: Tensor, where: Tensor) -> Tensor:
    """Set ``x`` to the NaN of GPU instructions where ``where`` is set, in place, and return it."""
    x.view(torch.int32).masked_fill_(where, 0x7FFFFFFF)
    return x


def encode(element: ElementType, y: Tensor) -> Tensor:
    """Round fp32 to codes (uint8), one code per byte.

    NaN gives 0x7F, or +6 in E2M1, which has no NaN.
    """
    return encode_e2m1(y) if element == E2M1 else _encode_fp8(element, y)


def decode(element: ElementType, codes: Tensor) -> Tensor:
    """Return exact fp32 values of stored codes, which are packed if they share bytes."""
    if element == E2M1:
        return unpack_codes(codes)
    if not element.has_nan:
        raise UnsupportedError(
            f"nothing decodes codes of {element.name}, which PyTorch has no dtype for"
        )
    return codes.view(element.dtype).float()


def pack(element: ElementType, codes: Tensor) -> Tensor:
    """Return codes of ``encode`` as they are stored, uint8."""
    if element.per_byte == 1:
        return codes
    if element.per_byte != 2:
        raise UnsupportedError(f"nothing packs codes of {element.bits} bits")
    return pack_codes(codes)


def encode_e2m1(y: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes 0..15 (uint8), to nearest even, saturating at 6.

    The sign of zero is preserved (-0.0 and negative values that round to zero give code 8), and NaN
    gives +6 (code 7). Both are as in the hardware's saturating conversion.
    """
    # Adding 2^22 p, whose ulp is p / 2, rounds to a multiple of that, ties to even ones.
    y, magnitude, power = _cut_to_e2m1(y)
    magic = power + ((_MANTISSA_BITS - 1) << _MANTISSA_BITS)
    return _e2m1_codes(
        magnitude.add_(magic.view(torch.float32)).view(torch.int32).sub_(magic), y, power
    )


def _cut_to_e2m1(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y`` without NaN and infinities, magnitudes up to 6, and bits of a power of two p.

    Codes are 0.5, 1 or 2 apart in [0, 2), [2, 4) and [4, 6]: half of p.
    """
    y = y.nan_to_num(nan=E2M1.max, posinf=E2M1.max, neginf=-E2M1.max)
    magnitude = y.abs().clamp_max_(E2M1.max)
    return y, magnitude, magnitude.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_min_(_ONE)


def _e2m1_codes(multiple: Tensor, y: Tensor, power: Tensor) -> Tensor:
    """Return codes of multiples of p / 2 with the signs of ``y``."""
    # The multiples are 0..4, 2..4 and 2..3 for codes 0..4, 4..6 and 6..7: 2 log2(p) is missing.
    code = multiple.add_(power.sub_(_ONE).bitwise_right_shift_(_MANTISSA_BITS - 1))
    return code.bitwise_or_(y.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8)).to(
        torch.uint8
    )


def round_e2m1(magnitude: Tensor) -> Tensor:
    """Round fp32 magnitudes as ``encode_e2m1`` does, and return them as fp32; NaN stays NaN."""
    magnitude = magnitude.clamp_max(E2M1.max)
    power = magnitude.view(torch.int32).bitwise_and(_EXPONENT_MASK).clamp_min_(_ONE)
    magic = power.add_((_MANTISSA_BITS - 1) << _MANTISSA_BITS).view(torch.float32)
    return magnitude.add_(magic).sub_(magic)


def encode_e2m1_stochastic(y: Tensor, r: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes 0..15 (uint8), up or down by the random bytes ``r`` (uint8).

    Let t be the distance of codes at |y| (0.5 below 2, 1 below 4, else 2). Without rounding:

      |result| = min(6, floor(|y| / t + r / 256) t)

    So the mean over all bytes is below |y| by less than t / 256. Signs and NaN are as in
    ``encode_e2m1``.
    """
    y, magnitude, power = _cut_to_e2m1(y)
    # The power of two is 2 t; 512 of them by its exponent, so that the quotient is exact.
    scale = (2 * _ONE + (9 << _MANTISSA_BITS) - power).view(torch.float32)
    return _e2m1_codes(
        magnitude.mul_(scale).to(torch.int32).add_(r).bitwise_right_shift_(8), y, power
    )


def _encode_fp8(element: ElementType, v: Tensor) -> Tensor:
    """Round fp32 to FP8 bytes (uint8), to nearest even, saturating; NaN gives 0x7F."""
    if element not in FP8_ELEMENTS.values():
        raise UnsupportedError(
            f"nothing encodes numbers as {element.name}: it is e2m1, e4m3 or e5m2"
        )
    # Not every torch version saturates in this cast, so clamp first. A clamp keeps NaN.
    return (
        v.clamp(-element.max, element.max)
        .to(element.dtype)
        .view(torch.uint8)
        .masked_fill_(v.isnan(), 0x7F)
    )


def encode_e8m0(v: Tensor) -> Tensor:
    """Round fp32 up to powers of two as E8M0 bytes (uint8), saturating at 2^127; NaN gives 255.

    All numbers up to 2^-127, including zero, give 2^-127: byte 0. The sign is dropped.
    """
    bits = v.abs().view(torch.int32)
    exponent = bits >> _MANTISSA_BITS
    # Exponent 0 means subnormal; the upper half of the subnormals is above 2^-127.
    above = (bits & _MANTISSA_MASK) > torch.where(exponent == 0, _HALF, 0)
    return (
        exponent.add_(above)
        .clamp_max_(_E8M0_MAX)
        .masked_fill_(v.isnan(), _E8M0_NAN)
        .to(torch.uint8)
    )


def pack_codes(codes: Tensor) -> Tensor:
    """Pack E2M1 codes (..., 2n), two per byte (..., n), the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _pair_table() -> Tensor:
    """Return (256,) int64: the two fp32 values of each byte, next to each other."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device="cpu")
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).view(torch.int64).squeeze(1)


_PAIRS = _pair_table()


def unpack_codes(packed: Tensor) -> Tensor:
    """Return exact fp32 values (..., 2n) of packed E2M1 codes (..., n)."""
    return (
        _PAIRS.to(packed.device)
        .index_select(0, packed.int().flatten())
        .view(packed.shape)
        .view(torch.float32)
    )
