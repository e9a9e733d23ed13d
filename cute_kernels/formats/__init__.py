"""Low-precision formats: one record per format states what the bytes of a quantized tensor mean.

Only this package states block sizes and maxima. All other code reads them from a record.
"""

from ..deprecation import deprecated_attributes
from ..records import UnsupportedError
from .base import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    F32,
    RECORDS,
    BlockScale,
    ElementType,
    Format,
    GlobalScale,
    parse,
    record,
)
from .fp8 import FP8
from .fp8_block import FP8Block
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "F32",
    "FP8",
    "MXFP8",
    "NVFP4",
    "RECORDS",
    "BlockScale",
    "ElementType",
    "FP8Block",
    "Format",
    "GlobalScale",
    "UnsupportedError",
    "parse",
    "record",
]

__getattr__ = deprecated_attributes(__name__, {"SecondLevel": "cute_kernels.formats:GlobalScale"})


def __dir__() -> list[str]:
    return sorted(__all__)
