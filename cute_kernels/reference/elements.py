"""What is quantized: rows of fp32 elements, made in parts so that they never exist as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.reference.reductions import absmax

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Elements"]


class Elements:
    """(rows, cols) elements of a plain tensor.

    Args:
        x: (T, K), or (G, N, K) of uniform groups; bf16, fp16 or fp32.

    Attributes:
        rows: T, or G * N.
        cols: K.
        dtype: dtype of ``x``.
        device: device of ``x``.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x.flatten(0, -2)
        self.rows, self.cols = self._x.shape
        self.dtype: torch.dtype = x.dtype
        self.device: torch.device = x.device

    def take(self, rows: slice | Tensor) -> Tensor:
        """(..., cols) fp32 elements of the given rows: a slice, or an int64 tensor of indices."""
        return self._x[rows].float()

    def absmax(self) -> Tensor:
        """(rows,) fp32, the largest magnitude of each row; NaN is passed over."""
        return absmax(self._x)
