"""The spec of a toy kernel; it needs no CuTe DSL."""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiply by a constant: y = factor * x."""

    factor: float
    dtype: str = "Float32"

    kernel: ClassVar[str] = "tests.runtime.toy_kernels_dsl:ScaleKernel"
    #: Number of kernels traced in this process.
    traced: ClassVar[int] = 0
