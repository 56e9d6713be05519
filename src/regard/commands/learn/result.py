"""Frozen records of runs of continual learning, to and from disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regard.commands.learn.page import learn_page
from regard.commands.learn.terminal import learn_summary
from regard.continual import comparison, forgetting, metrics
from regard.errors import UserError
from regard.runs import result as runs_result
from regard.runs.folder import RESULTS, atomic_folder
from regard.runs.result import PAGE

if TYPE_CHECKING:
    from rich.console import RenderableType

VERB, MODELS = "learn", "models"
TABLES = ("matrix", "cost", "diagnostics", "interference", "gate", "pseudo")
LATER = ("gate", "pseudo")
"""Tables that the folders of earlier versions lack."""
_PLACE = ("task_index", "task")
COLUMNS: dict[str, tuple[str, ...]] = {
    "matrix": metrics.COLUMNS,
    "cost": (
        *("stream", "method", "seed", "order", *_PLACE, "seconds", "hook_seconds", "flops", "peak_memory_mib", "steps"),
        *("examples_per_second", "memory_bytes", "memory_examples"),
    ),
    "diagnostics": (
        *("stream", "method", "seed", "order", "after_task", *_PLACE),
        *("statistic", "layer", "value", "standard_error"),
    ),
    "interference": (
        *("stream", "method", "seed", "order", "after_task"),
        *("task_index_a", "task_a", "task_index_b", "task_b", "dot", "cosine"),
    ),
    "gate": (*("stream", "method", "seed", "order", "after_task"), *_PLACE, *("statistic", "adapter", "value")),
    "pseudo": (*("stream", "method", "seed", "order"), *_PLACE, *("statistic", "value")),
}
"""The columns of each table."""


@dataclass(frozen=True, repr=False)
class LearnResult:
    """What methods made of a stream: the accuracy matrix of every run, its cost, and what was diagnosed.

    `accuracy_matrix` (in matrix.parquet), `cost`, `diagnostics`, `interference`, `gate`, which is empty for methods
    without one, and `pseudo`, of what SAPT has generated, are tidy (`docs/design.md`); `metadata` is the provenance;
    `models` is where what each task has changed lies, None where nothing was kept.
    """

    accuracy_matrix: pd.DataFrame
    cost: pd.DataFrame
    diagnostics: pd.DataFrame
    interference: pd.DataFrame
    metadata: dict[str, Any]
    models: Path | None = field(default=None)
    gate: pd.DataFrame = field(default_factory=lambda: make_table("gate", []))
    pseudo: pd.DataFrame = field(default_factory=lambda: make_table("pseudo", []))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """AP, FGT, BWT and the other measures of each run, see `regard.continual.metrics`."""
        return metrics.metrics_table(self.accuracy_matrix, initial=self._chance)

    @cached_property
    def summary_table(self) -> pd.DataFrame:
        """Means over runs with standard deviations and 95 % intervals, see `regard.continual.comparison.summarize`."""
        return comparison.summarize(self.metrics)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences between methods, paired by seed, see `regard.continual.comparison.compare_methods`."""
        return comparison.compare_methods(self.metrics)

    def forgotten_tasks(self, margin: float = 1.0) -> list[forgetting.ForgottenTask]:
        """Tasks that have lost more than a margin since they were learnt, see `regard.continual.forgetting.check`."""
        return forgetting.check(self.accuracy_matrix, margin=margin)

    @property
    def _chance(self) -> dict[str, float]:
        """What guessing scores; an answer that is written is not guessed."""
        tasks = self.metadata["stream"]["tasks"]
        return {task["name"]: 0.0 if task.get("metric") else 100 / len(task["labels"]) for task in tasks}

    def __repr__(self) -> str:
        told = self.summary_table
        told = told[(told["scenario"] == "til") & (told["metric"] == "average_performance")]
        means = ", ".join(f"{method} {mean:.1f}" for method, mean in zip(told["method"], told["mean"], strict=True))
        return f"Learning({self.metadata['stream']['name']}: {means})"

    @property
    def _tables(self) -> dict[str, pd.DataFrame]:
        found = {"matrix": self.accuracy_matrix, **{name: getattr(self, name) for name in TABLES if name != "matrix"}}
        return {**found, "metrics": self.metrics, "summary": self.summary_table, "differences": self.differences}

    def summary(self) -> RenderableType:
        """The few lines that a terminal shows, for rich's `print`."""
        return learn_summary(self._tables, self.metadata)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Where it was written: the folder, with tables, record, models and report page; whole or not at all."""
        with atomic_folder(folder, overwrite=overwrite, verb=VERB) as place:
            tables = self._tables
            text = json.dumps(self.metadata, indent=2, ensure_ascii=False, allow_nan=False)
            (place / RESULTS).write_text(text + "\n", encoding="utf-8")
            for name in TABLES:
                tables[name].to_parquet(place / f"{name}.parquet", index=False)
            (place / PAGE).write_text(learn_page(tables, self.metadata), encoding="utf-8")
            if self.models is not None:
                shutil.copytree(self.models, place / MODELS, copy_function=_linked)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> LearnResult:
        """The run in a folder. Raises UserError if it is not there, or not whole."""
        folder = Path(folder)
        record = read_record(folder)
        there = [name for name in TABLES if name not in LATER or (folder / f"{name}.parquet").exists()]
        try:
            found = {name: pd.read_parquet(folder / f"{name}.parquet") for name in there}
        except (OSError, ValueError) as error:
            raise UserError(f"the run in {folder} cannot be read: {' '.join(str(error).split())}") from error
        models, matrix = folder / MODELS, found.pop("matrix")
        return cls(accuracy_matrix=matrix, **found, metadata=record, models=models if models.is_dir() else None)


def _linked(source: str, target: str) -> None:
    """The file under a second name, for it is never changed; a copy where the disk has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def read_record(folder: str | Path) -> dict[str, Any]:
    """The record of a finished run in a folder. Raises UserError if there is none."""
    return runs_result.read_record(folder, verb=VERB, told="learning")


def make_table(name: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows of a table with its columns, those that a row lacks null."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS[name]))
    whole = [one for one in ("layer", "adapter") if one in frame]
    return frame.astype(dict.fromkeys(whole, "Int64"))
