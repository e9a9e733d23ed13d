"""Operands of ops as arguments of kernels."""

import torch
from torch import Tensor

#: Bytes to which the quantizers' vector accesses ask their operands to be aligned.
ALIGNMENT = 32


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as kernel configurations name it, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dense(x: Tensor | None) -> Tensor | None:
    """A vector or small matrix as kernels take it: contiguous, copied only if it is not."""
    return None if x is None else x.contiguous()


def aligned(x: Tensor | None, to: int) -> Tensor | None:
    """A dense operand, copied only if its address is no multiple of ``to`` bytes."""
    return x if x is None or x.data_ptr() % to == 0 else x.clone()


def readable(x: Tensor) -> Tensor:
    """``x``, copied if it is not contiguous or not aligned to ``ALIGNMENT``."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
