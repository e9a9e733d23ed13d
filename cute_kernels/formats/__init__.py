"""The low-precision formats: what a quantized tensor's bytes mean, one record a format.

The only place that spells out block sizes and maxima; everything else asks a record.
"""

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
]
