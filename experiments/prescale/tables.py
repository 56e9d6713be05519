"""Tables of the pre-scaling experiment in docs/results.

Its page and figures use nothing else. `Tables.gather` makes them from the runs in a folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common import runs as finished
from experiments.common.comparison import Comparison, long_scores, where
from experiments.common.parts import RESULTS
from experiments.prescale.run import DIAGNOSED, EVALUATED, LOOKED_AT, ROWS, SEEDS, STREAMS, TRAIN, budget
from regard.errors import UserError

RECORD = "prescale.json"
COLUMNS: dict[str, tuple[str, ...]] = {
    "matrix": ("stream", "row", "seed", "after_task", "task_index", "task", "til", "cil", "n"),
    "cost": ("stream", "row", "seed", *finished.COST),
    "diagnostics": ("stream", "row", "statistic", "layer", "tasks", "when", "mean", "std", "n"),
    "diagnostics-seeds": ("stream", "row", "seed", "statistic", "before", "after", "tasks"),
}
"""The columns of docs/results/prescale-NAME.csv.

`matrix`: the scores of both settings side by side, empty where there is none. `cost`: see `experiments.common.runs`.
`diagnostics`: means over the `n` seeds of the values before or after the `first` or `last` task, or of the mean over
`all`; an empty layer is all layers. `diagnostics-seeds`: those of all layers and the mean over tasks, seed by seed.
"""
FLOATS = ("mean", "std", "before", "after")
WHEN = ("before", "after")
TASKS = ("first", "last", "all")


@dataclass(frozen=True, eq=False)
class Tables(Comparison):
    """The tables named in `COLUMNS`, and the record of the runs."""

    diagnostics: pd.DataFrame
    seeds: pd.DataFrame

    @classmethod
    def gather(cls, work: str | Path, revision: str | None = None) -> Tables:
        """Make the tables from the runs of `experiments.prescale.run` in a folder. Raises UserError."""
        runs = finished.read_runs(Path(work), "experiments.prescale.run", _is_known, _sort_key)
        diagnostics = _read_diagnostics(runs)
        return cls(
            matrix=finished.make_table(
                (row for run in runs for row in finished.matrix_rows(run, _run_key(run))), COLUMNS["matrix"]
            ),
            cost=finished.make_table((finished.cost_row(run, _run_key(run)) for run in runs), COLUMNS["cost"]),
            diagnostics=_means(diagnostics),
            seeds=_by_seed(diagnostics),
            record=_record(runs, revision),
        )

    @classmethod
    def load(cls, folder: str | Path = RESULTS) -> Tables:
        """Load the tables of a folder. Raises UserError if one is missing."""
        rows, record = finished.load_tables(Path(folder), "prescale", RECORD, COLUMNS, FLOATS)
        return cls(
            matrix=rows["matrix"],
            cost=rows["cost"],
            diagnostics=rows["diagnostics"],
            seeds=rows["diagnostics-seeds"],
            record=record,
        )

    def save(self, folder: str | Path = RESULTS) -> None:
        """Write the tables into a folder."""
        tables = zip(COLUMNS, (self.matrix, self.cost, self.diagnostics, self.seeds), strict=True)
        finished.save_tables(Path(folder), "prescale", RECORD, dict(tables), self.record)

    def orders(self, stream: str) -> dict[int, list[int]]:
        """Return the order of the tasks by seed."""
        return {int(seed): order for seed, order in self.record["streams"][stream]["orders"].items()}

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The matrix with one score a line, and the order of its seed."""
        orders = {stream: self.orders(str(stream)) for stream in self.matrix["stream"].unique()}
        order = [
            "-".join(map(str, orders[s][n])) for s, n in zip(self.matrix["stream"], self.matrix["seed"], strict=True)
        ]
        return long_scores(self.matrix.rename(columns={"row": "method"}).assign(order=order))

    def diagnosed(self, stream: str, row: str, statistic: str, when: str) -> dict[int, float]:
        """Return a statistic over all layers by seed, the mean over tasks."""
        rows = where(self.seeds, stream=stream, row=row, statistic=statistic)
        return {int(seed): float(value) for seed, value in zip(rows["seed"], rows[when], strict=True)}

    def layers(self, stream: str, row: str, statistic: str, tasks: str, when: str) -> pd.DataFrame:
        """Return a statistic by layer: `layer` (null: all), `mean`, `std`, `n`."""
        rows = where(self.diagnostics, stream=stream, row=row, statistic=statistic, tasks=tasks, when=when)
        return rows[["layer", "mean", "std", "n"]]


# -- from runs -----------------------------------------------------------------------------------------------


def _is_known(run: Mapping[str, Any]) -> bool:
    return run["stream"]["name"] in STREAMS and run["row"] in ROWS


def _sort_key(run: Mapping[str, Any]) -> tuple[int, int, bool, int]:
    """Return the position by stream, row and seed, seeds of the experiment first."""
    seed = run["seed"]
    known = seed in SEEDS
    streams, rows = list(STREAMS), list(ROWS)
    return (
        streams.index(run["stream"]["name"]),
        rows.index(run["row"]),
        not known,
        SEEDS.index(seed) if known else seed,
    )


def _run_key(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": run["stream"]["name"], "row": run["row"], "seed": run["seed"]}


def _read_diagnostics(runs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return all diagnostics of all runs, each with its time (`WHEN`)."""
    frames = [pd.DataFrame(run["diagnostics"]).assign(**_run_key(run)) for run in runs if run["diagnostics"]]
    columns = ["stream", "row", "seed", "task_index", "statistic", "layer", "when", "value"]
    if not frames:
        return pd.DataFrame(columns=columns)
    rows = pd.concat(frames, ignore_index=True)
    rows["when"] = [WHEN[after == place] for after, place in zip(rows["after_task"], rows["task_index"], strict=True)]
    return rows[columns].astype({"layer": "Int64"})


def _means(diagnostics: pd.DataFrame) -> pd.DataFrame:
    """Return means over tasks, then over seeds."""
    last = diagnostics.groupby(["stream", "row", "seed"])["task_index"].transform("max")
    selections = {
        "first": diagnostics["task_index"] == 1,
        "last": diagnostics["task_index"] == last,
        "all": diagnostics["task_index"] > 0,
    }
    keys = ["stream", "row", "statistic", "layer", "tasks", "when"]
    parts = [diagnostics[which].assign(tasks=tasks) for tasks, which in selections.items()]
    by_seed = pd.concat(parts).groupby([*keys, "seed"], sort=False, dropna=False)["value"].mean()
    rows = by_seed.groupby(keys, sort=False, dropna=False).agg(["mean", "std", "size"]).reset_index()
    return finished.set_types(rows.rename(columns={"size": "n"}), COLUMNS["diagnostics"], FLOATS)


def _by_seed(diagnostics: pd.DataFrame) -> pd.DataFrame:
    """Return means over tasks of all layers, before and after each task, by seed."""
    all_layers = diagnostics[diagnostics["layer"].isna()]
    keys = ["stream", "row", "seed", "statistic"]
    rows = all_layers.pivot_table(index=keys, columns="when", values="value", aggfunc="mean", sort=False).reset_index()
    rows.columns.name = None
    num_tasks = all_layers.groupby(keys, sort=False)["task_index"].nunique()
    rows["tasks"] = [num_tasks[place] for place in rows[keys].itertuples(index=False, name=None)]
    columns = COLUMNS["diagnostics-seeds"]
    return finished.set_types(rows.reindex(columns=list(columns)), columns, FLOATS)


def _record(runs: Sequence[Mapping[str, Any]], revision: str | None) -> dict[str, Any]:
    """Return settings, versions and tasks of the runs."""
    streams = {name: of for name in STREAMS if (of := [run for run in runs if run["stream"]["name"] == name])}
    return {
        "revision": revision,
        "regard": sorted({run["regard"] for run in runs}),
        "versions": finished.distinct(run["versions"] for run in runs),
        "model": "minilm",
        "rows": {row: {"method": method, "settings": settings} for row, (method, settings) in ROWS.items()},
        "looked_at": list(LOOKED_AT),
        "seeds": list(SEEDS),
        "train_rows_a_class": TRAIN,
        "test_rows_a_task": EVALUATED,
        "diagnosed_rows_a_task": DIAGNOSED,
        "streams": {name: _describe_stream(name, of) for name, of in streams.items()},
    }


def _describe_stream(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tasks, orders and budget of a stream. Raises UserError if a seed has several orders."""
    orders: dict[str, list[int]] = {}
    tasks: dict[int, str] = {}
    for run in runs:
        order = orders.setdefault(str(run["seed"]), run["stream"]["order"])
        if order != run["stream"]["order"]:
            raise UserError(f"work: expected one order a seed, {name} has several for seed {run['seed']}")
        tasks |= {order[cell["task_index"] - 1]: cell["task"] for cell in run["matrix"]}
    record = runs[0]["stream"]["record"]
    dropped = [sum(_count_dropped(run)) for run in runs]
    return {
        "published": record.get("published"),
        "tasks": [tasks[number] for number in sorted(tasks)],
        "classes": {task: sorted(of["train"]) for task, of in record["drawn"].items()},
        "test_rows": {task: sum(of["test"].values()) for task, of in record["drawn"].items()},
        "most_rows_dropped": max(dropped),
        "orders": orders,
        "budget": {k: v for k, v in dataclasses.asdict(budget(name)).items() if v is not None},
    }


def _count_dropped(run: Mapping[str, Any]) -> list[int]:
    """Return the numbers of rows that were dropped because two splits had them."""
    overlaps = run["stream"]["record"].get("overlaps", {})
    return [n for of in overlaps.values() for what, n in of.items() if what.startswith("dropped")]
