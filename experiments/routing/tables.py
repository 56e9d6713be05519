"""Tables of the routing experiment in docs/results: its page uses nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common import runs as finished
from experiments.common.comparison import ACCURACY, long_scores, mean_of, paired, where
from experiments.common.parts import RESULTS
from experiments.routing import ceiling
from experiments.routing.beginnings import NUMBERS, beginnings_of
from experiments.routing.routers import CASES
from experiments.routing.run import BUDGET, ROWS
from experiments.routing.streams import ALONE, STREAMS, TRAINED
from regard.continual.metrics import metrics_table
from regard.errors import UserError
from regard.runs.intervals import Interval

RECORD = "routing.json"
SCORES = {"AP": (ACCURACY, "cil"), "F.Ra": ("forgetting_rate", "cil"), "own AP": (ACCURACY, "til")}
"""Columns of scores: metric and scenario."""
TEXT_SCORES = {"AP": (ACCURACY, "til"), "F.Ra": ("forgetting_rate", "til")}
"""The same where answers are written: no labels are named, and no task."""
WEIGHTS = ("own_weight", "own_largest")
KEY = ("stream", "row", "seed")
COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": (*KEY, *SCORES, *WEIGHTS, "train_s", "between_s", "run_s", "kept_bytes", "kept_examples"),
    "tasks": (*KEY, "task", "learnt", "AP", *WEIGHTS),
    "routers": ("stream", "router", "seed", *WEIGHTS, "same_source", "second_s", "last_s"),
    "confusions": ("stream", "router", "seed", "task", "other", "share"),
    "beginnings": ("stream", "seed", "place", "nothing", "best", *(f"likeliest {most}" for most in NUMBERS)),
}
"""The columns of docs/results/routing-NAME.csv: a run, a task of a run, a router alone, two tasks mixed up, a new
adapter a line.

`own_weight`: mean weight of the own adapter over a task's test rows, mean over tasks; `own_largest`: share of the rows
of which it is the largest; `same_source`: mean weight of all tasks of the same data set. `train_s` are seconds of
training, `between_s` of what a method does before a task's training and after it; `second_s` and `last_s` what a router
takes for the second and the last task. `learnt`: accuracy among the labels so far when the task was just learnt.
`beginnings` are mean losses of a task, the `place`th of the stream, where its adapter begins: under nothing, under the
best of nothing and all earlier adapters, and under the best of nothing and some, the likeliest for the router.
`routers` has the ceilings too, without seconds; `share` is that of a task's test rows that a ceiling sends to another.
"""
NAMES = (*KEY, "task", "router", "other")
FLOATS = tuple(column for columns in COLUMNS.values() for column in columns if column not in NAMES)
ROUTERS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(CASES, ALONE),
    **dict.fromkeys((ceiling.LINEAR, ceiling.TUNED), ceiling.STREAMS),
}
"""Routers alone and ceilings, with the streams that they are measured on."""
RANKS: Mapping[str, Sequence[str]] = {
    "stream": tuple(dict.fromkeys((*TRAINED, *STREAMS))),
    "row": tuple(ROWS),
    "router": tuple(ROUTERS),
}
"""In which order tables have their lines."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables named in `COLUMNS`, and the record of the runs."""

    runs: pd.DataFrame
    tasks: pd.DataFrame
    routers: pd.DataFrame
    confusions: pd.DataFrame
    beginnings: pd.DataFrame
    record: Mapping[str, Any]

    @classmethod
    def gather(cls, work: str | Path, revision: str | None = None) -> Tables:
        """Make the tables from the runs and routers in a folder. Raises UserError."""
        work = Path(work)
        runs = finished.read_runs(work, "experiments.routing.run", _is_known, _sort_key, "run-*/*.json")
        routers = _read_routers(work)
        return cls(
            runs=finished.make_table((_run(run) for run in runs), COLUMNS["runs"], FLOATS),
            tasks=finished.make_table((line for run in runs for line in _tasks(run)), COLUMNS["tasks"], FLOATS),
            routers=finished.make_table((_router(case) for case in routers), COLUMNS["routers"], FLOATS),
            confusions=finished.make_table(
                (line for case in routers for line in _confusions(case)), COLUMNS["confusions"], FLOATS
            ),
            beginnings=finished.make_table(
                (line for record in _read_beginnings(work) for line in beginnings_of(record)),
                COLUMNS["beginnings"],
                FLOATS,
            ),
            record=_record(runs, routers, revision),
        )

    @classmethod
    def load(cls, folder: str | Path = RESULTS) -> Tables:
        """Load the tables of a folder. Raises UserError if one is missing."""
        tables, record = finished.load_tables(Path(folder), "routing", RECORD, COLUMNS, FLOATS)
        return cls(**tables, record=record)

    def save(self, folder: str | Path = RESULTS) -> None:
        """Write the tables into a folder."""
        tables = {name: getattr(self, name) for name in COLUMNS}
        finished.save_tables(Path(folder), "routing", RECORD, tables, self.record)

    def join(self, more: Tables) -> Tables:
        """Return these tables with those of more runs, which take the place of runs of the same seed.

        Raises:
            UserError: The runs are of other settings.
        """
        made = set(more.runs["row"])
        for name in ("model", "rows", "budget"):
            known, found = self.record[name], more.record[name]
            if name == "rows":
                known, found = ({row: of.get(row) for row in sorted(made)} for of in (known, found))
            if known != found:
                raise UserError(f"add: expected runs with the {name} of the stored ones, {known}, got {found}")
        again = {name: getattr(more, name) for name in COLUMNS} | {"confusions": more.routers}  # perhaps of none now
        tables = {name: _join(getattr(self, name), getattr(more, name), again[name]) for name in COLUMNS}
        return Tables(**tables, record=_join_records(self.record, more.record))

    def rows(self, stream: str) -> list[str]:
        """Return the rows with runs on a stream."""
        return [str(name) for name in where(self.runs, stream=stream)["row"].unique()]

    def by_seed(self, stream: str, row: str, column: str) -> dict[int, float]:
        """Return a column of `runs` of each run of a row that has it."""
        return _by_seed(where(self.runs, stream=stream, row=row), column)

    def by_router(self, stream: str, router: str, column: str) -> dict[int, float]:
        """Return a column of `routers` by seed."""
        return _by_seed(where(self.routers, stream=stream, router=router), column)

    def mean(self, stream: str, row: str, column: str) -> Interval | None:
        """Return the mean over the runs of a row; None without one."""
        return mean_of(self.by_seed(stream, row, column))

    def margins(self, stream: str, row: str, reference: str, share: float = 1.0) -> dict[int, float]:
        """Return the AP of a row minus a share of that of another, by seed, of the seeds that both have."""
        values, others = (self.by_seed(stream, name, "AP") for name in (row, reference))
        return {seed: value - share * others[seed] for seed, value in values.items() if seed in others}

    def difference(self, stream: str, row: str, reference: str, column: str = "AP") -> Interval | None:
        """Return the mean difference of two rows, paired by seed."""
        return paired(*(self.by_seed(stream, name, column) for name in (row, reference)))


def _by_seed(rows: pd.DataFrame, column: str) -> dict[int, float]:
    present = rows.dropna(subset=column)
    return {int(seed): float(value) for seed, value in zip(present["seed"], present[column], strict=True)}


def _join(stored: pd.DataFrame, more: pd.DataFrame, again: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of both tables in order, without stored ones of runs that are there `again`."""
    key = [name for name in ("stream", "row", "router", "seed") if name in stored]
    is_replaced = pd.MultiIndex.from_frame(stored[key]).isin(pd.MultiIndex.from_frame(again[key]))
    parts = [part for part in (stored[~is_replaced], more) if len(part)]
    table = pd.concat(parts, ignore_index=True) if parts else stored
    places = table[key].assign(**{name: table[name].map(RANKS[name].index) for name in key if name in RANKS})
    return table.loc[places.sort_values(key, kind="stable").index].reset_index(drop=True)


def _join_records(stored: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    key = ("stream", "router", "seed")
    chosen = {tuple(one[name] for name in key): one for one in (*stored["chosen"], *more["chosen"])}
    new = {name: tasks for name, tasks in more["streams"].items() if name not in stored["streams"]}
    return {
        **stored,
        "revision": more["revision"] or stored["revision"],
        "regard": sorted({*stored["regard"], *more["regard"]}),
        "versions": finished.distinct([*stored["versions"], *more["versions"]]),
        "streams": {**stored["streams"], **new},
        "chosen": list(chosen.values()),
    }


# -- from runs -------------------------------------------------------------------------------------------------------


def _is_known(run: Mapping[str, Any]) -> bool:
    return run["stream"] in TRAINED and run["row"] in ROWS


def _sort_key(run: Mapping[str, Any]) -> tuple[int, int, int]:
    return RANKS["stream"].index(run["stream"]), RANKS["row"].index(run["row"]), run["seed"]


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    matrix = long_scores(pd.DataFrame(finished.matrix_rows(run, {"stream": run["stream"], "method": run["row"]})))
    order = "-".join(map(str, range(len(run["tasks"]))))
    metrics = metrics_table(matrix.assign(seed=run["seed"], order=order))
    values = {(one["metric"], one["scenario"]): one["value"] for one in metrics.to_dict("records")}
    scores = {**SCORES, **({} if _has_classes(run) else TEXT_SCORES)}
    cost = finished.cost_row(run, {})
    return {
        **{name: run[name] for name in KEY},
        **{name: values.get(key) for name, key in scores.items()},
        **{name: _mean(run["routing"], name) for name in WEIGHTS},
        "train_s": cost["seconds"],
        "between_s": sum(task["hook_seconds"] for task in run["cost"]),
        "run_s": run["seconds"],
        "kept_bytes": cost["memory_bytes"],
        "kept_examples": cost["memory_examples"],
    }


def _has_classes(run: Mapping[str, Any]) -> bool:
    return any(cell["scenario"] == "cil" for cell in run["matrix"])


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return sum(row[name] for row in rows) / len(rows) if rows else None


def _tasks(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a line a task, with its accuracy among all labels when learnt and at the end."""
    scenario = "cil" if _has_classes(run) else "til"
    cells = {(cell["task"], cell["after_task"]): cell for cell in run["matrix"] if cell["scenario"] == scenario}
    weights, last = {row["task"]: row for row in run["routing"]}, max(after for _, after in cells)
    lines = []
    for place, task in enumerate(run["tasks"], 1):
        learnt, end = (cells.get((task, after), {}).get("score") for after in (place, last))
        own = {name: weights.get(task, {}).get(name) for name in WEIGHTS}
        lines.append({**{name: run[name] for name in KEY}, "task": task, "learnt": learnt, "AP": end, **own})
    return lines


def _read_routers(work: Path) -> list[dict[str, Any]]:
    cases = []
    for path in sorted(work.glob("routers-*/*.json")):
        try:
            case = json.loads(path.read_text(encoding="utf-8"))
            known = case["stream"] in ROUTERS.get(case["router"], ()) and bool(case["routing"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"work: expected cases of experiments.routing.routers, {path} is none: {error!r}"
            ) from error
        if not known:
            raise UserError(f"work: expected known streams and routers, {path} is of {case['router']!r}")
        cases.append(case)
    return sorted(cases, key=_router_key)


def _read_beginnings(work: Path) -> list[dict[str, Any]]:
    paths = sorted(work.glob("beginnings-*/*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _router_key(case: Mapping[str, Any]) -> tuple[int, int, int]:
    return RANKS["stream"].index(case["stream"]), RANKS["router"].index(case["router"]), case["seed"]


def _router(case: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: case[name] for name in ("stream", "router", "seed")},
        **{name: _mean(case["routing"], name) for name in (*WEIGHTS, "same_source")},
        "second_s": case["seconds"][1] if case["router"] in CASES else None,
        "last_s": case["seconds"][-1] if case["router"] in CASES else None,
    }


def _confusions(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = () if case["router"] in CASES else case["taken_for"]
    return [{**{name: case[name] for name in ("stream", "router", "seed")}, **line} for line in lines]


def _record(runs: Sequence[Any], routers: Sequence[Any], revision: str | None) -> dict[str, Any]:
    """Return settings, versions and tasks of the runs; the tasks in the order of the first seed."""
    streams: dict[str, Any] = {}
    for one in (*runs, *routers):
        streams.setdefault(one["stream"], one["tasks"])
    return {
        "revision": revision,
        "regard": sorted({one["regard"] for one in (*runs, *routers)}),
        "versions": finished.distinct(one["versions"] for one in (*runs, *routers)),
        "model": "minilm",
        "rows": {row: dataclasses.asdict(of) for row, of in ROWS.items()},
        "budget": {name: value for name, value in dataclasses.asdict(BUDGET).items() if value is not None},
        "streams": streams,
        "chosen": [
            {name: case[name] for name in ("stream", "router", "seed", "chosen")}
            for case in routers
            if case["router"] not in CASES
        ],
    }
