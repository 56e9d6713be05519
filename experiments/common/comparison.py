"""Rows of an experiment in continual learning: means over their runs, and paired differences between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd

from regard.continual import comparison
from regard.continual.metrics import Scenario, metrics_table
from regard.runs.intervals import Interval, difference_interval, t_interval

Run = tuple[int, str]
"""A run of a row: its seed and its order of tasks."""
Key = TypeVar("Key")
ACCURACY = "average_performance"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The scores and costs of runs, and the record of how they were made."""

    matrix: pd.DataFrame
    cost: pd.DataFrame
    record: Mapping[str, Any]

    @property
    def main_scenario(self) -> Scenario:
        """The scenario that is meant where none is named."""
        return "til"

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The matrix with one score a line, as `regard.continual.metrics.metrics_table` takes it, rows as methods."""
        raise NotImplementedError

    @property
    def streams(self) -> list[str]:
        """The streams with runs."""
        return [str(name) for name in self.scores["stream"].unique()]

    @property
    def judged_streams(self) -> Sequence[str]:
        """The streams on which claims are judged."""
        return self.streams

    def rows(self, stream: str) -> list[str]:
        """Return the rows with runs on a stream."""
        return [str(name) for name in self.scores.loc[self.scores["stream"] == stream, "method"].unique()]

    def has_row(self, stream: str, row: str) -> bool:
        """Whether a row has runs on a stream."""
        return row in self.rows(stream)

    def num_runs(self, stream: str, row: str) -> int:
        """Count the runs of a row on a stream."""
        return len(where(self.scores, stream=stream, method=row)[["seed", "order"]].drop_duplicates())

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The metrics of each run, rows as methods."""
        return metrics_table(self.scores)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Means over runs with intervals."""
        return comparison.summarize(self.metrics)

    def mean(self, stream: str, row: str, metric: str = ACCURACY, scenario: str | None = None) -> Interval | None:
        """Return the mean of a metric over runs; None if no run defines it."""
        return mean_of(self.by_run(stream, row, metric, scenario))

    def difference(
        self, stream: str, row: str, reference: str, metric: str = ACCURACY, scenario: str | None = None
    ) -> Interval | None:
        """Return a metric of a row minus that of another, paired by run; None without a run in common."""
        return paired(*(self.by_run(stream, name, metric, scenario) for name in (row, reference)))

    def by_run(self, stream: str, row: str, metric: str = ACCURACY, scenario: str | None = None) -> dict[Run, float]:
        """Return a metric of each run of a row that defines it."""
        return self._values.get((stream, row, metric, scenario or self.main_scenario), {})

    @cached_property
    def _values(self) -> dict[tuple[str, str, str, str], dict[Run, float]]:
        """Metrics by stream, row, metric and scenario, then by run."""
        values: dict[tuple[str, str, str, str], dict[Run, float]] = {}
        columns = ["stream", "method", "metric", "scenario", "seed", "order", "value"]
        for *key, seed, order, value in self.metrics.dropna(subset="value")[columns].itertuples(index=False, name=None):
            values.setdefault((key[0], key[1], key[2], key[3]), {})[seed, order] = float(value)
        return values

    def against(self, stream: str, reference: str, metric: str = ACCURACY, scenario: str | None = None) -> pd.DataFrame:
        """Compare all rows of a stream with one, by paired tests with Holm's correction; empty without that row."""
        rows = where(self.metrics, stream=stream, metric=metric, scenario=scenario or self.main_scenario)
        if reference not in set(rows["method"]):
            return pd.DataFrame(columns=[*comparison.DIFFERENCES])
        return comparison.compare_methods(rows, reference)


def long_scores(wide: pd.DataFrame) -> pd.DataFrame:
    """Return a matrix with both scenarios side by side as one score a line, missing ones left out."""
    scenarios = [name for name in ("til", "cil") if name in wide]
    index = [name for name in wide if name not in scenarios]
    return wide.melt(index, scenarios, var_name="scenario", value_name="score").dropna(subset="score")


def mean_of(values: Mapping[Any, float]) -> Interval | None:
    """Return the mean of values with its interval; None without any."""
    return t_interval(list(values.values())) if values else None


def paired(values: Mapping[Key, float], reference: Mapping[Key, float]) -> Interval | None:
    """Return the mean difference over the runs in both, with its interval; None without one."""
    differences = [values[run] - reference[run] for run in values if run in reference]
    return difference_interval(differences) if differences else None


def format_p_value(differences: pd.DataFrame, row: str) -> str:
    """Format the corrected p of a row among differences that are indexed by method."""
    value = float(differences.loc[row, "t_test_holm"]) if row in differences.index else float("nan")
    return "–" if value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


def where(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the lines of a table with these values."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table
