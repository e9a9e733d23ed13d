"""Seeds of stochastic rounding."""

import torch
from torch import Tensor

from cute_kernels.formats import Format


def draw_seed(fmt: Format, device: torch.device) -> Tensor | None:
    """Draw a (2,) int64 seed from torch's generator of ``device``, or None if not stochastic.

    It is drawn on the device, so that a CUDA graph draws a new one each time it is replayed.
    """
    return None if not fmt.is_stochastic else torch.randint(2**63 - 1, (2,), device=device)


def seed_tensor(seed: int | Tensor | None, fmt: Format, device: torch.device) -> Tensor | None:
    """Return a seed as ops take it, (2,) int64: an int and 0, or ``draw_seed`` for None.

    Raises:
        TypeError: ``seed`` is none of these.
        ValueError: An int is out of the range of int64.
    """
    if seed is None:
        return draw_seed(fmt, device)
    if isinstance(seed, Tensor):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, a (2,) int64 tensor or None, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be in [-2^63, 2^63), got {seed}")
    # Filled on the device: a CUDA graph cannot contain a copy from the host.
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    numbers[:1].fill_(seed)
    return numbers
