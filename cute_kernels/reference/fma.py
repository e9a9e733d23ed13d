"""Fused multiply-add of fp32, exact to the bit, from fp64 operations that are equal on all devices.

A product of two fp32 numbers has at most 48 significant bits and is exact in fp64, but its sum with
a third number may need hundreds of bits. That sum is rounded to odd: truncated to fp64, with the
last bit set if the truncation dropped anything. One more rounding, to fp32 and to nearest even,
then gives the bits of a single rounding, because fp64 has more than two bits to spare, also where
the result is subnormal.
"""

import torch
from torch import Tensor


def two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x + y`` rounded, and the remainder: together exactly the sum (Knuth's TwoSum).

    The remainder is NaN where the sum is infinite or NaN.
    """
    total = x + y
    y_part = total - x
    remainder = (total - y_part).neg_().add_(x)
    return total, remainder.add_(y_part.neg_().add_(y))


def rounded_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return the exact sum of two fp64 tensors, rounded to fp32 once, to nearest even."""
    total, remainder = two_sum(x, y)
    bits = total.view(torch.int64)
    # One step toward the remainder if that gives an odd number: 1 if the remainder has the sign of
    # the sum, else -1.
    step = remainder.view(torch.int64).bitwise_xor(bits).bitwise_right_shift_(63).mul_(2).add_(1)
    is_even = bits.bitwise_and(1).bitwise_xor_(1)
    # NaN is not above 0, so infinities and NaN stay as they are.
    bits += step.mul_(is_even).mul_(remainder.abs() > 0)
    return total.float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` of fp32 tensors, which broadcast, rounded to fp32 once."""
    return rounded_sum(a.double() * b.double(), c.double())
