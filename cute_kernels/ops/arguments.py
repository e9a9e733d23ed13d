"""Conversion of op operands to kernel arguments."""

import torch
from torch import Tensor

from ..runtime.allocator import ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in kernel configurations, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dense(x: Tensor | None) -> Tensor | None:
    """Return a vector or small matrix as a contiguous tensor, copied only if needed."""
    return None if x is None else x.contiguous()


def aligned(x: Tensor | None, alignment: int) -> Tensor | None:
    """Return a contiguous operand, copied if its address is not aligned to ``alignment`` bytes."""
    return x if x is None or x.data_ptr() % alignment == 0 else x.clone()


def readable(x: Tensor) -> Tensor:
    """Return ``x``, copied if it is not contiguous or not aligned to ``ALIGNMENT`` bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
