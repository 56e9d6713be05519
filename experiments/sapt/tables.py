"""Tables of the SAPT experiment and its analyses in docs/results.

Its page and figures use nothing else. `Tables.gather` makes them from the runs in a folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common import runs as finished
from experiments.common.comparison import Comparison, long_scores, where
from experiments.common.parts import RESULTS
from experiments.sapt.run import ALPHA, BUDGET, EVALUATED, LOOKED_AT, ORDERS, RANK, ROWS, SEEDS, STREAM, TRAIN
from regard.continual.metrics import Scenario, metrics_table
from regard.errors import UserError
from regard.runs.intervals import Interval, t_interval
from regard.runs.output_dir import write_file

RECORD, ANALYSES = "sapt.json", "sapt-analyses.csv"
SAPT, UNREFLECTED, PUBLISHED = "sapt", "sapt, without reflection", "sapt, gate published"
DRAWN = (SAPT, UNREFLECTED, PUBLISHED)
"""The rows whose weights are drawn as maps."""
KEY = ("order", "row", "seed")
STATISTICS = ("own_adapter_weight", "entropy", "reflection")
SCORED = ("routed_score", "own_adapter_score", "last_adapter_score")
WHEN = ("learning", "end")
"""Just after a task was learnt, and after the last one."""
GATE = (
    *(f"{name}_{when}" for name in STATISTICS for when in WHEN),
    *("drift", *SCORED),
)
COLUMNS: dict[str, tuple[str, ...]] = {
    "matrix": (*KEY, "after_task", "task_index", "til", "cil"),
    "cost": (*KEY, *finished.COST, "hook_seconds"),
    "gate": (*KEY, "task_index", "task", *GATE),
    "weights": ("order", "row", "when", "task_index", "adapter", "weight", "n"),
}
"""The columns of docs/results/sapt-NAME.csv.

`matrix`: the scores of both settings side by side, empty where there is none; the names of the tasks, and how many test
rows they have, are in the record. `cost`: see `experiments.common.runs`; `hook_seconds` are those of what a method does
before a task's training and after it. `gate`: what the gate of a run did with the
rows of a task, see `regard.continual.gate`, when it was learnt and at the end; `drift`: how far the mean weights at the
end are from those when it was learnt, KL in nats. `weights`: these weights, means over the `n` runs of an order.

Beside them, for readers: `metrics` and `differences`, made of the matrix by `regard.continual`.
"""
MEASURES = ("analysis", "case", "seed", "measure", "x", "value")
"""The columns of docs/results/sapt-analyses.csv: a number of a case of an analysis, at a place `x` where it has one."""
FLOATS = ("weight", *GATE)
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Tables(Comparison):
    """The tables named in `COLUMNS`, the numbers of the analyses, and the record of the runs."""

    gate: pd.DataFrame
    weights: pd.DataFrame
    analyses: pd.DataFrame

    @classmethod
    def gather(cls, work: str | Path, revision: str | None = None) -> Tables:
        """Make the tables from the runs of `experiments.sapt.run` in a folder. Raises UserError."""
        work = Path(work)
        runs = finished.read_runs(work, "experiments.sapt.run", _is_known, _sort_key, "order-*/*.json")
        return cls(
            matrix=finished.make_table(
                (row for run in runs for row in finished.matrix_rows(run, _run_key(run))), COLUMNS["matrix"]
            ),
            cost=finished.make_table((_cost(run) for run in runs), COLUMNS["cost"]),
            gate=finished.make_table((row for run in runs for row in _gate(run)), COLUMNS["gate"], FLOATS),
            weights=_weights(runs),
            analyses=_analyses(work),
            record=_record(runs, revision),
        )

    @classmethod
    def load(cls, folder: str | Path = RESULTS) -> Tables:
        """Load the tables of a folder; analyses are optional. Raises UserError if another table is missing."""
        rows, record = finished.load_tables(Path(folder), "sapt", RECORD, COLUMNS, FLOATS)
        rows = {name: table.astype({"order": str}) for name, table in rows.items()}
        path = Path(folder) / ANALYSES
        analyses = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(MEASURES))
        return cls(**rows, analyses=_set_types(analyses), record=record)

    def save(self, folder: str | Path = RESULTS) -> None:
        """Write the tables and the metrics of the matrix into a folder."""
        folder = Path(folder)
        tables = {name: getattr(self, name) for name in COLUMNS}
        finished.save_tables(folder, "sapt", RECORD, tables, self.record)
        derived = {"metrics": self.summary.dropna(subset="mean"), "differences": self.differences}
        derived |= {"analyses": self.analyses} if len(self.analyses) else {}
        for name, table in derived.items():
            write_file(folder / f"sapt-{name}.csv", table.to_csv(index=False, float_format="%.6g"))

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def main_scenario(self) -> Scenario:
        """Among all classes seen: the task of a text is unknown."""
        return "cil"

    @property
    def judged_streams(self) -> list[str]:
        """All orders together."""
        return [self.whole]

    @property
    def orders(self) -> list[str]:
        """The orders with runs."""
        return [str(name) for name in self.record["orders"]]

    @property
    def whole(self) -> str:
        """The stream of all runs, of whichever orders."""
        return self.streams[0]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The matrix with one score a line: all orders together first, then each one if there are several."""
        orders = self.record["orders"]
        places = list(zip(self.matrix["order"], self.matrix["task_index"], strict=True))
        long = long_scores(
            self.matrix.rename(columns={"row": "method"}).assign(
                task=[orders[order]["tasks"][at - 1] for order, at in places],
                n=[orders[order]["test_rows"][at - 1] for order, at in places],
                order=["-".join(map(str, orders[order]["numbers"])) for order, _ in places],
                stream=[f"order {order}" for order, _ in places],
            )
        )
        if len(self.orders) < 2:
            return long
        return pd.concat([long.assign(stream=f"orders {' and '.join(self.orders)}"), long], ignore_index=True)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The metrics of each run, repeated for its order."""
        rows = metrics_table(where(self.scores, stream=self.whole))
        names = {"-".join(map(str, of["numbers"])): f"order {name}" for name, of in self.record["orders"].items()}
        parts = [where(rows, order=numbers).assign(stream=name) for numbers, name in names.items()]
        return pd.concat([rows, *parts], ignore_index=True) if len(parts) > 1 else rows

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Paired tests of all rows against SAPT in both scenarios, with corrected p."""
        parts = [self.against(stream, SAPT, metric, setting) for stream, metric, setting in self._metric_keys()]
        parts = [part for part in parts if len(part)]
        return pd.concat(parts, ignore_index=True) if parts else self.against(self.whole, SAPT)

    def _metric_keys(self) -> Iterator[tuple[str, str, str]]:
        for stream in self.streams:
            for metric in ("average_performance", "forgetting_rate", "bwt", "learning_accuracy"):
                for setting in ("cil", "til"):
                    yield stream, metric, setting

    def seconds(self, row: str) -> float:
        """Return the median over runs of the seconds of training and hooks."""
        rows = where(self.cost, row=row)
        return float((rows["seconds"] + rows["hook_seconds"]).median())

    # -- the gate -----------------------------------------------------------------------------------------

    def own_weights(self, row: str, when: str, order: str | None = None) -> pd.Series:
        """Return the mean weight of the own adapter by task, over all runs or those of an order."""
        rows = where(self.gate, row=row) if order is None else where(self.gate, row=row, order=order)
        return rows.groupby("task", sort=False)[f"own_adapter_weight_{when}"].mean()

    def of_gate(self, row: str, column: str, over: str = "mean", beside: str | None = None) -> Interval | None:
        """Return the mean over runs of a column of the gate, aggregated over tasks by `over`; None without values.

        With `beside`, only runs that this row has too count.
        """
        rows = self._by_run(row, column, over)
        if beside is not None:
            rows = rows[rows.index.isin(self._by_run(beside, column, over).index)]
        return t_interval(rows.to_numpy()) if len(rows) else None

    def _by_run(self, row: str, column: str, over: str) -> pd.Series:
        return where(self.gate, row=row).dropna(subset=column).groupby(["order", "seed"])[column].agg(over)

    def gated(self) -> list[str]:
        """Return the rows with a gate."""
        return [str(row) for row in self.gate["row"].unique()]


# -- from runs -------------------------------------------------------------------------------------------------------


def _is_known(run: Mapping[str, Any]) -> bool:
    return run["order"] in ORDERS and run["row"] in ROWS


def _sort_key(run: Mapping[str, Any]) -> tuple[int, int, bool, int]:
    """Return the position by order, row and seed, seeds of the experiment first."""
    seed = run["seed"]
    known = seed in SEEDS
    place = (ORDERS.index(run["order"]), list(ROWS).index(run["row"]), not known)
    return (*place, SEEDS.index(seed) if known else seed)


def _run_key(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in KEY}


def _cost(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**finished.cost_row(run, _run_key(run)), "hook_seconds": sum(task["hook_seconds"] for task in run["cost"])}


def _tasks(run: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the tasks of a run in order, with their numbers of test rows."""
    rows = {cell["task_index"]: (cell["task"], cell["n"]) for cell in run["matrix"]}
    return [rows[place] for place in sorted(rows)]


def _gate(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row a task: statistics of the gate when it was learnt and at the end."""
    values = {
        (cell["after_task"], cell["task_index"], cell["statistic"], cell["adapter"]): cell["value"]
        for cell in run["gate"]
    }
    single = {(after, at, name): value for (after, at, name, _), value in values.items() if name != "weight"}
    tasks = _tasks(run) if values else []
    rows = []
    for place, (task, _) in enumerate(tasks, 1):
        ends = {"learning": place, "end": len(tasks)}
        line: dict[str, Any] = {
            f"{name}_{when}": single.get((after, place, name)) for name in STATISTICS for when, after in ends.items()
        }
        line["drift"] = _drift(*(_adapter_weights(values, after, place) for after in ends.values()))
        line |= {name: single.get((len(tasks), place, name)) for name in SCORED}
        rows.append({**_run_key(run), "task_index": place, "task": task, **line})
    return rows


def _adapter_weights(values: Mapping[tuple[Any, ...], float], after: int, place: int) -> dict[int, float]:
    return {key[3]: value for key, value in values.items() if key[:3] == (after, place, "weight")}


def _drift(before: Mapping[int, float], after: Mapping[int, float]) -> float | None:
    """Return KL(before ‖ after) in nats, of weights by adapter; new adapters had weight 0 before."""
    if not before or not after:
        return None
    pairs = [(share, max(after[block], _TINY)) for block, share in before.items() if share > 0]
    return sum(share * math.log(share / other) for share, other in pairs)


def _weights(runs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the weights of the drawn rows, when each task was learnt and at the end, means over seeds."""
    lines = []
    for run in (run for run in runs if run["row"] in DRAWN):
        for cell in run["gate"]:
            for when, after in (("learning", cell["task_index"]), ("end", len(_tasks(run)))):
                if cell["statistic"] == "weight" and cell["after_task"] == after:
                    key = (run["order"], run["row"], when, cell["task_index"], cell["adapter"])
                    lines.append((*key, float(cell["value"])))
    columns = COLUMNS["weights"]
    table = pd.DataFrame(lines, columns=[*columns[:-2], "weight"])
    rows = table.groupby(list(columns[:-2]), sort=False)["weight"].agg(["mean", "size"]).reset_index()
    return finished.set_types(rows.rename(columns={"mean": "weight", "size": "n"}), columns, FLOATS)


def _analyses(work: Path) -> pd.DataFrame:
    """Return the numbers of all finished analyses of `experiments.sapt.analyses`."""
    lines = []
    for path in sorted(work.glob("analysis-*/*.json")):
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            key = {name: rows[name] for name in MEASURES[:3]}
            lines += [{**key, **{name: cell[name] for name in MEASURES[3:]}} for cell in rows["numbers"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"work: expected analyses of experiments.sapt.run, {path} is none: {error!r}") from error
    return _set_types(pd.DataFrame(lines, columns=list(MEASURES)))


def _set_types(table: pd.DataFrame) -> pd.DataFrame:
    kinds = {"analysis": str, "case": str, "seed": "int64", "measure": str, "x": "float64", "value": "float64"}
    return table[list(MEASURES)].astype(kinds)


def _record(runs: Sequence[Mapping[str, Any]], revision: str | None) -> dict[str, Any]:
    """Return settings, versions and tasks of the runs."""
    orders = {order: of for order in ORDERS if (of := [run for run in runs if run["order"] == order])}
    return {
        "revision": revision,
        "regard": sorted({run["regard"] for run in runs}),
        "versions": finished.distinct(run["versions"] for run in runs),
        "model": "minilm",
        "stream": STREAM,
        "rows": {row: dataclasses.asdict(of) for row, of in ROWS.items()},
        "seeds": list(SEEDS),
        "train_rows_a_task": TRAIN,
        "test_rows_a_task": EVALUATED,
        "looked_at_rows_a_task": LOOKED_AT,
        "lora": {"rank": RANK, "alpha": ALPHA},
        "budget": {name: value for name, value in dataclasses.asdict(BUDGET).items() if value is not None},
        "orders": {order: _describe_order(order, of) for order, of in orders.items()},
    }


def _describe_order(order: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tasks of an order. Raises UserError if runs have different ones."""
    rows = finished.distinct({"numbers": run["stream"]["order"], "tasks": [n for n, _ in _tasks(run)]} for run in runs)
    if len(rows) > 1:
        raise UserError(f"work: expected the same tasks in all runs of order {order}, got {len(rows)} orders of tasks")
    record = runs[0]["stream"]["record"]
    drawn = record.get("drawn", {})
    return {
        **rows[0],
        "test_rows": [n for _, n in _tasks(runs[0])],
        "classes": {task: sorted(drawn[task]["train"]) for task in rows[0]["tasks"] if task in drawn},
        "published": record.get("published"),
        "missing": list(record.get("missing", ())),
    }
