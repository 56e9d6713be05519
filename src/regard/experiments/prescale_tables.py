"""The small tables in docs/results that the runs of the pre-scaling experiment come to.

They are all that its page and pictures are made from: `Tables.gather` makes them of the runs in a folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from regard.continual import comparing
from regard.continual.intervals import Interval, t_interval
from regard.continual.metrics import metrics_table
from regard.errors import UserError
from regard.experiments.prescale import DIAGNOSED, EVALUATED, LOOKED_AT, ROWS, SEEDS, STREAMS, TRAIN, budget
from regard.results import write_file

FOLDER = Path("docs") / "results"
RECORD = "prescale.json"
COLUMNS: dict[str, tuple[str, ...]] = {
    "matrix": ("stream", "row", "seed", "after_task", "position", "task", "til", "cil", "n"),
    "cost": (
        *("stream", "row", "seed", "seconds", "run_seconds", "flops", "steps"),
        *("peak_memory_mib", "bytes_stored", "examples_kept"),
    ),
    "diagnostics": ("stream", "row", "statistic", "layer", "tasks", "when", "mean", "sd", "n"),
    "diagnostics-seeds": ("stream", "row", "seed", "statistic", "before", "after", "tasks"),
}
"""The columns of docs/results/prescale-NAME.csv.

`matrix`: the scores of both settings side by side, empty where there is none. `cost`: sums over the tasks of a run,
but the peak of memory and what is stored after the last; `seconds` are of training, `run_seconds` of the whole run.
`diagnostics`: means over the `n` seeds of the values before or after the `first` or `last` task, or of the mean over
`all`; an empty layer is all layers. `diagnostics-seeds`: those of all layers and the mean over tasks, seed by seed.
"""
WHEN = ("before", "after")
TASKS = ("first", "last", "all")


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables by the names of `COLUMNS`, and the record of what the runs were made with."""

    matrix: pd.DataFrame
    cost: pd.DataFrame
    diagnostics: pd.DataFrame
    seeds: pd.DataFrame
    record: Mapping[str, Any]

    @classmethod
    def gather(cls, work: str | Path, revision: str | None = None) -> Tables:
        """The tables of the runs in a folder, as `regard.experiments.prescale` leaves them there. Raises UserError."""
        runs = _read(Path(work))
        each = _looked_at(runs)
        return cls(
            matrix=_frame("matrix", (row for run in runs for row in _scores(run))),
            cost=_frame("cost", map(_cost, runs)),
            diagnostics=_means(each),
            seeds=_by_seed(each),
            record=_record(runs, revision),
        )

    @classmethod
    def load(cls, folder: str | Path = FOLDER) -> Tables:
        """The tables in a folder. Raises UserError where one is missing."""
        folder = Path(folder)
        try:
            found = {name: pd.read_csv(folder / f"prescale-{name}.csv").astype(_types(name)) for name in COLUMNS}
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"tables: expected prescale-*.csv and {RECORD} in {folder}: {error}") from error
        return cls(found["matrix"], found["cost"], found["diagnostics"], found["diagnostics-seeds"], record)

    def save(self, folder: str | Path = FOLDER) -> None:
        """Write the tables into a folder."""
        tables = (self.matrix, self.cost, self.diagnostics, self.seeds)
        for name, table in zip(COLUMNS, tables, strict=True):
            write_file(Path(folder) / f"prescale-{name}.csv", table.to_csv(index=False, float_format="%.6g"))
        write_file(Path(folder) / RECORD, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def streams(self) -> list[str]:
        """The streams with runs."""
        return [str(name) for name in self.matrix["stream"].unique()]

    def rows(self, stream: str) -> list[str]:
        """The rows with runs on a stream."""
        return [str(name) for name in self.matrix.loc[self.matrix["stream"] == stream, "row"].unique()]

    def n(self, stream: str, row: str) -> int:
        """How many seeds a row has on a stream."""
        found = self.cost[(self.cost["stream"] == stream) & (self.cost["row"] == row)]
        return int(found["seed"].nunique())

    def orders(self, stream: str) -> dict[int, list[int]]:
        """The order of the tasks, by seed."""
        return {int(seed): order for seed, order in self.record["streams"][stream]["orders"].items()}

    # -- means and differences ----------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The measures of each run, `regard.continual.metrics.metrics_table`, rows as methods."""
        orders = {stream: self.orders(stream) for stream in self.streams}
        order = [
            "-".join(map(str, orders[s][n])) for s, n in zip(self.matrix["stream"], self.matrix["seed"], strict=True)
        ]
        wide = self.matrix.rename(columns={"row": "method"}).assign(order=order)
        kept = [name for name in wide if name not in ("til", "cil")]
        long = wide.melt(kept, ["til", "cil"], var_name="setting", value_name="score").dropna(subset="score")
        return metrics_table(long)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Means over seeds with intervals, `regard.continual.comparing.summary`."""
        return comparing.summary(self.metrics)

    def mean(self, stream: str, row: str, metric: str = "ap", setting: str = "til") -> Interval | None:
        """The mean of a measure over seeds; None where no run defines it."""
        found = _where(self.summary, stream=stream, method=row, metric=metric, setting=setting)
        if found.empty or not int(found["n"].iloc[0]):
            return None
        return _interval(found.iloc[0], "mean")

    def difference(
        self, stream: str, row: str, against: str, metric: str = "ap", setting: str = "til"
    ) -> Interval | None:
        """How much more of a measure a row has than another, seed by seed; None without a seed in common."""
        asked = _where(self.metrics, stream=stream, metric=metric, setting=setting)
        asked = asked[asked["method"].isin([row, against])]
        if asked["method"].nunique() < 2:
            return None
        found = comparing.differences(asked, against)
        return None if found.empty else _interval(found.iloc[0], "difference")

    def against(self, stream: str, against: str, metric: str = "ap") -> pd.DataFrame:
        """All rows of a stream against one, with the corrected p of the paired tests; empty without that row."""
        asked = _where(self.metrics, stream=stream, metric=metric, setting="til")
        if against not in set(asked["method"]):
            return pd.DataFrame(columns=[*comparing.DIFFERENCES])
        return comparing.differences(asked, against)

    def diagnosed(self, stream: str, row: str, statistic: str, when: str) -> dict[int, float]:
        """A statistic of all layers, the mean over tasks, by seed."""
        found = _where(self.seeds, stream=stream, row=row, statistic=statistic)
        return {int(seed): float(value) for seed, value in zip(found["seed"], found[when], strict=True)}

    def layers(self, stream: str, row: str, statistic: str, tasks: str, when: str) -> pd.DataFrame:
        """A statistic by layer: `layer` (null: all), `mean`, `sd`, `n`."""
        found = _where(self.diagnostics, stream=stream, row=row, statistic=statistic, tasks=tasks, when=when)
        return found[["layer", "mean", "sd", "n"]]


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The mean difference over the seeds that both have, with its interval; None without one."""
    common = [seed for seed in ours if seed in theirs]
    return t_interval([ours[seed] - theirs[seed] for seed in common]) if common else None


def _where(table: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table


def _interval(row: pd.Series, value: str) -> Interval:
    sd, low, high = (float(row[name]) for name in ("sd", "low", "high"))
    return Interval(n=int(row["n"]), mean=float(row[value]), sd=sd, low=low, high=high)


# -- from runs -----------------------------------------------------------------------------------------------


def _read(work: Path) -> list[dict[str, Any]]:
    """The runs in the order of streams, rows and seeds. Raises UserError where there is none, or one is not whole."""
    runs = []
    for path in sorted(work.glob("*/*.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            known = run["stream"]["name"] in STREAMS and run["row"] in ROWS and bool(run["matrix"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"work: expected runs of regard.experiments.prescale, {path} is none: {error!r}") from error
        if not known:
            raise UserError(f"work: expected runs of known streams and rows, {path} is of {run['row']!r}")
        runs.append(run)
    if not runs:
        raise UserError(f"work: expected runs of regard.experiments.prescale in {work}, found none")
    places = (list(STREAMS), list(ROWS), [*SEEDS, *sorted({run["seed"] for run in runs} - set(SEEDS))])
    return sorted(
        runs,
        key=lambda run: tuple(
            names.index(name)
            for names, name in zip(places, (run["stream"]["name"], run["row"], run["seed"]), strict=True)
        ),
    )


def _key(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": run["stream"]["name"], "row": run["row"], "seed": run["seed"]}


def _scores(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the matrix, both settings in one."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for cell in run["matrix"]:
        place = {name: cell[name] for name in ("after_task", "position", "task", "n")}
        row = found.setdefault((cell["after_task"], cell["position"]), {**_key(run), **place})
        row[cell["setting"]] = cell["score"]
    return list(found.values())


def _cost(run: Mapping[str, Any]) -> dict[str, Any]:
    tasks: Sequence[Mapping[str, Any]] = run["cost"]
    return {
        **_key(run),
        **{name: sum(task[name] for task in tasks) for name in ("seconds", "flops", "steps")},
        "run_seconds": run["seconds"],
        "peak_memory_mib": max(task["peak_memory_mib"] for task in tasks),
        **{name: tasks[-1][name] for name in ("bytes_stored", "examples_kept")},
    }


def _looked_at(runs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Every diagnostic of every run, with when it was taken."""
    frames = [pd.DataFrame(run["diagnostics"]).assign(**_key(run)) for run in runs if run["diagnostics"]]
    columns = ["stream", "row", "seed", "position", "statistic", "layer", "when", "value"]
    if not frames:
        return pd.DataFrame(columns=columns)
    found = pd.concat(frames, ignore_index=True)
    found["when"] = [WHEN[after == place] for after, place in zip(found["after_task"], found["position"], strict=True)]
    return found[columns].astype({"layer": "Int64"})


def _means(each: pd.DataFrame) -> pd.DataFrame:
    """Means over tasks, then over seeds."""
    last = each.groupby(["stream", "row", "seed"])["position"].transform("max")
    chosen = {"first": each["position"] == 1, "last": each["position"] == last, "all": each["position"] > 0}
    keys = ["stream", "row", "statistic", "layer", "tasks", "when"]
    parts = [each[which].assign(tasks=tasks) for tasks, which in chosen.items()]
    by_seed = pd.concat(parts).groupby([*keys, "seed"], sort=False, dropna=False)["value"].mean()
    found = by_seed.groupby(keys, sort=False, dropna=False).agg(["mean", "std", "size"]).reset_index()
    return _typed("diagnostics", found.rename(columns={"std": "sd", "size": "n"}))


def _by_seed(each: pd.DataFrame) -> pd.DataFrame:
    """Of all layers: the mean over tasks before and after each, seed by seed."""
    whole = each[each["layer"].isna()]
    keys = ["stream", "row", "seed", "statistic"]
    found = whole.pivot_table(index=keys, columns="when", values="value", aggfunc="mean", sort=False).reset_index()
    found.columns.name = None
    many = whole.groupby(keys, sort=False)["position"].nunique()
    found["tasks"] = [many[place] for place in found[keys].itertuples(index=False, name=None)]
    return _typed("diagnostics-seeds", found.reindex(columns=list(COLUMNS["diagnostics-seeds"])))


def _frame(name: str, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    return _typed(name, pd.DataFrame(list(rows), columns=list(COLUMNS[name])))


def _typed(name: str, table: pd.DataFrame) -> pd.DataFrame:
    return table[list(COLUMNS[name])].astype(_types(name))


def _types(name: str) -> dict[str, str]:
    floats = ("til", "cil", "mean", "sd", "before", "after", "seconds", "run_seconds", "flops", "peak_memory_mib")
    found = {column: "float64" for column in COLUMNS[name] if column in floats}
    return found | ({"layer": "Int64"} if "layer" in COLUMNS[name] else {})


def _record(runs: Sequence[Mapping[str, Any]], revision: str | None) -> dict[str, Any]:
    """What the runs were made with, and of what."""
    streams = {name: of for name in STREAMS if (of := [run for run in runs if run["stream"]["name"] == name])}
    return {
        "revision": revision,
        "regard": sorted({run["regard"] for run in runs}),
        "versions": _distinct([run["versions"] for run in runs]),
        "model": "minilm",
        "rows": {row: {"method": method, "settings": settings} for row, (method, settings) in ROWS.items()},
        "looked_at": list(LOOKED_AT),
        "seeds": list(SEEDS),
        "train_rows_a_class": TRAIN,
        "test_rows_a_task": EVALUATED,
        "diagnosed_rows_a_task": DIAGNOSED,
        "streams": {name: _of_stream(name, of) for name, of in streams.items()},
    }


def _distinct(every: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in every:
        if one not in found:
            found.append(dict(one))
    return found


def _of_stream(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tasks, the order of each seed, and what a task was trained with. Raises UserError for orders that differ."""
    orders: dict[str, list[int]] = {}
    tasks: dict[int, str] = {}
    for run in runs:
        order = orders.setdefault(str(run["seed"]), run["stream"]["order"])
        if order != run["stream"]["order"]:
            raise UserError(f"work: expected one order a seed, {name} has several for seed {run['seed']}")
        tasks |= {order[cell["position"] - 1]: cell["task"] for cell in run["matrix"]}
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


def told(found: Interval | None, digits: int, *, signed: bool = False) -> str:
    """The mean ± half the interval; no ± for one seed, and a dash for none."""
    if found is None or math.isnan(found.mean):
        return "–"
    sign = "+" if signed else ""
    half = f" ± {(found.high - found.low) / 2:.{digits}f}" if math.isfinite(found.low) else ""
    return f"{found.mean:{sign}.{digits}f}{half}"
