"""Cost of learning: totals and peaks of a run, averaged over runs."""

from collections.abc import Mapping, Sequence

import pandas as pd

from regard.commands.learn.metrics import REFERENCES, Estimate, format_estimate
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
    "Means over runs. Time and FLOPs are summed over tasks; memory, bytes and examples are the maximum over tasks. "
    "Peak memory on a GPU is that of the task, including what a method prepares and what is measured before its steps. "
    "On the CPU it is the peak of the process so far, so methods of one process inherit it; regard sweep learn starts "
    "a process for each. Time covers training and the method’s work before and after it, which is also shown alone; "
    "scoring and diagnostics are excluded. FLOPs and examples/s cover training steps, including gradient correction. "
    "Computation before an answer (mbpa++ adapts itself to each text) is in no column. Stored: what a method stores "
    "beside the model. Stored examples: rows stored unchanged; vectors, densities and texts made of rows count as "
    "Stored only."
)
"""Description of the table's columns."""

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def sum_costs(cost: pd.DataFrame) -> pd.DataFrame:
    """Sum costs over tasks and average them over runs, by method.

    `whole_seconds` adds the time around training (`hook_seconds`), where known.
    """
    keys = [cost[key] for key in ("method", "seed", "order") if key in cost]
    numbers = pd.DataFrame({name: numeric_column(cost, name) for name in _NUMBERS}, index=cost.index)
    runs = numbers.groupby(keys, sort=False)
    by_run = {
        name: runs[name].sum(min_count=1) if reduction == "sum" else runs[name].agg(reduction)
        for name, reduction in _NUMBERS.items()
    }
    means = pd.DataFrame(by_run).groupby(level=0, sort=False).mean()
    return means.assign(whole_seconds=means["seconds"] + means["hook_seconds"].fillna(0.0))


def make_cost_table(costs: pd.DataFrame, methods: Sequence[str], scores: Mapping[str, Estimate], name: str) -> Table:
    """Make a row per method: its score `name`, then its cost."""
    rows = []
    for method in methods:
        cost = costs.loc[method]
        cells = [format_estimate(scores.get(method)), _time(cost["whole_seconds"]), _time(cost["hook_seconds"])]
        cells += [labels.number(cost["flops"] / 1e12, 3), labels.number(cost["peak_memory_mib"], 3)]
        cells.append(format_bytes(cost["memory_bytes"]))
        cells += [labels.number(cost[key], 3) for key in ("memory_examples", "examples_per_second")]
        rows.append((method, REFERENCES.get(method, ""), cells))
    head = ["Method", name, "Time a run", "Around training", "TFLOPs a run", "Peak memory, MiB", "Stored"]
    head += ["Stored examples", "Examples/s"]
    return Table(rows, head, "Cost by method")


def _time(seconds: float) -> str:
    return "–" if pd.isna(seconds) else format_duration(float(seconds))


def format_bytes(count: float) -> str:
    """Format bytes in a suitable unit, as in "1.5 MiB"; "–" for NaN."""
    if pd.isna(count):
        return "–"
    unit, name = next(((unit, name) for unit, name in _SIZES if count >= unit), (1, "B"))
    return f"{labels.number(float(count) / unit, 3)} {name}" if unit > 1 else f"{count:.0f} B"
