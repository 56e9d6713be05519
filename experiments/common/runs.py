"""Finished runs of an experiment in continual learning, as its folder of work has them, and the tables made of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console

from regard.errors import UserError
from regard.runs.output_dir import write_file

FOLDER = Path("docs") / "results"
PICTURES = Path("docs") / "figures"
Run = dict[str, Any]
COST = (
    *("seconds", "run_seconds", "flops", "steps"),
    *("peak_memory_mib", "memory_bytes", "memory_examples"),
)
"""What a run cost: sums over its tasks, but the peak of memory and what is stored after the last; `seconds` are of
training, `run_seconds` of the whole run."""
_FLOATS = ("til", "cil", "seconds", "hook_seconds", "run_seconds", "flops", "peak_memory_mib")


class Case(NamedTuple):
    """A run that an experiment is made of: where it is kept, what makes it, and what is said of it once it is made."""

    path: Path
    make: Callable[[], Mapping[str, Any]]
    told: Callable[[Mapping[str, Any]], str]


def make_missing(cases: Callable[[], Iterable[Case]]) -> None:
    """Make the cases that are not kept yet, in their order; a mistake of the user ends with its line and code 2."""
    console = Console()
    try:
        for case in cases():
            if not case.path.exists():
                found = case.make()
                write_file(case.path, json.dumps(found, ensure_ascii=False))
                console.print(case.told(found))
    except UserError as error:
        console.print(str(error), style="bold")
        sys.exit(2)


def read_runs(
    work: Path,
    experiment: str,
    known: Callable[[Run], bool],
    place: Callable[[Run], Any],
    pattern: str = "*/*.json",
) -> list[Run]:
    """The runs of a module, sorted by `place`. Raises UserError where there is none, or one is not whole or known."""
    runs = []
    for path in sorted(work.glob(pattern)):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            whole = known(run) and bool(run["matrix"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"work: expected runs of {experiment}, {path} is none: {error!r}") from error
        if not whole:
            raise UserError(f"work: expected runs of known streams and rows, {path} is of {run['row']!r}")
        runs.append(run)
    if not runs:
        raise UserError(f"work: expected runs of {experiment} in {work}, found none")
    return sorted(runs, key=place)


def settings_beside(run: Mapping[str, Any], key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lines of the accuracy matrix, both settings in one; each begins with `key`."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for cell in run["matrix"]:
        place = {name: cell[name] for name in ("after_task", "task_index", "task", "n")}
        row = found.setdefault((cell["after_task"], cell["task_index"]), {**key, **place})
        row[cell["scenario"]] = cell["score"]
    return list(found.values())


def cost(run: Mapping[str, Any], key: Mapping[str, Any]) -> dict[str, Any]:
    """What a run cost (`COST`), behind `key`."""
    tasks: Sequence[Mapping[str, Any]] = run["cost"]
    return {
        **key,
        **{name: sum(task[name] for task in tasks) for name in ("seconds", "flops", "steps")},
        "run_seconds": run["seconds"],
        "peak_memory_mib": max(task["peak_memory_mib"] for task in tasks),
        **{name: tasks[-1][name] for name in ("memory_bytes", "memory_examples")},
    }


def distinct(every: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each of some mappings once, in the order in which they come."""
    found: list[dict[str, Any]] = []
    for one in every:
        if one not in found:
            found.append(dict(one))
    return found


# -- tables ----------------------------------------------------------------------------------------------------------


def frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], floats: Iterable[str] = ()) -> pd.DataFrame:
    """A table of rows with these columns, typed as it is when it is read again."""
    return typed(pd.DataFrame(list(rows), columns=list(columns)), columns, floats)


def typed(table: pd.DataFrame, columns: Sequence[str], floats: Iterable[str] = ()) -> pd.DataFrame:
    """The columns of a table; scores, costs and `floats` as fractions, and `layer`, which may be missing, as a count.

    Raises KeyError where one is missing.
    """
    kinds = {column: "float64" for column in columns if column in (*_FLOATS, *floats)}
    return table[list(columns)].astype(kinds | ({"layer": "Int64"} if "layer" in columns else {}))


def load_tables(
    folder: Path, prefix: str, record: str, columns: Mapping[str, Sequence[str]], floats: Iterable[str] = ()
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """The tables PREFIX-NAME.csv of a folder by name, and the record. Raises UserError where one is missing."""
    try:
        found = {name: typed(pd.read_csv(folder / f"{prefix}-{name}.csv"), of, floats) for name, of in columns.items()}
        said = json.loads((folder / record).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"tables: expected {prefix}-*.csv and {record} in {folder}: {error}") from error
    return found, said


def save_tables(
    folder: Path, prefix: str, record: str, tables: Mapping[str, pd.DataFrame], said: Mapping[str, Any]
) -> None:
    """Write tables and record into a folder."""
    for name, table in tables.items():
        write_file(folder / f"{prefix}-{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    write_file(folder / record, json.dumps(said, indent=1, ensure_ascii=False) + "\n")
