"""What a report of a sweep says in words and key figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep.means import Combination, Difference
from regard.report import labels
from regard.report.key_figure import KeyFigure
from regard.report.words import format_signed, verdict

_Metrics = Mapping[str, tuple[str, str]]


def title(record: Mapping[str, Any]) -> str:
    """The sweep's name in the record, else the varied fields."""
    fields = [field.replace("_", " ") for field in labels.section(record, "vary")]
    return str(record.get("name") or (f"Sweep over {' and '.join(fields)}" if fields else "A sweep"))


def ledes(
    found: Sequence[Combination], metrics: _Metrics, record: Mapping[str, Any], trials: pd.DataFrame
) -> list[str]:
    """How much was run, and how the combinations compare in validation loss and sinks, or in scores."""
    missing = len(sweep_means.unfinished(trials, record))
    seeds = trials["seed"].nunique() if len(trials) else 0
    run = [_count(len(found), "combination"), _count(seeds, "seed")]
    run.append(f"{len(trials)} of {_count(len(trials) + missing, 'trial')} finished")
    told = [_told(found, metric, metrics[metric][0]) for metric in _TOLD if metric in metrics]
    return [" · ".join(run), " ".join(part for part in told if part)]


_TOLD = ("valid_loss", "sink_rate", "average_performance_til", "average_performance_cil")


def _told(found: Sequence[Combination], metric: str, name: str) -> str:
    """A sentence on how many combinations differ from the first one beyond their intervals."""
    every = [sweep_means.difference(found[0].rows, one.rows, metric) for one in found[1:]]
    sure = [one for one in every if one is not None and one.sure]
    if not sure:
        return ""
    same, higher = sum(one.overlaps for one in sure), sum(one.low > 0 for one in sure)
    counts = [(higher, "higher"), (len(sure) - same - higher, "lower"), (same, "not told apart (interval overlaps 0)")]
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{name} against {found[0].name}: {said}."


def warnings(found: Sequence[Combination], trials: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """What keeps the numbers from being complete or sure, one sentence each."""
    missing = len(sweep_means.unfinished(trials, record))
    notes = [f"{_count(missing, 'trial')} without a result; means are over the seeds that have one."] if missing else []
    if all(len(one.rows) < 2 for one in found):
        notes.append("One seed for each combination: there are no standard errors and no intervals.")
    return notes


def key_figures(found: Sequence[Combination], metrics: _Metrics) -> list[KeyFigure]:
    """The best and worst of what was watched, or scored."""
    return [_extreme(found, metric, end, *metrics[metric]) for metric, end in _EXTREMES if metric in metrics]


_EXTREMES = (
    *(("valid_loss", "lowest"), ("sink_rate", "highest"), ("sink_rate", "lowest"), ("alpha_first", "highest")),
    *(
        ("average_performance_til", "highest"),
        ("forgetting_til", "lowest"),
        ("average_performance_cil", "highest"),
        ("forgetting_cil", "lowest"),
    ),
)


def _extreme(found: Sequence[Combination], metric: str, end: str, name: str, unit: str) -> KeyFigure:
    means = [(one.name, sweep_means.mean(one.rows, metric)) for one in found]
    known = [(name_of, value) for name_of, value in means if value.n]
    pick = max if end == "highest" else min
    which, best = pick(known, key=lambda pair: pair[1].value)
    return KeyFigure(f"{name}, {end}", sweep_means.shown(best, unit), which)


def seeds_of(one: Combination) -> str:
    """How many trials of the combination have finished, as in "2 of 3"."""
    return str(len(one.rows)) if len(one.rows) == one.planned else f"{len(one.rows)} of {one.planned}"


EMERGENCE = "emergence_step"
"""The trials' column of the steps at which sinks emerged, null where none did."""


def emerged(one: Combination) -> str:
    """In how many of the trials a sink emerged, and the mean of the steps, as in "2 of 3, step 1,200"."""
    value = sweep_means.mean(one.rows, EMERGENCE)
    if not len(one.rows):
        return "–"
    return f"{value.n} of {len(one.rows)}, step {value.value:,.0f}" if value.n else "none"


def about_means(found: Sequence[Combination], metrics: _Metrics) -> str:
    """What the numbers of the table are."""
    several = any(len(one.rows) > 1 for one in found)
    what = "Means over seeds ± standard error" if several else "One seed each"
    unit = "losses in nats per token" if "valid_loss" in metrics else "scores in per cent, forgetting in points"
    return f"{what}, at the end of training; {unit}."


def about_differences(found: Sequence[Combination], metrics: _Metrics) -> str:
    """How the intervals were made."""
    every = [
        sweep_means.difference(found[0].rows, one.rows, metric)
        for one in found[1:]
        for metric in metrics
        if metric not in sweep_means.TIMED
    ]
    sure = [one for one in every if one is not None and one.sure]
    if not sure:
        return "One seed in common or none: differences without intervals, which say nothing about chance."
    how = [name for paired, name in ((True, _PAIRED), (False, _WELCH)) if any(one.paired == paired for one in sure)]
    return f"95 % intervals, {' or '.join(how)}, not corrected for the number of comparisons. {_OVERLAP}"


_PAIRED = "paired by seed (Student’s t)"
_WELCH = "Welch’s where fewer than two seeds are in common"
_OVERLAP = "Where an interval overlaps 0, these seeds do not tell the two apart."


def difference_cells(found: Difference, unit: str) -> list[str]:
    """The difference, its interval, and what it says, as texts."""
    told = verdict(found.value, found.overlaps if found.sure else None)
    points = " points" if unit == "%" else ""
    if not found.sure:
        return [f"{format_signed(found.value)}{points}", "–", told]
    half = (found.high - found.low) / 2
    places = sweep_means.decimals(half) if half > _LEAST else 3
    value, low, high = (format_signed(number, places) for number in (found.value, found.low, found.high))
    return [f"{value}{points}", f"{low} to {high}", told]


_LEAST = 1e-9


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
