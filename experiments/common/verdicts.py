"""What runs say to a finding: parts that are true, false or open, decided by intervals, and the sentences beside them.

A part says that something is higher or lower: it is decided by the 95 % interval of the differences run by run, of at
least `FEWEST` runs, and open where that interval holds 0. That two methods are near each other is true where the
interval lies within ±`NEAR` points, false where it lies wholly outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from regard.runs.intervals import Interval

HELD, PARTLY, AGAINST, OPEN, ABSENT = "holds", "in part", "against", "cannot be told", "not run"
VERDICTS = (HELD, PARTLY, AGAINST, OPEN, ABSENT)
FEWEST = 3
"""Seeds that an interval is taken of at the least: scores of few test rows are coarse, two may agree by chance."""
NEAR = 1.0
"""Points of per cent within which two methods count as near."""

Part = bool | None
Judged = tuple[list[Part], list[str]]
"""The parts of a finding, and the sentences that state the numbers."""
T = TypeVar("T")


@dataclass(frozen=True)
class Claim(Generic[T]):
    """A finding: what is said, the rows it needs, what decides, and the published numbers that go with it.

    `judge` is given the tables, of type T, and the name of a stream.
    """

    said: str
    needs: tuple[str, ...]
    judge: Callable[[T, str], Judged]
    quoted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Finding(Generic[T]):
    """A claim with what became of it on a stream."""

    claim: Claim[T]
    stream: str
    verdict: str
    evidence: str


# -- rules -----------------------------------------------------------------------------------------------------------


def verdict(parts: Sequence[Part]) -> str:
    """One word for the parts: all true, some true, none true but one false, all open."""
    if True in parts:
        return HELD if all(parts) else PARTLY
    return AGAINST if False in parts else OPEN


def above(found: Interval | None) -> Part:
    """Whether a difference is above 0: open where its interval holds 0, or is of too few seeds."""
    if found is None or found.n < FEWEST or found.overlaps is not False:
        return None
    return found.mean > 0


def below(found: Interval | None) -> Part:
    """Whether a difference is below 0."""
    part = above(found)
    return None if part is None else not part


def near(found: Interval | None, margin: float = NEAR) -> Part:
    """Whether a difference lies within the margin: True if its interval does, False if that lies wholly outside."""
    if found is None or found.n < FEWEST:
        return None
    if found.ci_low >= -margin and found.ci_high <= margin:
        return True
    return False if found.ci_low > margin or found.ci_high < -margin else None


def at_least(found: Interval | None, bound: float) -> Part:
    """Whether a mean, or a difference, is no less than a bound: open where its interval holds both sides of it."""
    if found is None or found.n < FEWEST or found.ci_low < bound <= found.ci_high:
        return None
    return found.ci_low >= bound


def at_most(found: Interval | None, bound: float) -> Part:
    """Whether a mean, or a difference, is no more than a bound: open where its interval holds both sides of it."""
    if found is None or found.n < FEWEST or found.ci_low <= bound < found.ci_high:
        return None
    return found.ci_high <= bound


# -- words -----------------------------------------------------------------------------------------------------------


def told(found: Interval | None, digits: int, *, signed: bool = False) -> str:
    """The mean ± half the interval; no ± for one seed, and a dash for none."""
    if found is None or math.isnan(found.mean):
        return "–"
    sign = "+" if signed else ""
    half = f" ± {(found.ci_high - found.ci_low) / 2:.{digits}f}" if math.isfinite(found.ci_low) else ""
    return f"{found.mean:{sign}.{digits}f}{half}"


def starred(found: Interval | None, digits: int = 2) -> str:
    """A difference, with a star where its interval leaves 0 out."""
    sure = found is not None and found.overlaps is False
    return told(found, digits, signed=True) + ("\\*" if sure else "")


def means(one: tuple[str, Interval | None], other: tuple[str, Interval | None], digits: int) -> str:
    """Two means, and whether their intervals overlap."""
    both = ", ".join(f"`{row}` {told(found, digits)}" for row, found in (one, other))
    a, b = one[1], other[1]
    if a is None or b is None or a.overlaps is None or b.overlaps is None:
        return f"{both}."
    apart = a.ci_high < b.ci_low or b.ci_high < a.ci_low
    return f"{both}: their intervals {'do not overlap' if apart else 'overlap'}."


def difference(found: Interval | None, digits: int, *, runs: str = "seed") -> str:
    """A difference run by run, and whether its interval holds 0; `runs`: what one of them is called."""
    if found is None:
        return f"No {runs} in common."
    if found.overlaps is None:
        return f"Difference {told(found, digits, signed=True)} (one {runs}, no interval)."
    few = ", too few" if found.n < FEWEST else ""
    holds = "holds 0" if found.overlaps else "leaves 0 out"
    return f"Difference {told(found, digits, signed=True)} ({found.n} {runs}s{few}): its interval {holds}."
