"""What learning cost: sums and peaks over the tasks of a run, means over runs, beside the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn.metrics import Estimate
from regard.report import labels
from regard.report.page import Table
from regard.report.panels import numeric_column
from regard.report.words import format_duration

_NUMBERS = {
    "seconds": "sum",
    "hook_seconds": "sum",
    "flops": "sum",
    "peak_memory_mib": "max",
    "memory_bytes": "max",
    "memory_examples": "max",
    "examples_per_second": "mean",
}
ABOUT = (
    "Time and FLOPs are of all tasks of a run; memory, bytes and examples the most of any task; means over runs. Peak "
    "memory on a GPU is of the task alone, from before a method prepares for it until it is learnt, what is looked at "
    "before its steps included; on the CPU it is the most that the process has had up to then, so that in a "
    "comparison in one process a method inherits what those before it took (regard sweep learn has a process for "
    "each). Time is that of training and of what a method does around it: before its steps, and when a task is done. "
    "That part is told again beside it; scoring and diagnostics are in neither. FLOPs and examples/s are of training "
    "steps alone, what corrects their gradients included. What is computed before an answer (mbpa++ adapts itself to "
    "each text) is in no column. Stored is what a method keeps beside the model. Examples kept are rows that are "
    "stored as they are: vectors, densities and texts that a method makes of rows are counted under Stored alone."
)
"""What the columns of the table are."""

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def totals(cost: pd.DataFrame) -> pd.DataFrame:
    """By method, means over runs: seconds and FLOPs of all tasks, the most memory, bytes and examples of any task.

    `whole_seconds` are those of training (`seconds`) and those around it (`hook_seconds`), where these are known.
    """
    keys = [key for key in ("method", "seed", "order") if key in cost]
    numbers = pd.DataFrame({name: numeric_column(cost, name) for name in _NUMBERS}, index=cost.index)
    runs = numbers.groupby([cost[key] for key in keys], sort=False)
    by_run = pd.DataFrame({name: _reduced(runs[name], how) for name, how in _NUMBERS.items()})
    found = by_run.groupby(level=0, sort=False).mean()
    return found.assign(whole_seconds=found["seconds"] + found["hook_seconds"].fillna(0.0))


def _reduced(groups: pd.api.typing.SeriesGroupBy, how: str) -> pd.Series:
    """The sum (unknown where every value is), maximum or mean of each group."""
    found: pd.Series = groups.sum(min_count=1) if how == "sum" else groups.agg(how)
    return found


def table(found: pd.DataFrame, methods: Sequence[str], scores: Mapping[str, Estimate], name: str) -> Table:
    """A row for each method: its score `name`, then what it cost."""
    rows = []
    for method in methods:
        if method in found.index:
            row = found.loc[method]
            cells = [learn_metrics.shown(scores.get(method)), _time(row["whole_seconds"]), _time(row["hook_seconds"])]
            cells += [_flops(row["flops"]), _number(row["peak_memory_mib"]), size(row["memory_bytes"])]
            cells += [_number(row["memory_examples"]), _number(row["examples_per_second"])]
            rows.append((method, learn_metrics.REFERENCES.get(method, ""), cells))
    head = ["Method", name, "Time a run", "Around training", "TFLOPs a run", "Peak memory, MiB", "Stored"]
    head += ["Examples kept", "Examples/s"]
    return Table(rows, head, "Cost by method")


def _time(seconds: float) -> str:
    return "–" if pd.isna(seconds) else format_duration(float(seconds))


def _flops(value: float) -> str:
    return labels.number(float(value) / 1e12, 3)


def _number(value: float) -> str:
    return labels.number(float(value), 3)


def size(count: float) -> str:
    """Bytes in the unit that fits, as in "1.5 MiB"; "–" for NaN."""
    if pd.isna(count):
        return "–"
    unit, name = next(((unit, name) for unit, name in _SIZES if count >= unit), (1, "B"))
    return f"{labels.number(float(count) / unit, 3)} {name}" if unit > 1 else f"{count:.0f} B"
