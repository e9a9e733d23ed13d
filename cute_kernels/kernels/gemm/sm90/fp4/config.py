"""Configurations of the kernels that prepare FP4 operands for the GEMM of sm_90a."""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class ExpandConfig:
    """One variant of the kernel that converts NVFP4 codes and block scales to fp16 values.

    Attributes:
        is_ragged: True if rows belong to ragged groups, with block scales in slots. Otherwise the
            number of a row is its position among the block scales.
    """

    is_ragged: bool

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm90.fp4.expand:ExpandKernel"


@dataclasses.dataclass(frozen=True)
class ArrangeConfig:
    """One variant of the kernel that puts plain activations into the order of ``decode``.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        gathered: True if rows are read by an index.
    """

    dtype: str
    gathered: bool = False

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm90.fp4.arrange:ArrangeKernel"
