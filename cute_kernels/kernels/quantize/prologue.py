"""Gather and activation that a kernel applies to its input before it quantizes or reduces it."""

import dataclasses
from typing import Literal

from cute_kernels.device.constants import DTYPE_BYTES
from cute_kernels.formats.activations import Activation, parse_activation

#: Groups of different row counts in a (T, K) tensor with offs, or of equal shapes in (G, N, K).
Grouping = Literal["ragged", "uniform"]


@dataclasses.dataclass(frozen=True)
class Prologue:
    """Operation that computes the elements of a kernel from its input.

    Attributes:
        dtype: Data type of the input. The ``dtype`` of a configuration is that of the elements.
        activation: Text of the activation, or None.
        gathered: True if row r of the elements comes from row index[r] of the input.
    """

    dtype: str
    activation: str | None
    gathered: bool = False

    @property
    def record(self) -> Activation:
        """Record of the activation."""
        assert self.activation is not None
        return parse_activation(self.activation)

    @property
    def is_gated(self) -> bool:
        """True if the activation is gated: the input then has two columns per element."""
        return self.activation is not None and self.record.is_gated

    @property
    def num_inputs(self) -> int:
        """Input elements per element."""
        return 1 + self.is_gated

    @property
    def bytes_read(self) -> int:
        """Bytes of the input per element."""
        return DTYPE_BYTES[self.dtype] * self.num_inputs

    @property
    def unit(self) -> int:
        """Elements that a lane computes at once: those of 16 bytes of input."""
        return 16 // DTYPE_BYTES[self.dtype]
