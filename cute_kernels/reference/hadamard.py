"""The random Hadamard transform of NVFP4's columnwise copy: x^T cut in chunks of 16, times T.

  T = diag(s) H16 / 4,    H16[i, j] = (-1)^popcount(i & j)

with fixed signs s; T is orthogonal. It spreads an outlier over the chunk, and drops out of a
product over rows whose operands both carry it.

A sum of 16 products depends on its order where the exponents of a chunk's values are more than 12
apart (else all partial sums are multiples of one power of two that 24 bits hold, and exact). So the
order is part of the format: products with 1/4 and the sign, which are exact, then four stages of
sums and differences in fp32, of elements i and i + 8, i + 4, i + 2 and i + 1 in that order: 4
additions an element.
"""

import torch
from torch import Tensor

#: Elements that are mixed with each other.
CHUNK = 16
#: Bit i is set where s[i] is -1: TransformerEngine's signs.
SIGN_MASK = 0xD7E8


def transform(x: Tensor) -> Tensor:
    """Each chunk (..., 16, n) times T along its second to last dimension, in fp32.

    An infinity or a NaN spreads over its chunk.
    """
    return _butterflies(x * _signs(x))


def undo(y: Tensor) -> Tensor:
    """Each chunk (..., 16, n) of transformed values times T^T, in fp32: what was transformed.

    The factor 1/4 comes first, then the four stages as in ``transform``, then the signs.
    """
    return _butterflies(y * 0.25).mul_(_signs(y) * 4.0)


def _signs(like: Tensor) -> Tensor:
    """(16, 1) fp32: s / 4."""
    signs = [-0.25 if SIGN_MASK >> i & 1 else 0.25 for i in range(CHUNK)]
    return torch.tensor(signs, dtype=torch.float32, device=like.device).unsqueeze(1)


def _butterflies(v: Tensor) -> Tensor:
    """H16 times chunks (..., 16, n)."""
    distance = CHUNK // 2
    while distance:
        # (..., pairs of halves, which half, distance, n)
        low, high = v.unflatten(-2, (-1, 2, distance)).unbind(-3)
        v = torch.stack([low + high, low - high], dim=-3).flatten(-4, -2)
        distance //= 2
    return v
