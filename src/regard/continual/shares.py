"""Shares of a number of things, exact in the decimals that they are given in."""

import math
from fractions import Fraction


def ceil_share(share: float, count: int) -> int:
    """Return the share of a count, rounded up. 0.07 of 100 is 7; the product of the floats is above, and rounded 8."""
    return math.ceil(_multiply(share, count))


def floor_share(share: float, count: int) -> int:
    """Return the share of a count, rounded down. 0.29 of 100 is 29; the product of the floats is below."""
    return math.floor(_multiply(share, count))


def _multiply(share: float, count: int) -> Fraction:
    return Fraction(repr(float(share))) * count
