"""NVFP4 weights prepared for the GEMM of sm_90a, once when they are loaded.

Only the order of the bits in each 32-bit word of eight codes changes, so shapes, block scales and
the results' bits stay. ``decode`` needs fewer instructions for it than for codes one after another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Where a prepacked word has bit s and bits eem of code t = 0 .. 3 in its low half; code t + 4 is
#: alike in the high half. To get them to bit 15 and bits 11 to 9, where fp16 has them, takes left
#: shifts alone: by one distance for t = 0 and 3, and for t = 1 and 2 by two distances at once, as
#: one product.
PREPACKED_BITS = ((15, 9), (14, 3), (13, 0), (12, 6))
_SIGNS, _MAGNITUDES = 0x00010001, 0x00070007


_CANONICAL_BITS = tuple((4 * t + 3, 4 * t) for t in range(4))
_BLOCK_BYTES = 8


def prepack(codes: Tensor) -> Tensor:
    """Put the bits of codes into the order of ``PREPACKED_BITS``.

    Args:
        codes: (..., K / 2) uint8, rows of whole blocks of 16 codes.

    Returns:
        A tensor of the same shape and strides.

    Raises:
        TypeError: the codes are not uint8.
        ValueError: their rows are not whole blocks, or not contiguous.
    """
    return _moved(codes, _CANONICAL_BITS, PREPACKED_BITS)


def unpack(codes: Tensor) -> Tensor:
    """Undo ``prepack``, whose arguments and errors it has."""
    return _moved(codes, PREPACKED_BITS, _CANONICAL_BITS)


def _moved(
    codes: Tensor, before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]
) -> Tensor:
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
