import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float
    dtype: str = "Float32"

    kernel: ClassVar[str] = "tests.runtime.toy_kernels_dsl:ScaleKernel"
    #: How many were traced in this process.
    traced: ClassVar[int] = 0
