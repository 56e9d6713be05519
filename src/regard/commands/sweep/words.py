"""Sentences and key figures of a report on a sweep."""

import math

from regard.commands.sweep import means as sweep_means
from regard.commands.sweep.means import Combination, Comparison, format_metric
from regard.report import labels
from regard.report.page import KeyFigure
from regard.runs.intervals import SeedDifference
from regard.runs.selection import list_some

_COMPARED = ("valid_loss", "sink_rate", "average_performance_til", "average_performance_cil")
"""The metrics that the lede compares."""
_EXTREMES = (
    *(("valid_loss", "lowest"), ("sink_rate", "highest"), ("sink_rate", "lowest"), ("alpha_first", "highest")),
    *(("average_performance_til", "highest"), ("forgetting_til", "lowest")),
    *(("average_performance_cil", "highest"), ("forgetting_cil", "lowest")),
)
"""The metrics of the key figures."""
EMERGENCE = "emergence_step"
"""The trials' column of the steps at which sinks emerged, null where none did."""
_PAIRED = "paired by seed (Student’s t)"
_WELCH = "Welch’s where too few seeds are in common"
_OVERLAP = "Where an interval overlaps 0, these seeds do not tell the two apart."


def write_title(comparison: Comparison) -> str:
    """Return the sweep's name in the record, else the varied fields."""
    fields = [field.replace("_", " ") for field in labels.section(comparison.record, "vary")]
    return str(comparison.record.get("name") or (f"Sweep over {' and '.join(fields)}" if fields else "A sweep"))


def write_ledes(comparison: Comparison) -> list[str]:
    """Write how much was run, and how the combinations compare in validation loss and sinks, or in scores."""
    num_trials, num_unfinished = len(comparison.trials), len(comparison.unfinished)
    parts = [labels.pluralize(len(comparison.combinations), "combination")]
    parts.append(labels.pluralize(comparison.trials["seed"].nunique(), "seed"))
    parts.append(f"{num_trials:,} of {labels.pluralize(num_trials + num_unfinished, 'trial')} finished")
    sentences = [_compare(comparison, metric) for metric in _COMPARED if metric in comparison.metrics]
    return [" · ".join(parts), " ".join(sentence for sentence in sentences if sentence)]


def _compare(comparison: Comparison, metric: str) -> str:
    """Count the combinations that differ from the first one beyond their intervals."""
    items = [item for _, item in comparison.differences(metric)]
    differences = [item for item in items if item.has_interval]
    if not differences:
        return ""
    same, higher = sum(item.overlaps for item in differences), sum(item.low > 0 for item in differences)
    lower = len(differences) - same - higher
    counts = [(higher, "higher"), (lower, "lower"), (same, "not told apart (interval overlaps 0)")]
    counts.append((len(items) - len(differences), "without an interval"))
    text = ", ".join(f"{count} {result}" for count, result in counts if count)
    return f"{comparison.metrics[metric][0]} against {comparison.combinations[0].name}: {text}."


def write_warnings(comparison: Comparison) -> list[str]:
    """Write one sentence for everything that makes the numbers incomplete or uncertain."""
    notes, num_unfinished = [], len(comparison.unfinished)
    if num_unfinished:
        trials = labels.pluralize(num_unfinished, "trial")
        notes.append(f"{trials} without a result; means are over the seeds that have one.")
    if not has_seeds(comparison):
        notes.append("One seed for each combination: there are no standard errors and no intervals.")
    return notes


def has_seeds(comparison: Comparison) -> bool:
    """Return whether a combination has several seeds."""
    return any(len(item.rows) > 1 for item in comparison.combinations)


def make_key_figures(comparison: Comparison) -> list[KeyFigure]:
    """Make the best and the worst of what was measured."""
    figures = []
    for metric, extreme in _EXTREMES:
        if metric in comparison.metrics:
            means = [(item, sweep_means.mean(item.rows, metric)) for item in comparison.combinations]
            known = [(item, mean.value) for item, mean in means if mean.n]
            best, value = (max if extreme == "highest" else min)(known, key=lambda pair: pair[1])
            title, unit = comparison.metrics[metric]
            equal = [item.name for item, other in known if math.isclose(other, value, rel_tol=1e-9)]
            note = best.name if len(equal) == 1 else f"the same: {list_some(equal, MAX_EQUAL)}"
            figures.append(KeyFigure(f"{title}, {extreme}", format_metric(best.rows, metric, unit), note))
    return figures


MAX_EQUAL = 4
"""Combinations with an equal extreme that are named."""


def count_seeds(combination: Combination) -> str:
    """Return how many trials of the combination have finished, as in "2 of 3"."""
    finished, planned = len(combination.rows), combination.num_planned
    return str(finished) if finished == planned else f"{finished} of {planned}"


def describe_emergence(combination: Combination) -> str:
    """Return in how many trials a sink emerged, and the mean of the steps, as in "2 of 3, step 1,200"."""
    mean, num_trials = sweep_means.mean(combination.rows, EMERGENCE), len(combination.rows)
    if not num_trials:
        return "–"
    return f"{mean.n} of {num_trials}, step {mean.value:,.0f}" if mean.n else "none"


def describe_means(comparison: Comparison) -> str:
    """Describe the numbers of the table."""
    numbers = "Means over seeds ± standard error" if has_seeds(comparison) else "One seed each"
    is_loss = "valid_loss" in comparison.metrics
    unit = "losses in nats per token" if is_loss else "scores in per cent, forgetting in points"
    return f"{numbers}, at the end of training; {unit}."


def describe_differences(comparison: Comparison) -> str:
    """Describe how the intervals were computed."""
    differences = [item for metric in comparison.metrics for _, item in comparison.differences(metric)]
    paired = {item.pairs > 0 for item in differences if item.has_interval}
    if not paired and any(item.pairs > 1 for item in differences):
        return "The differences of all seeds are equal, so they have no intervals, and say little about chance."
    if not paired:
        return "One seed in common or none: differences without intervals, which say nothing about chance."
    tests = " or ".join(name for is_paired, name in ((True, _PAIRED), (False, _WELCH)) if is_paired in paired)
    return f"95 % intervals, {tests}, not corrected for the number of comparisons. {_OVERLAP}"


def format_difference(difference: SeedDifference, unit: str) -> list[str]:
    """Format a difference, its interval, and the verdict."""
    result = labels.verdict(difference.value, difference.overlaps if difference.has_interval else None)
    points = " points" if unit == "%" else ""
    if not difference.has_interval:
        return [f"{labels.format_signed(difference.value)}{points}", "–", result]
    half = difference.half_width
    places = labels.interval_decimals(half, difference.low, difference.high)
    value, low, high = (labels.format_signed(x, places) for x in (difference.value, difference.low, difference.high))
    return [f"{value}{points}", f"{low} to {high}", result]
