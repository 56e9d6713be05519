"""Shares of a number of things, exact in the decimals or the fraction that they are given in."""

import math
from fractions import Fraction

_LARGEST_DENOMINATOR = 10**6
"""Of two fractions with smaller ones no float is the nearest to both."""


def ceil_share(share: float, count: int) -> int:
    """Return the share of a count, rounded up. 0.07 of 100 is 7; the product of the floats is above, and rounded 8."""
    return math.ceil(_as_given(share) * count)


def floor_share(share: float, count: int) -> int:
    """Return the share of a count, rounded down. 0.29 of 100 is 29; the product of the floats is below."""
    return math.floor(_as_given(share) * count)


def _as_given(share: float) -> Fraction:
    """Return the fraction whose nearest float a share is, as 1/3; without a short one, its decimals."""
    number = float(share)
    short = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
    return short if float(short) == number else Fraction(repr(number))
