"""Random Hadamard transform of NVFP4's columnwise copy: chunks of 16 of x^T, times T.

  T = diag(s) H16 / 4,    H16[i, j] = (-1)^popcount(i & j)

The signs s are fixed, and T is orthogonal. It spreads an outlier over its chunk, and cancels in a
product over rows if both operands are transformed.

A sum of 16 products depends on its order if the exponents of a chunk's values are more than 12
apart. (Otherwise all partial sums are multiples of one power of two that fit in 24 bits, and
exact.) So the order is part of the format. First come products with 1/4 and the sign, which are
exact. Then come four stages of sums and differences in fp32, of elements i and i + 8, i + 4, i + 2
and i + 1 in that order: 4 additions per element.
"""

import torch
from torch import Tensor

#: Number of elements that the transform mixes.
CHUNK = 16
#: Bit i is set where s[i] is -1: TransformerEngine's signs.
SIGN_MASK = 0xD7E8


def transform(x: Tensor) -> Tensor:
    """Multiply each chunk (..., 16, n) by T along its second to last dimension, in fp32.

    Infinity and NaN spread over their chunk.
    """
    return _butterflies(x * _signs(x))


def undo(y: Tensor) -> Tensor:
    """Multiply each chunk (..., 16, n) of transformed values by T^T, in fp32.

    The factor 1/4 comes first, then the four stages as in ``transform``, then the signs.
    """
    return _butterflies(y * 0.25).mul_(_signs(y) * 4.0)


def _signs(like: Tensor) -> Tensor:
    """Return s / 4, (16, 1) fp32."""
    signs = [-0.25 if SIGN_MASK >> i & 1 else 0.25 for i in range(CHUNK)]
    return torch.tensor(signs, dtype=torch.float32, device=like.device).unsqueeze(1)


def _butterflies(v: Tensor) -> Tensor:
    """Multiply chunks (..., 16, n) by H16."""
    distance = CHUNK // 2
    while distance:
        # (..., pairs of halves, half, distance, n)
        low, high = v.unflatten(-2, (-1, 2, distance)).unbind(-3)
        v = torch.stack([low + high, low - high], dim=-3).flatten(-4, -2)
        distance //= 2
    return v
