"""fma and exact sums of the reference, against rational arithmetic."""

import itertools
import math
from fractions import Fraction

import torch

from cute_kernels.reference.fma import fma, rounded_sum, two_sum
from tests.helpers import F32, assert_same_bytes

from .rational import fp32

#: Significands with few bits, with all bits, and their neighbors.
SIGNIFICANDS = (1, 3, 2**12 + 1, 2**23 + 1, 2**24 - 1)


def values(exponents, significands=SIGNIFICANDS):
    """Return numbers that fp32 holds, with these exponents and significands."""
    candidates = {m * 2.0**e * s for m in significands for e in exponents for s in (1, -1)}
    return sorted(v for v in candidates if v == fp32(Fraction(v)))


def assert_exact(a, b, c):
    """Compare fma of three sequences with exact sums, rounded once."""
    operands = [torch.tensor(v, dtype=F32) for v in (a, b, c)]
    got, want = fma(*operands), []
    for x, y, z in zip(*(t.tolist() for t in operands), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        want.append(fp32(exact) if exact else x * y + z)
    assert_same_bytes(got, torch.tensor(want))


def test_all_combinations_of_hard_numbers():
    """Ties and their neighbors, cancellation, and sums outside the normal range."""
    factors = values((-90, -24, -12, 0))
    terms = [0.0, -0.0, *values((-149, -126, -102, -48, -25, -13, 0, 12, 103), (1, 2**24 - 1))]
    assert_exact(*zip(*itertools.product(factors, factors, terms), strict=True))


def test_ties_are_broken_by_bits_far_below():
    """c is odd, and a * b is half of its last place, slightly more, or slightly less."""
    cases = []
    for shift, sign in itertools.product(range(0, 240, 3), (1, -1)):
        for c in (1.0 + 2.0**-23, 1.0, 2.0 - 2.0**-23):
            half = 2.0**-24
            cases += [(half * (1 + 2.0**-23), sign * 1.0, c), (half, sign * (1 + 2.0**-23), c)]
            cases += [(half * (1 - 2.0**-24), sign * 1.0, c), (half, sign * 1.0, c)]
            # The product is half an ulp and a bit that is 2^-46 of it.
            cases.append((half * (1 + 2.0**-23), sign * (1 - 2.0**-23), c))
            cases.append((2.0**-75, sign * 2.0**-75, c * 2.0**-shift * 2.0**64))
    assert_exact(*zip(*cases, strict=True))


def test_subnormal_results_and_overflow():
    tiny, huge = 2.0**-149, float(torch.finfo(F32).max)
    cases = [
        (tiny, 0.5, tiny),  # 1.5 of the smallest: a tie, to even
        (tiny, 0.5, 0.0),
        (tiny, 0.5 + 2.0**-24, 0.0),
        (tiny, -0.5, 0.0),
        (tiny, tiny, tiny),
        (tiny, -tiny, tiny * 3),
        (2.0**-75, 2.0**-75, 2.0**-126),  # a tie, and the sum is barely normal
        (-(2.0**-75), 2.0**-75, 2.0**-126),
        (huge, 1.0, 2.0**103),  # a tie with infinity
        (huge, 1.0, 2.0**103 - 2.0**80),
        (huge, 2.0, -huge),
        (huge, huge, -huge),
        (huge, -1.0, -(2.0**103)),
    ]
    assert_exact(*zip(*cases, strict=True))


def test_random_numbers_that_nearly_cancel():
    a, b = torch.randn(2, 4000)
    c = -(a * b) * (1 + torch.randint(-2, 3, (4000,)) * 2.0**-23)
    assert_exact(*(t.tolist() for t in (a, b, c)))


def test_zeros_infinities_and_nan():
    """Compare fma with fp64 for zeros, infinities and NaN."""
    inf, nan = math.inf, math.nan
    specials = (0.0, -0.0, 1.0, -2.5, 2.0**-149, inf, -inf, nan)
    a, b, c = (torch.tensor(v) for v in zip(*itertools.product(specials, repeat=3), strict=True))
    # fp64 holds every product and sum of these numbers, except 1 plus less than 2^-53.
    assert_same_bytes(fma(a, b, c), (a.double() * b.double() + c.double()).float(), any_nan=True)


def test_operands_broadcast():
    a, b, c = torch.randn(3, 1), torch.randn(1, 4), torch.randn(3, 4)
    assert_same_bytes(fma(a, b, c), fma(*[t.expand(3, 4).contiguous() for t in (a, b, c)]))


def test_a_sum_and_its_rounding_error_are_exact():
    """Check that a sum and its rounding error are exact."""
    x = torch.randn(2000, dtype=torch.float64)
    y = torch.randn(2000, dtype=torch.float64) * torch.randint(-60, 60, (2000,)).double().exp2()
    total, error = two_sum(x, y)
    for row in zip(*(t.tolist() for t in (x, y, total, error)), strict=True):
        p, q, s, r = map(Fraction, row)
        assert p + q == s + r
    want = [fp32(Fraction(p) + Fraction(q)) for p, q in zip(x.tolist(), y.tolist(), strict=True)]
    assert_same_bytes(rounded_sum(x, y), torch.tensor(want))
