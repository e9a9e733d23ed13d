"""What the kernels before the GEMM of sm_90a are compiled for, that prepare its FP4 operands."""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
    """One variant of the kernel that turns NVFP4 codes and block scales into fp16 values.

    Attributes:
        is_ragged: rows of groups, with block scales in slots; otherwise a row's number is its
            place among the block scales.
    """

    is_ragged: bool

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm90.fp4.expand:ExpandKernel"


@dataclasses.dataclass(frozen=True)
class ArrangeConfig:
    """One variant of the kernel that puts plain activations into the order of ``decode``.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        gathered: rows are read by an index.
    """

    dtype: str
    gathered: bool = False

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm90.fp4.arrange:ArrangeKernel"
