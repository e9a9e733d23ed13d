"""Operands of ops as arguments of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["dense", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as kernel configurations name it, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dense(x: Tensor | None) -> Tensor | None:
    """A vector or small matrix as kernels take it: contiguous, copied only if it is not."""
    return None if x is None else x.contiguous()
