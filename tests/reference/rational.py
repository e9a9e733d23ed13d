"""Exact arithmetic in Python's fractions, and the rounding of IEEE 754."""

import math
from fractions import Fraction


def fp32(value):
    """``value`` rounded to fp32, to nearest even; ±inf from halfway above the largest number on."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / ulp) * ulp  # Fraction rounds half to even
    result = math.inf if rounded >= 2**128 else float(rounded)
    return math.copysign(result, 1 if value > 0 else -1)
