"""What becomes of an input before it is quantized or summed, as a fact of a configuration."""

import dataclasses

from cute_kernels.device.constants import DTYPE_BYTES
from cute_kernels.formats.activations import Activation, parse_activation


@dataclasses.dataclass(frozen=True)
class Prologue:
    """Elements are what an activation makes of rows of the input.

    Attributes:
        dtype: name of the input's dtype; a configuration's ``dtype`` is that of the elements.
        activation: text of the activation; None where elements are those of the input.
        gathered: row r is made of the input's row index[r].
    """

    dtype: str
    activation: str | None
    gathered: bool = False

    @property
    def record(self) -> Activation:
        assert self.activation is not None
        return parse_activation(self.activation)

    @property
    def is_gated(self) -> bool:
        """Whether the activation is gated: the input has two columns an element."""
        return self.activation is not None and self.record.is_gated

    @property
    def num_inputs(self) -> int:
        return 1 + self.is_gated

    @property
    def bytes_read(self) -> int:
        return DTYPE_BYTES[self.dtype] * self.num_inputs

    @property
    def unit(self) -> int:
        """Elements that are made at once: what 16 bytes of an input are."""
        return 16 // DTYPE_BYTES[self.dtype]
