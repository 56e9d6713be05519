"""The small tables in docs/results that the runs of the pre-scaling experiment come to.

They are all that its page and pictures are made from: `Tables.gather` makes them of the runs in a folder.
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
    """The tables by the names of `COLUMNS`, and the record of what the runs were made with."""

    diagnostics: pd.DataFrame
    seeds: pd.DataFrame

    @classmethod
    def gather(cls, work: str | Path, revision: str | None = None) -> Tables:
        """The tables of the runs in a folder, as `experiments.prescale.run` leaves them there. Raises UserError."""
        runs = finished.read_runs(Path(work), "experiments.prescale.run", _known, _place)
        each = _looked_at(runs)
        return cls(
            matrix=finished.make_table(
                (row for run in runs for row in finished.matrix_rows(run, _key(run))), COLUMNS["matrix"]
            ),
            cost=finished.make_table((finished.cost_row(run, _key(run)) for run in runs), COLUMNS["cost"]),
            diagnostics=_means(each),
            seeds=_by_seed(each),
            record=_record(runs, revision),
        )

    @classmethod
    def load(cls, folder: str | Path = RESULTS) -> Tables:
        """The tables in a folder. Raises UserError where one is missing."""
        found, record = finished.load_tables(Path(folder), "prescale", RECORD, COLUMNS, FLOATS)
        return cls(
            matrix=found["matrix"],
            cost=found["cost"],
            diagnostics=found["diagnostics"],
            seeds=found["diagnostics-seeds"],
            record=record,
        )

    def save(self, folder: str | Path = RESULTS) -> None:
        """Write the tables into a folder."""
        tables = zip(COLUMNS, (self.matrix, self.cost, self.diagnostics, self.seeds), strict=True)
        finished.save_tables(Path(folder), "prescale", RECORD, dict(tables), self.record)

    def orders(self, stream: str) -> dict[int, list[int]]:
        """The order of the tasks, by seed."""
        return {int(seed): order for seed, order in self.record["streams"][stream]["orders"].items()}

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The matrix, a line a score, the order of each seed beside it."""
        orders = {stream: self.orders(str(stream)) for stream in self.matrix["stream"].unique()}
        order = [
            "-".join(map(str, orders[s][n])) for s, n in zip(self.matrix["stream"], self.matrix["seed"], strict=True)
        ]
        return long_scores(self.matrix.rename(columns={"row": "method"}).assign(order=order))

    def diagnosed(self, stream: str, row: str, statistic: str, when: str) -> dict[int, float]:
        """A statistic of all layers, the mean over tasks, by seed."""
        found = where(self.seeds, stream=stream, row=row, statistic=statistic)
        return {int(seed): float(value) for seed, value in zip(found["seed"], found[when], strict=True)}

    def layers(self, stream: str, row: str, statistic: str, tasks: str, when: str) -> pd.DataFrame:
        """A statistic by layer: `layer` (null: all), `mean`, `std`, `n`."""
        found = where(self.diagnostics, stream=stream, row=row, statistic=statistic, tasks=tasks, when=when)
        return found[["layer", "mean", "std", "n"]]


# -- from runs -----------------------------------------------------------------------------------------------


def _known(run: Mapping[str, Any]) -> bool:
    return run["stream"]["name"] in STREAMS and run["row"] in ROWS


def _place(run: Mapping[str, Any]) -> tuple[int, int, bool, int]:
    """By stream, row and seed, seeds of the experiment first."""
    seed = run["seed"]
    known = seed in SEEDS
    streams, rows = list(STREAMS), list(ROWS)
    return (
        streams.index(run["stream"]["name"]),
        rows.index(run["row"]),
        not known,
        SEEDS.index(seed) if known else seed,
    )


def _key(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": run["stream"]["name"], "row": run["row"], "seed": run["seed"]}


def _looked_at(runs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Every diagnostic of every run, with when it was taken."""
    frames = [pd.DataFrame(run["diagnostics"]).assign(**_key(run)) for run in runs if run["diagnostics"]]
    columns = ["stream", "row", "seed", "task_index", "statistic", "layer", "when", "value"]
    if not frames:
        return pd.DataFrame(columns=columns)
    found = pd.concat(frames, ignore_index=True)
    found["when"] = [
        WHEN[after == place] for after, place in zip(found["after_task"], found["task_index"], strict=True)
    ]
    return found[columns].astype({"layer": "Int64"})


def _means(each: pd.DataFrame) -> pd.DataFrame:
    """Means over tasks, then over seeds."""
    last = each.groupby(["stream", "row", "seed"])["task_index"].transform("max")
    chosen = {"first": each["task_index"] == 1, "last": each["task_index"] == last, "all": each["task_index"] > 0}
    keys = ["stream", "row", "statistic", "layer", "tasks", "when"]
    parts = [each[which].assign(tasks=tasks) for tasks, which in chosen.items()]
    by_seed = pd.concat(parts).groupby([*keys, "seed"], sort=False, dropna=False)["value"].mean()
    found = by_seed.groupby(keys, sort=False, dropna=False).agg(["mean", "std", "size"]).reset_index()
    return finished.set_types(found.rename(columns={"size": "n"}), COLUMNS["diagnostics"], FLOATS)


def _by_seed(each: pd.DataFrame) -> pd.DataFrame:
    """Of all layers: the mean over tasks before and after each, seed by seed."""
    whole = each[each["layer"].isna()]
    keys = ["stream", "row", "seed", "statistic"]
    found = whole.pivot_table(index=keys, columns="when", values="value", aggfunc="mean", sort=False).reset_index()
    found.columns.name = None
    many = whole.groupby(keys, sort=False)["task_index"].nunique()
    found["tasks"] = [many[place] for place in found[keys].itertuples(index=False, name=None)]
    columns = COLUMNS["diagnostics-seeds"]
    return finished.set_types(found.reindex(columns=list(columns)), columns, FLOATS)


def _record(runs: Sequence[Mapping[str, Any]], revision: str | None) -> dict[str, Any]:
    """What the runs were made with, and of what."""
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
        "streams": {name: _of_stream(name, of) for name, of in streams.items()},
    }


def _of_stream(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tasks, the order of each seed, and what a task was trained with. Raises UserError for orders that differ."""
    orders: dict[str, list[int]] = {}
    tasks: dict[int, str] = {}
    for run in runs:
        order = orders.setdefault(str(run["seed"]), run["stream"]["order"])
        if order != run["stream"]["order"]:
            raise UserError(f"work: expected one order a seed, {name} has several for seed {run['seed']}")
        tasks |= {order[cell["task_index"] - 1]: cell["task"] for cell in run["matrix"]}
    given = runs[0]["stream"]["record"]
    dropped = [sum(_dropped(run)) for run in runs]
    return {
        "published": given.get("published"),
        "tasks": [tasks[number] for number in sorted(tasks)],
        "classes": {task: sorted(of["train"]) for task, of in given["drawn"].items()},
        "test_rows": {task: sum(of["test"].values()) for task, of in given["drawn"].items()},
        "most_rows_dropped": max(dropped),
        "orders": orders,
        "budget": {k: v for k, v in dataclasses.asdict(budget(name)).items() if v is not None},
    }


def _dropped(run: Mapping[str, Any]) -> list[int]:
    """How many rows stood in two splits, and were dropped."""
    overlaps = run["stream"]["record"].get("overlaps", {})
    return [n for of in overlaps.values() for what, n in of.items() if what.startswith("dropped")]
