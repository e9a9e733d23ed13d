"""Look into a model of grouped layers while it runs.

Find where NaN come from, what formats lose, and whether offs are valid.
"""

from cute_kernels.deprecation import deprecated_attributes

from .expert_ids import check_expert_ids
from .inspector import QuantizationInspector, inspect_quantization
from .nonfinite import detect_nonfinite
from .offsets import check_offsets

__all__ = [
    "QuantizationInspector",
    "check_expert_ids",
    "check_offsets",
    "detect_nonfinite",
    "inspect_quantization",
]

__getattr__ = deprecated_attributes(__name__, {"inspect": "grouped.inspect:inspect_quantization"})


def __dir__() -> list[str]:
    return sorted(__all__)
