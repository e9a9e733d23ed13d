"""Conversions between fp32 and E2M1 / E4M3, and the packing of E2M1 codes.

All of them round to nearest even and saturate, as the ``cvt.rn.satfinite`` instructions do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.formats import E2M1, E4M3

__all__ = ["decode_e4m3", "encode_e2m1", "encode_e4m3", "pack_codes", "unpack_codes"]

#: Magnitude of E2M1 codes 0..7; bit 3 is the sign.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _below(value: float) -> float:
    """The next fp32 number toward zero."""
    as_tensor = torch.tensor(value, dtype=torch.float32)
    return float(torch.nextafter(as_tensor, torch.zeros(())).item())


#: Code c is taken for magnitudes above boundary c - 1 and up to boundary c. Midpoints go to the
#: even code, so every second boundary lies just under its midpoint.
_E2M1_BOUNDARIES = (0.25, _below(0.75), 1.25, _below(1.75), 2.5, _below(3.5), 5.0)


def encode_e2m1(y: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes 0..15 (uint8), to nearest even, saturating at 6.

    The sign of zero is kept (-0.0 and negative values that round to zero give code 8) and NaN gives
    +6 (code 7), both as the hardware's saturating conversion does.
    """
    boundaries = torch.tensor(_E2M1_BOUNDARIES, dtype=torch.float32, device=y.device)
    y = y.nan_to_num(nan=E2M1.max, posinf=math.inf, neginf=-math.inf)
    magnitude = torch.bucketize(y.abs().contiguous(), boundaries, out_int32=True)
    sign = y.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8)
    return magnitude.bitwise_or_(sign).to(torch.uint8)


def encode_e4m3(v: Tensor) -> Tensor:
    """Round fp32 to E4M3 bytes (uint8), to nearest even, saturating at 448; NaN gives 0x7F."""
    # Not every torch version saturates in this cast, so clamp first. A clamp keeps NaN.
    rounded = v.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
    return rounded.masked_fill_(v.isnan(), 0x7F)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Exact fp32 values of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def pack_codes(codes: Tensor) -> Tensor:
    """Pack E2M1 codes (..., 2n) two a byte (..., n), the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Exact fp32 values (..., 2n) of packed E2M1 codes (..., n)."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    return pairs[packed.int()].flatten(-2)
