"""Preparation of NVFP4 weights for the GEMM of sm_90a, once when they are loaded.

Only the order of the bits in each 32-bit word of eight codes changes. Shapes, block scales and the
bits of results stay the same. ``decode`` needs fewer instructions than for codes in their order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Positions of bit s and bits eem of code t = 0 .. 3 in the low half of a prepacked word. Code t +
#: 4 has the same positions in the high half. Left shifts alone move them to bit 15 and bits 11 to
#: 9, their positions in fp16. For t = 0 and 3 one shift is enough. For t = 1 and 2 the sign and the
#: magnitude move by two distances, and one multiplication shifts both.
PREPACKED_BITS = ((15, 9), (14, 3), (13, 0), (12, 6))
_SIGNS, _MAGNITUDES = 0x00010001, 0x00070007


_CANONICAL_BITS = tuple((4 * t + 3, 4 * t) for t in range(4))
_BLOCK_BYTES = 8


def prepack(codes: Tensor) -> Tensor:
    """Reorder the bits of codes as ``PREPACKED_BITS`` describes.

    Args:
        codes: (..., K / 2) uint8, rows of whole blocks of 16 codes.

    Returns:
        A tensor of the same shape and strides.

    Raises:
        TypeError: The codes are not uint8.
        ValueError: The rows are not whole blocks, or not contiguous.
    """
    return _reorder(codes, _CANONICAL_BITS, PREPACKED_BITS)


def unpack(codes: Tensor) -> Tensor:
    """Undo ``prepack``.

    Args:
        codes: (..., K / 2) uint8, a result of ``prepack``.

    Returns:
        A tensor of the same shape and strides.

    Raises:
        TypeError: The codes are not uint8.
        ValueError: The rows are not whole blocks, or not contiguous.
    """
    return _reorder(codes, PREPACKED_BITS, _CANONICAL_BITS)


def _reorder(
    codes: Tensor, before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]
) -> Tensor:
    """Move the bits of codes from the positions ``before`` to ``after``."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    if codes.shape[-1] % _BLOCK_BYTES or codes.stride(-1) != 1:
        raise ValueError(
            "codes must be contiguous rows of whole blocks of 16, 8 bytes each, got shape "
            f"{tuple(codes.shape)} and strides {codes.stride()}"
        )
    out = torch.empty_strided(codes.shape, codes.stride(), dtype=codes.dtype, device=codes.device)
    words, target = codes.view(torch.int32), out.view(torch.int32)
    target.zero_()
    for (sign, magnitude), (sign_to, magnitude_to) in zip(before, after, strict=True):
        target |= ((words >> sign) & _SIGNS) << sign_to
        target |= ((words >> magnitude) & _MAGNITUDES) << magnitude_to
    return out
