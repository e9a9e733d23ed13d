"""Looks into a model of grouped layers while it runs: where NaN come from, what formats lose."""

from .lens import EAGER_ONLY, check_eager, inspect
from .nonfinite import ROLES, Watched, detect_nonfinite, flags_of, note, note_gradient, watch
from .statistics import Probe

__all__ = [
	"EAGER_ONLY",
	"ROLES",
	"Probe",
	"Watched",
	"check_eager",
	"detect_nonfinite",
	"flags_of",
	"inspect",
	"note",
	"note_gradient",
	"watch",
]
