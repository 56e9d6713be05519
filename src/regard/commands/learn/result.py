"""Result of `regard learn`, and its files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import pandas as pd

from regard.commands.learn.charts import MEANS, make_curve_panels
from regard.commands.learn.matrix import average_scores, find_afters
from regard.commands.learn.page import learn_page
from regard.commands.learn.tables import SCENARIOS, count_tasks, find_scenarios, method_names, task_names
from regard.commands.learn.terminal import learn_summary
from regard.continual import comparison, forgetting, metrics
from regard.continual.costs import AROUND
from regard.errors import UserError, check_choice
from regard.report.drawing import Map, draw_maps, draw_panels
from regard.runs.result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

MODELS = "models"
LearnKind = Literal["curves", "matrix"]
TABLES = ("matrix", "cost", "diagnostics", "interference", "gate", "pseudo", "general")
_RUN, _TASK = ("stream", "method", "seed", "order"), ("task_index", "task")
MAIN_METRICS = ("average_performance", "forgetting", "forgetting_rate")
"""Metrics by which runs are compared."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "matrix": (*metrics.COLUMNS, *metrics.PAIRED),
    "cost": (
        *(*_RUN, *_TASK, "seconds", *AROUND, "flops", "peak_memory_mib", "steps"),
        *("examples_per_second", "memory_bytes", "memory_examples"),
    ),
    "diagnostics": (*_RUN, "after_task", *_TASK, "statistic", "layer", "value", "standard_error"),
    "interference": (*_RUN, "after_task", "task_index_a", "task_a", "task_index_b", "task_b", "dot", "cosine"),
    "gate": (*_RUN, "after_task", *_TASK, "statistic", "adapter", "value"),
    "pseudo": (*_RUN, *_TASK, "statistic", "value"),
    "general": (*_RUN, "after_task", "statistic", "value", "standard_error", "n"),
}
"""Columns of each table."""


@dataclass(frozen=True, repr=False)
class LearnResult(RunResult):
    """Result of methods on a stream; `docs/files.md` describes tables and metadata.

    Attributes:
        accuracy_matrix: Score of each task after each task, for every run (`matrix.parquet`).
        cost: Cost of each task and run.
        diagnostics: Sinks and over-smoothing before and after tasks.
        interference: Dot products of the tasks' gradients.
        metadata: Provenance of the results.
        models: Folder of the tasks' changes to the model; None if not saved.
        gate: Routing weights of methods with a gate.
        pseudo: Quality of the samples that SAPT and LFPT5 generate.
        general: What the stream's own tasks do not show: the divergence on held-out text, scores of other tasks.
    """

    command: ClassVar[str] = "learn"
    tables: ClassVar[Mapping[str, str]] = {"accuracy_matrix": "matrix", **{name: name for name in TABLES[1:]}}

    accuracy_matrix: pd.DataFrame
    cost: pd.DataFrame
    diagnostics: pd.DataFrame
    interference: pd.DataFrame
    metadata: dict[str, Any]
    models: Path | None = field(default=None)
    gate: pd.DataFrame = field(default_factory=lambda: make_table("gate", []))
    pseudo: pd.DataFrame = field(default_factory=lambda: make_table("pseudo", []))
    general: pd.DataFrame = field(default_factory=lambda: make_table("general", []))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """AP, FGT, BWT and other metrics of each run, see `regard.continual.metrics`."""
        return metrics.metrics_table(self.accuracy_matrix, initial=self._chance)

    @cached_property
    def summary_table(self) -> pd.DataFrame:
        """Means, standard deviations and 95 % intervals, see `regard.continual.comparison.summarize`."""
        return comparison.summarize(self.metrics)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences between methods, paired by seed, see `regard.continual.comparison.compare_methods`."""
        return comparison.compare_methods(self.metrics)

    def forgotten_tasks(self, margin: float = 1.0) -> list[forgetting.ForgottenTask]:
        """Return tasks that lost more than a margin, perhaps by chance, see `regard.continual.forgetting.check`."""
        return forgetting.check(self.accuracy_matrix, margin=margin)

    @property
    def _chance(self) -> dict[str, float]:
        """Chance score by task; 0 for generated answers."""
        tasks = self.metadata["stream"]["tasks"]
        return {task["name"]: 0.0 if task.get("metric") else 100 / len(task["labels"]) for task in tasks}

    def headline(self) -> str:
        rows = self.summary_table
        rows = rows[(rows["scenario"] == "til") & (rows["metric"] == "average_performance")]
        means = ", ".join(f"{method} {mean:.1f}" for method, mean in zip(rows["method"], rows["mean"], strict=True))
        return f"{self.metadata['stream']['name']}: {means}"

    def overview(self) -> pd.DataFrame:
        """Return the means of average performance, forgetting and forgetting rate with their 95 % intervals."""
        rows = self.summary_table[self.summary_table["metric"].isin(MAIN_METRICS)]
        return rows[["method", "scenario", "metric", "n", "mean", "ci_low", "ci_high"]]

    def plot(self, kind: LearnKind = "curves") -> Figure:
        """Draw scores and forgetting over the tasks trained, a line per method, or the accuracy matrix of each method.

        Curves are means over runs with 95 % intervals, matrices means over runs, both of the first scenario. Raises
        UserError if there is nothing to draw.
        """
        check_choice("kind", kind, get_args(LearnKind))
        drawn = {"curves": draw_curves, "matrix": draw_matrices}[kind](self.accuracy_matrix)
        if drawn is None:
            raise UserError(f"there is no {kind} to draw: expected scores of a trained task")
        return drawn

    @property
    def _all_tables(self) -> dict[str, pd.DataFrame]:
        return {
            **super()._all_tables,
            "metrics": self.metrics,
            "summary": self.summary_table,
            "differences": self.differences,
        }

    def figures_by_seed(self) -> dict[str, dict[Any, float]]:
        """Return average performance, forgetting and forgetting rate by method, of each seed and order of tasks."""
        rows = self.metrics[self.metrics["metric"].isin(MAIN_METRICS)].dropna(subset=["value"])
        figures: dict[str, dict[Any, float]] = {}
        for row in rows.itertuples():
            name = f"{row.method}, {row.metric} {row.scenario}"
            figures.setdefault(name, {})[row.seed, row.order] = float(row.value)
        return figures

    def summary(self) -> RenderableType:
        return learn_summary(self._all_tables, self.metadata)

    def page(self) -> str:
        return learn_page(self._all_tables, self.metadata)

    def write_artifacts(self, folder: Path) -> None:
        """Write the tasks' changes to the model, if saved."""
        if self.models is not None:
            shutil.copytree(self.models, folder / MODELS, copy_function=_link, ignore=self._find_leftovers)

    def _find_leftovers(self, folder: str, names: Sequence[str]) -> set[str]:
        """Return what killed processes left in a run's folder, whose own name begins with a dot for ./own.py:Own."""
        return set() if Path(folder) == self.models else {name for name in names if name.startswith(".")}

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Find what `write_artifacts` wrote."""
        return {"models": folder / MODELS if (folder / MODELS).is_dir() else None}


def _link(source: str, target: str) -> None:
    """Hard-link a file, which never changes; copy it if the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def make_table(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table with all columns; missing values are null."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS[name]))
    integer_columns = [name for name in ("layer", "adapter") if name in frame]
    paired = [name for name in metrics.PAIRED if name in frame]
    return frame.astype({**dict.fromkeys(integer_columns, "Int64"), **dict.fromkeys(paired, "float64")})


def draw_curves(matrix: pd.DataFrame) -> Figure | None:
    """Draw mean score and forgetting over the tasks trained, in the first scenario; None without scores."""
    panels = next(iter(make_curve_panels(matrix).values()), [])
    means = [panel for panel in panels if panel["caption"] in MEANS]
    return draw_panels(means) if means else None


def draw_matrices(matrix: pd.DataFrame) -> Figure | None:
    """Draw the accuracy matrix of each method, mean over runs, in the first scenario; None without scores."""
    scenario = next(iter(find_scenarios(matrix)), None)
    if scenario is None:
        return None
    rows = matrix[matrix["scenario"] == scenario]
    maps, afters = [], find_afters(rows)
    for method in method_names(rows):
        values = np.array(average_scores(rows[rows["method"] == method], afters, count_tasks(matrix)), dtype=np.float64)
        title = f"{method}, {SCENARIOS[scenario]} score, %"
        maps.append(Map(title, values, afters, task_names(matrix), "Tasks trained", "Task"))
    return draw_maps(maps)
