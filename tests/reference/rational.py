"""Exact arithmetic with Python's fractions, and IEEE 754 rounding."""

import math
from fractions import Fraction


def fp32(value):
    """Round to fp32, to nearest even; values that round past the largest number are infinite."""
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
