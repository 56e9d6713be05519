"""What the runs say to each finding of Bai et al. 2024 (arXiv 2410.05648), decided stream by stream by stated rules.

How parts make a finding, and what decides a part: `experiments.common.verdicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.common import verdicts
from experiments.common.comparison import paired
from experiments.common.verdicts import (
    ABSENT,
    FEWEST,
    NEAR,
    Judged,
    above,
    below,
    difference,
    means,
    near,
    verdict,
)
from experiments.prescale.tables import Tables
from regard.runs.intervals import Interval

Claim = verdicts.Claim[Tables]
Finding = verdicts.Finding[Tables]
Judge = Callable[[Tables, str], Judged]

# -- published -------------------------------------------------------------------------------------------------------

PUBLISHED: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "db-split": {
        "finetune": {"average_performance": 66.22, "forgetting": 39.15, "cil": 15.90},
        "probe": {"average_performance": 99.30},
        "probe-finetune": {"average_performance": 98.47, "forgetting": 1.64, "cil": 72.41},
        "prescale": {"average_performance": 99.74, "forgetting": 0.13, "cil": 70.38},
        "separate": {"average_performance": 99.87},
        "joint": {"average_performance": 99.88},
        "replay": {"average_performance": 91.05, "forgetting": 10.20},
        "agem": {"average_performance": 94.71, "forgetting": 5.98},
        "mbpa++": {"average_performance": 97.17, "forgetting": 3.09},
        "idbr": {"average_performance": 99.84, "forgetting": 0.04},
        "idbr without replay": {"average_performance": 96.47, "forgetting": 3.95},
        "l2p": {"average_performance": 99.63, "forgetting": 0.29},
        "ctr": {"average_performance": 99.04, "forgetting": 0.29},
    },
    "news-series": {
        "finetune": {"average_performance": 68.98, "forgetting": 17.13},
        "probe": {"average_performance": 74.81},
        "probe-finetune": {"average_performance": 77.09, "forgetting": 8.16},
        "prescale": {"average_performance": 79.76, "forgetting": 4.40},
        "prescale uniform": {"average_performance": 78.98},
        "prescale sink": {"average_performance": 76.08},
        "separate": {"average_performance": 83.72},
        "joint": {"average_performance": 82.04},
        "replay": {"average_performance": 75.47, "forgetting": 7.81},
        "agem": {"average_performance": 75.90, "forgetting": 6.60},
        "mbpa++": {"average_performance": 72.55, "forgetting": 9.64},
        "idbr": {"average_performance": 76.90, "forgetting": 3.24},
        "idbr without replay": {"average_performance": 72.36, "forgetting": 8.67},
        "l2p": {"average_performance": 73.99, "forgetting": 3.43},
        "ctr": {"average_performance": 75.12, "forgetting": 3.40},
    },
}
"""Published numbers in per cent, by stream and row: accuracy, forgetting, and accuracy of CIL.

Fine-tuning, probing and pre-scaling are those of BERT-base; the other methods as the paper's tables have them.
"""


def published(stream: str, row: str, measure: str) -> float | None:
    """A published number; None where the paper has none."""
    return PUBLISHED.get(stream, {}).get(row, {}).get(measure)


# -- findings --------------------------------------------------------------------------------------------------------


def findings(tables: Tables) -> list[Finding]:
    """Every claim, judged on each stream; those whose rows have no run are told as such."""
    return [_judged(claim, tables, stream) for claim in CLAIMS for stream in tables.streams]


def _judged(claim: Claim, tables: Tables, stream: str) -> Finding:
    missing = [row for row in claim.needs if row not in tables.rows(stream)]
    if missing:
        return Finding(claim, stream, ABSENT, f"no run of {', '.join(f'`{row}`' for row in missing)}.")
    parts, said = claim.judge(tables, stream)
    return Finding(claim, stream, verdict(parts), " ".join([*said, *_quoted(claim, stream)]))


def _quoted(claim: Claim, stream: str) -> list[str]:
    """The published numbers, where the paper has all of them."""
    numbers = [(row, published(stream, row, measure)) for row, measure in claim.quoted]
    if not numbers or any(number is None for _, number in numbers):
        return []
    return [f"(Paper: {', '.join(f'{row} {number:.2f}' for row, number in numbers)}.)"]


# -- judges ----------------------------------------------------------------------------------------------------------


def higher(row: str, other: str) -> Judge:
    """Judge: a row's average performance is above another's."""

    def judge(tables: Tables, stream: str) -> Judged:
        found = tables.difference(stream, row, other)
        both = means((row, tables.mean(stream, row)), (other, tables.mean(stream, other)), 1)
        return [above(found)], [both, difference(found, 2)]

    return judge


def beside(row: str, other: str) -> Judge:
    """Judge: a row's average performance is near another's."""

    def judge(tables: Tables, stream: str) -> Judged:
        found = tables.difference(stream, row, other)
        both = means((row, tables.mean(stream, row)), (other, tables.mean(stream, other)), 1)
        return [near(found)], [both, difference(found, 2), _inside(found)]

    return judge


def _inside(found: Interval | None) -> str:
    if found is None or found.n < FEWEST:
        return f"That is too few to know whether it lies within ±{NEAR:g} point."
    where = {True: "lies within", False: "lies outside", None: "crosses the edge of"}[near(found)]
    return f"That interval {where} ±{NEAR:g} point."


def forgets_less(row: str, other: str) -> Judge:
    """Judge: a row forgets less than another."""

    def judge(tables: Tables, stream: str) -> Judged:
        found = tables.difference(stream, row, other, "forgetting")
        both = means(
            (row, tables.mean(stream, row, "forgetting")), (other, tables.mean(stream, other, "forgetting")), 1
        )
        return [below(found)], [both, difference(found, 2)]

    return judge


def moves(statistic: str, *others: str, up: bool) -> Judge:
    """Judge: after a task a statistic is higher (or lower) with pre-scaling than with each of other rows."""

    def judge(tables: Tables, stream: str) -> Judged:
        ours = tables.diagnosed(stream, "prescale", statistic, "after")
        found = {row: paired(ours, tables.diagnosed(stream, row, statistic, "after")) for row in others}
        decide = above if up else below
        said = [f"To `{row}`: {difference(apart, 3).lower()}" for row, apart in found.items()]
        return [decide(apart) for apart in found.values()], said

    return judge


def changes(statistic: str, *, up: bool) -> Judge:
    """Judge: with pre-scaling a statistic is higher (or lower) after a task than before it."""

    def judge(tables: Tables, stream: str) -> Judged:
        after, before = (tables.diagnosed(stream, "prescale", statistic, when) for when in ("after", "before"))
        change = paired(after, before)
        return [above(change) if up else below(change)], [difference(change, 3)]

    return judge


# -- claims ----------------------------------------------------------------------------------------------------------


def _higher(said: str, row: str, other: str) -> Claim:
    return Claim(said, (row, other), higher(row, other), ((other, "average_performance"), (row, "average_performance")))


def _forgetting(name: str, other: str) -> Claim:
    quoted = ((other, "forgetting"), ("prescale", "forgetting"))
    said = f"Pre-scaling forgets less (FGT) than {name}."
    return Claim(said, ("prescale", other), forgets_less("prescale", other), quoted)


def _diagnostic(name: str, statistic: str, *, up: bool) -> tuple[Claim, Claim]:
    others = ("finetune", "probe-finetune")
    said = f"{name} is {'higher' if up else 'lower'} with pre-scaling than with fine-tuning, with or without probing."
    return (
        Claim(said, ("prescale", *others), moves(statistic, *others, up=up)),
        Claim(
            f"{name} {'rises' if up else 'falls'} while pre-scaling learns a task.",
            ("prescale",),
            changes(statistic, up=up),
        ),
    )


CLAIMS = (
    _higher("Fine-tuning scores below probing then fine-tuning.", "probe-finetune", "finetune"),
    _higher("Probing then fine-tuning scores below pre-scaling.", "prescale", "probe-finetune"),
    _higher("Fine-tuning scores below pre-scaling.", "prescale", "finetune"),
    Claim(
        f"Pre-scaling is near learning all tasks at once, within ±{NEAR:g} point.",
        ("prescale", "joint"),
        beside("prescale", "joint"),
        (("joint", "average_performance"), ("prescale", "average_performance")),
    ),
    _forgetting("fine-tuning", "finetune"),
    _forgetting("probing then fine-tuning", "probe-finetune"),
    _higher("Full scaling scores above uniform scaling.", "prescale", "prescale uniform"),
    _higher("Full scaling scores above scaling sinks alone.", "prescale", "prescale sink"),
    *_diagnostic("Over-smoothing", "over_smoothing", up=False),
    *_diagnostic("Sink deviation (the strongest sink)", "sink_deviation", up=True),
    *_diagnostic("Sink deviation (the five strongest)", "sink_deviation_top5", up=True),
)
"""The findings, in the order of the page."""
