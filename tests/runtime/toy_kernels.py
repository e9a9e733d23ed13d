"""A kernel small enough to compile in a tenth of a second, for tests of the machinery around it."""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Scale:
	factor: float
	dtype: str = "Float32"

	kernel: ClassVar[str] = "tests.runtime.toy_kernels_dsl:ScaleKernel"
	#: How many were traced in this process.
	traced: ClassVar[int] = 0
