"""Elements to quantize: rows of fp32 values.

They are computed in slices, so that they never exist as a whole.
"""

import torch
from torch import Tensor

from ..formats.activations import Activation
from .absmax import absmax
from .activations import activate
from .copies import slices


class Elements:
    """Elements (rows, cols) of a plain tensor (T, W) or (G, N, W), optionally after an activation.

    Args:
        x: Plain tensor.
        activation: Activation to apply. None for none.
        rounds_activation: Round the result of the activation to the dtype of ``x``
            (``Format.rounds_activation``).

    Attributes:
        rows: T, or G * N.
        cols: W, or half of it after a gated activation.
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
        """Return (..., cols) fp32 elements of rows: a slice, or an int64 tensor of indices."""
        x = self._x[rows].float()
        if self._activation is None:
            return x
        activated = activate(x, self._activation)
        return activated.to(self.dtype).float() if self._rounds_activation else activated

    def absmax(self, *, nan: bool = False) -> Tensor:
        """Return (rows,) fp32, the amax of each row. It ignores NaN, or keeps it with ``nan``."""
        if self._activation is None:
            return absmax(self._x, nan=nan)
        maxima = [absmax(self.take(rows), nan=nan) for rows in slices(self.rows, self._x.shape[1])]
        return torch.cat(maxima) if maxima else self._x.new_zeros(0, dtype=torch.float32)
