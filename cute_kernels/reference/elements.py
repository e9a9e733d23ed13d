"""What is quantized: rows of fp32 elements, made in parts so that they never exist as a whole."""

import torch
from torch import Tensor

from ..formats.activations import Activation
from .absmax import absmax
from .activations import activate
from .copies import slices


class Elements:
    """(rows, cols) elements of a plain tensor (T, W) or (G, N, W), or of what an activation makes
    of one.

    With ``rounds_activation`` that is rounded to the dtype of ``x`` (``Format.rounds_activation``).

    Attributes:
        rows: T, or G * N.
        cols: W, or half of it of a gated activation.
    """

    def __init__(
        self, x: Tensor, activation: Activation | None = None, *, rounds_activation: bool = False
    ) -> None:
        self._x = x.flatten(0, -2)
        self._activation = activation
        self._rounds_activation = rounds_activation
        self.rows, self.cols = self._x.shape
        if activation is not None:
            self.cols = activation.width(self.cols)
        self.dtype: torch.dtype = x.dtype
        self.device: torch.device = x.device

    def take(self, rows: slice | Tensor) -> Tensor:
        """(..., cols) fp32 elements of the given rows: a slice, or an int64 tensor of indices."""
        x = self._x[rows].float()
        if self._activation is None:
            return x
        made = activate(x, self._activation)
        return made.to(self.dtype).float() if self._rounds_activation else made

    def absmax(self, *, nan: bool = False) -> Tensor:
        """(rows,) fp32, the largest magnitude of each row;

        NaN is passed over, or with ``nan`` the result.
        """
        if self._activation is None:
            return absmax(self._x, nan=nan)
        parts = [absmax(self.take(part), nan=nan) for part in slices(self.rows, self._x.shape[1])]
        return torch.cat(parts) if parts else self._x.new_zeros(0, dtype=torch.float32)
