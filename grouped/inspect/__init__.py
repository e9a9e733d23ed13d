"""Look into a model of grouped layers while it runs.

Find where NaN come from, what formats lose, and whether offs are valid.
"""

from cute_kernels.deprecation import deprecated_attributes

from ..functional.nonfinite_flags import ROLES, watch
from .inspector import EAGER_ONLY, QuantizationInspector, check_eager, inspect_quantization
from .nonfinite import InspectableLayer, detect_nonfinite, flags_of
from .offsets import check_offsets
from .statistics import Probe

__all__ = [
    "EAGER_ONLY",
    "ROLES",
    "InspectableLayer",
    "Probe",
    "QuantizationInspector",
    "check_eager",
    "check_offsets",
    "detect_nonfinite",
    "flags_of",
    "inspect_quantization",
    "watch",
]

__getattr__ = deprecated_attributes(__name__, {"inspect": "grouped.inspect:inspect_quantization"})
