"""Claims of a paper and the rules that judge them.

A judge gives the parts of a claim: True, False or None (undecided). A part about a difference is decided by its 95 %
interval over runs. `verdict` turns the parts into one of `VERDICTS`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from regard.runs.intervals import Interval

AS_PUBLISHED, IN_PART, AGAINST = "as published", "in part", "against"
UNDECIDED, NOT_RUN = "cannot be told", "not run"
HOLDS, OWN_SOURCE = "holds", "asked here"
"""The verdict that stands for `AS_PUBLISHED` where a claim is none of the paper's, and the source of such claims."""
DRAWN = "drawn"
"""The verdict of a figure, which claims nothing that a rule could decide."""
VERDICTS = (AS_PUBLISHED, HOLDS, IN_PART, AGAINST, UNDECIDED, DRAWN, NOT_RUN)
MIN_RUNS = 3
"""Fewest runs whose interval decides a part: scores of few test rows are coarse, two may agree by chance."""
MARGIN = 1.0
"""Two scores within this many points count as near."""
DASH = "–"

Part = bool | None
Judgment = tuple[list[Part], list[str]]
"""The parts of a claim, and sentences with the numbers behind them."""


class Results(Protocol):
    """The stored tables of an experiment."""

    @property
    def judged_streams(self) -> Sequence[str]:
        """The streams on which claims are judged."""

    def has_row(self, stream: str, row: str) -> bool:
        """Whether a row has runs on a stream."""


T = TypeVar("T", bound=Results)


@dataclass(frozen=True)
class Claim(Generic[T]):
    """A table, figure or statement of a paper, and how it is tested.

    Attributes:
        source: Where the paper has it.
        text: What is claimed, in one sentence.
        judge: Gives the parts of the claim, from the tables and a stream. None: the claim is not tested.
        needs: Rows without which it is not tested.
        published: The published numbers.
        command: What makes the runs; empty: the paper's main command.
        reason: Why it is not tested, where `judge` is None.
        figure: A figure in docs/figures that draws it, where no rule decides.
    """

    source: str
    text: str
    judge: Callable[[T, str], Judgment] | None = None
    needs: tuple[str, ...] = ()
    published: str = ""
    command: str = ""
    reason: str = ""
    figure: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the runs say to a claim on a stream."""

    claim: Claim[Any]
    stream: str
    word: str
    evidence: str


def judge_claims(claims: Sequence[Claim[T]], tables: T) -> list[Verdict]:
    """Judge all claims on each stream of the tables; those without a judge once."""
    return [
        judge_claim(claim, tables, stream)
        for claim in claims
        for stream in (tables.judged_streams if claim.judge is not None else ("",))
    ]


def judge_claim(claim: Claim[T], tables: T, stream: str) -> Verdict:
    """Judge a claim on a stream."""
    if claim.figure:
        return Verdict(claim, stream, DRAWN, f"Drawn in docs/figures/{claim.figure}.svg; no rule decides it.")
    if claim.judge is None:
        return Verdict(claim, stream, NOT_RUN, claim.reason)
    missing = [row for row in claim.needs if not tables.has_row(stream, row)]
    if missing:
        return Verdict(claim, stream, NOT_RUN, f"No run of {', '.join(f'`{row}`' for row in missing)}.")
    parts, sentences = claim.judge(tables, stream)
    if not parts:
        return Verdict(claim, stream, NOT_RUN, "No run of it.")
    word = verdict(parts)
    if word == AS_PUBLISHED and claim.source == OWN_SOURCE:
        word = HOLDS
    return Verdict(claim, stream, word, " ".join(filter(None, sentences)))


def verdict(parts: Sequence[Part]) -> str:
    """Return the verdict of a claim's parts: all true, some true, none true but one false, or all undecided."""
    if True in parts:
        return AS_PUBLISHED if all(parts) else IN_PART
    return AGAINST if False in parts else UNDECIDED


# -- rules -----------------------------------------------------------------------------------------------------------


def above(difference: Interval | None, bound: float = 0.0) -> Part:
    """Decide whether a difference is above a bound; undecided where its interval contains it or has too few runs."""
    if not _decides(difference) or difference.ci_low <= bound <= difference.ci_high:
        return None
    return difference.mean > bound


def below(difference: Interval | None, bound: float = 0.0) -> Part:
    """Decide whether a difference is below a bound."""
    return negate(above(difference, bound))


def negate(part: Part) -> Part:
    """Negate a part; undecided stays undecided."""
    return None if part is None else not part


def near(difference: Interval | None, margin: float = MARGIN) -> Part:
    """Decide whether a difference is within ±`margin`: False only if its whole interval is outside."""
    if not _decides(difference):
        return None
    if difference.ci_low >= -margin and difference.ci_high <= margin:
        return True
    return False if difference.ci_low > margin or difference.ci_high < -margin else None


def at_least(mean: Interval | None, bound: float) -> Part:
    """Decide whether a mean is at least a bound; undecided where its interval has values on both sides."""
    if not _decides(mean) or mean.ci_low < bound <= mean.ci_high:
        return None
    return mean.ci_low >= bound


def at_most(mean: Interval | None, bound: float) -> Part:
    """Decide whether a mean is at most a bound; undecided where its interval has values on both sides."""
    if not _decides(mean) or mean.ci_low <= bound < mean.ci_high:
        return None
    return mean.ci_high <= bound


def _decides(interval: Interval | None) -> TypeGuard[Interval]:
    """Whether there are runs enough for an interval, and one: not where all differ by the same."""
    return interval is not None and interval.n >= MIN_RUNS and math.isfinite(interval.ci_low)


# -- numbers in text -------------------------------------------------------------------------------------------------


def format_interval(interval: Interval | None, digits: int, *, signed: bool = False) -> str:
    """Format a mean ± half its interval; without ± for one run, a dash for none."""
    if interval is None or math.isnan(interval.mean):
        return DASH
    mean = round(interval.mean, digits) + 0.0  # never "-0.0"
    half = f" ± {(interval.ci_high - interval.ci_low) / 2:.{digits}f}" if math.isfinite(interval.ci_low) else ""
    return f"{mean:{'+' if signed else ''}.{digits}f}{half}"


def format_difference(difference: Interval | None, digits: int = 2) -> str:
    """Format a difference, with a star where its interval does not contain 0."""
    is_significant = difference is not None and difference.overlaps is False
    return format_interval(difference, digits, signed=True) + ("\\*" if is_significant else "")


def describe_difference(difference: Interval | None, digits: int = 2) -> str:
    """Return a sentence with a difference and what its interval says."""
    if difference is None:
        return "No run in common."
    if difference.overlaps is None:
        return f"Difference {format_interval(difference, digits, signed=True)} (one run, no interval)."
    too_few = ", too few" if difference.n < MIN_RUNS else ""
    zero = "contains 0" if difference.overlaps else "excludes 0"
    return (
        f"Difference {format_interval(difference, digits, signed=True)} ({difference.n} runs{too_few}): its interval "
        f"{zero}."
    )


def describe_means(first: tuple[str, Interval | None], second: tuple[str, Interval | None], digits: int = 1) -> str:
    """Return a sentence with two rows and their means."""
    return ", ".join(f"`{row}` {format_interval(mean, digits)}" for row, mean in (first, second)) + "."
