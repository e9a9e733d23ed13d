"""Philox4x32, a random generator whose numbers depend only on a key and a counter.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int
) -> Tensor:
    """Return four random words per counter.

    Args:
        counter: int64 tensors of words in [0, 2^32) that broadcast together, the lowest first.
        key: Words of the same form.
        rounds: 10 in most libraries; 7 is the smallest number that the paper calls
            Crush-resistant.

    Returns:
        (..., 4) int64 words in [0, 2^32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap around in int64; after masking, both of their words are correct.
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product2 >> 32).bitwise_and_(_WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (product0 >> 32).bitwise_and_(_WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product2.bitwise_and_(_WORD), product0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)
