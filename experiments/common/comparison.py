"""Rows of an experiment side by side: means over their runs, and differences between them run by run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd

from regard.continual import comparison
from regard.continual.metrics import Scenario, metrics_table
from regard.runs.intervals import Interval, t_interval

PAIR = ["seed", "order"]
"""What tells the runs of a row from each other."""
Run = tuple[int, str]
"""A run of a row: its seed and its order."""
Key = TypeVar("Key")
_NAMES = ["stream", "method", "seed", "order", "metric", "scenario", "value"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The scores and costs of runs, and the record of what they were made with.

    `headline`: the setting that is told of where none is said.
    """

    matrix: pd.DataFrame
    cost: pd.DataFrame
    record: Mapping[str, Any]

    @property
    def headline(self) -> Scenario:
        """Among which classes a text is classified: its own task's (til), or all that were seen (cil)."""
        return "til"

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The matrix as `regard.continual.metrics.metrics_table` wants it, rows as methods."""
        raise NotImplementedError

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def streams(self) -> list[str]:
        """The streams with runs."""
        return [str(name) for name in self.scores["stream"].unique()]

    def rows(self, stream: str) -> list[str]:
        """The rows with runs on a stream."""
        return [str(name) for name in self.scores.loc[self.scores["stream"] == stream, "method"].unique()]

    def n(self, stream: str, row: str) -> int:
        """How many runs a row has on a stream."""
        return len(where(self.scores, stream=stream, method=row)[PAIR].drop_duplicates())

    # -- means and differences ----------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The measures of each run, `regard.continual.metrics.metrics_table`, rows as methods."""
        return metrics_table(self.scores)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Means over runs with intervals, `regard.continual.comparison.summarize`."""
        return comparison.summarize(self.metrics)

    def mean(
        self, stream: str, row: str, metric: str = "average_performance", setting: str | None = None
    ) -> Interval | None:
        """The mean of a measure over runs; None where no run defines it."""
        values = self.by_run(stream, row, metric, setting)
        return t_interval(list(values.values())) if values else None

    def difference(
        self, stream: str, row: str, against: str, metric: str = "average_performance", setting: str | None = None
    ) -> Interval | None:
        """How much more of a measure a row has than another, run by run; None without a run in common."""
        return paired(*(self.by_run(stream, one, metric, setting) for one in (row, against)))

    def by_run(
        self, stream: str, row: str, metric: str = "average_performance", setting: str | None = None
    ) -> dict[Run, float]:
        """A measure of each run of a row that defines it, by seed and order."""
        return self._values.get((stream, row, metric, setting or self.headline), {})

    @cached_property
    def _values(self) -> dict[tuple[str, str, str, str], dict[Run, float]]:
        """Each measure by stream, row, metric and setting, then by run."""
        found: dict[tuple[str, str, str, str], dict[Run, float]] = {}
        told = self.metrics.dropna(subset="value")
        for stream, row, seed, order, *place, value in told[_NAMES].itertuples(index=False, name=None):
            found.setdefault((stream, row, *place), {})[seed, order] = float(value)
        return found

    def against(
        self, stream: str, against: str, metric: str = "average_performance", setting: str | None = None
    ) -> pd.DataFrame:
        """All rows of a stream against one, with the corrected p of the paired tests; empty without that row."""
        asked = where(self.metrics, stream=stream, metric=metric, scenario=setting or self.headline)
        if against not in set(asked["method"]):
            return pd.DataFrame(columns=[*comparison.DIFFERENCES])
        return comparison.compare_methods(asked, against)


def long_scores(wide: pd.DataFrame) -> pd.DataFrame:
    """A line for each score, of a matrix that has both settings side by side; missing ones are left out."""
    kept = [name for name in wide if name not in ("til", "cil")]
    return wide.melt(kept, ["til", "cil"], var_name="scenario", value_name="score").dropna(subset="score")


def paired(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> Interval | None:
    """The mean difference over the runs that both have, with its interval; None without one."""
    common = [run for run in ours if run in theirs]
    return t_interval([ours[run] - theirs[run] for run in common]) if common else None


def where(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The lines of a table that have these values."""
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table
