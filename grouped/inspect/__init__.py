"""Looks into a model of grouped layers while it runs: where NaN come from, what formats lose, if
offs are valid.
"""

from .inspector import EAGER_ONLY, check_eager, inspect
from .nonfinite import ROLES, Watched, detect_nonfinite, flags_of, note, note_gradient, watch
from .offsets import check_offsets
from .statistics import Probe

__all__ = [
    "EAGER_ONLY",
    "ROLES",
    "Probe",
    "Watched",
    "check_eager",
    "check_offsets",
    "detect_nonfinite",
    "flags_of",
    "inspect",
    "note",
    "note_gradient",
    "watch",
]
