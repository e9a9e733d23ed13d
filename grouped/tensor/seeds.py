"""Seeds of stochastic rounding."""

import torch
from torch import Tensor

from cute_kernels.formats import Format


def draw_seed(fmt: Format, device: torch.device) -> Tensor | None:
    """A (2,) int64 seed from torch's generator of ``device`` for stochastic formats; else None.

    Made on the device, so that a CUDA graph draws a new one each time it is replayed.
    """
    return None if not fmt.is_stochastic else torch.randint(2**63 - 1, (2,), device=device)


def as_seed(seed: int | Tensor | None, fmt: Format, device: torch.device) -> Tensor | None:
    """A seed as ops take it: (2,) int64; of an int, itself and 0; of None, ``draw_seed``.

    Raises:
        TypeError: ``seed`` is none of these.
        ValueError: an int that 64 bits with a sign do not hold.
    """
    if seed is None:
        return draw_seed(fmt, device)
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, a (2,) int64 tensor or None, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be in [-2^63, 2^63), got {seed}")
    # Filled on the device: nothing is copied there that a CUDA graph could not hold.
    made = torch.zeros(2, dtype=torch.int64, device=device)
    made[:1].fill_(seed)
    return made
