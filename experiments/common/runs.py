"""Runs of the experiments in continual learning: making them, reading them, and the tables made from them."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console

from regard.errors import UserError
from regard.runs.output_dir import write_file
from regard.runs.provenance import library_versions
from regard.runs.version import VERSION

Run = dict[str, Any]
COST = (
    *("seconds", "run_seconds", "flops", "steps"),
    *("peak_memory_mib", "memory_bytes", "memory_examples"),
)
"""Cost of a run: sums over tasks, except peak memory (maximum) and stored memory (after the last task). `seconds` are
training time, `run_seconds` the whole run."""
SCENARIOS = ("AP til", "AP cil")
"""Columns of `final_scores`; tasks of written answers have the first alone."""
_FLOATS = ("til", "cil", "seconds", "hook_seconds", "run_seconds", "flops", "peak_memory_mib")


class Case(NamedTuple):
    """A run of an experiment: its file, the function that makes it, and the one that describes the result."""

    path: Path
    make: Callable[[], Mapping[str, Any]]
    describe: Callable[[Mapping[str, Any]], str]


def make_missing(
    about: str | None,
    arguments: Sequence[str] | None,
    cases: Callable[[argparse.Namespace], Iterable[Case]],
    *,
    work: str,
    choice: tuple[str, Iterable[str]] | None = None,
    needs_data: bool = True,
    **lists: Iterable[Any],
) -> None:
    """Make the cases of a command line that have no file yet. A UserError is printed and ends the program with code 2.

    Args:
        about: The docstring of the module.
        arguments: What was typed; None for that of this process.
        cases: Yields the cases that the options ask for.
        work: Name of the folder of runs below `runs`, if `--work` names no other.
        choice: Name and values of what the command is of, if it is of one.
        needs_data: `--data`, the folder of published files, has to be given.
        lists: Options that list values, each with its default; apart by semicolons where these have commas.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if choice is not None:
        parser.add_argument(choice[0], choices=tuple(choice[1]))
    parser.add_argument("--data", required=needs_data, help="folder of published files")
    for name, default in lists.items():
        values = list(default)
        mark = ";" if any("," in str(value) for value in values) else ","
        parse = partial(_split, mark=mark, kind=type(values[0]))
        parser.add_argument(f"--{name}", type=parse, default=values, help=f"with {mark} between (default: all)")
    parser.add_argument("--work", type=Path, default=Path("runs") / work)
    console = Console()
    try:
        for case in cases(parser.parse_args(arguments)):
            if not case.path.exists():
                result = case.make()
                write_file(case.path, json.dumps(result, ensure_ascii=False))
                console.print(case.describe(result))
    except UserError as error:
        console.print(str(error), style="bold")
        sys.exit(2)


def _split(text: str, mark: str, kind: type) -> list[Any]:
    return [kind(part) for part in text.split(mark)]


def file_name(row: str, seed: int) -> str:
    """Return the name of the file of a row's run."""
    return f"{row.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def origin() -> dict[str, Any]:
    """Return which versions make a run."""
    return {"regard": VERSION, "versions": library_versions()}


def read_runs(
    work: Path,
    experiment: str,
    is_known: Callable[[Run], bool],
    sort_key: Callable[[Run], Any],
    pattern: str = "*/*.json",
) -> list[Run]:
    """Read the runs of a module, sorted by `sort_key`. Raises UserError without any, or for an unknown or empty one."""
    runs = []
    for path in sorted(work.glob(pattern)):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            whole = is_known(run) and bool(run["matrix"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"work: expected runs of {experiment}, {path} is none: {error!r}") from error
        if not whole:
            raise UserError(f"work: expected runs of known streams and rows, {path} is of {run['row']!r}")
        runs.append(run)
    if not runs:
        raise UserError(f"work: expected runs of {experiment} in {work}, found none")
    return sorted(runs, key=sort_key)


@contextmanager
def reading(what: str, work: Path) -> Iterator[None]:
    """Raise a UserError for files in a folder that are not what an experiment writes."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"work: expected {what} in {work}: {error!r}") from error


def read_files(paths: Iterable[Path]) -> list[Any]:
    """Read files of JSON."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def final_scores(matrix: pd.DataFrame) -> dict[str, float]:
    """Return the mean score over tasks after the last one, by scenario, as `AP SCENARIO`."""
    last = matrix[matrix["after_task"] == matrix["after_task"].max()]
    return {f"AP {scenario}": float(rows["score"].mean()) for scenario, rows in last.groupby("scenario")}


def describe_scores(name: str, run: Mapping[str, Any]) -> str:
    """Return the `final_scores` of a run of this name in one line, and its CPU time where that is known."""
    scores = [f"{column.removeprefix('AP ').upper()} {run[column]:.1f}" for column in SCENARIOS if column in run]
    return f"{name}: {', '.join(scores)}" + (f", {run['cpu_seconds']:.0f} s" if "cpu_seconds" in run else "")


def matrix_rows(run: Mapping[str, Any], key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the accuracy matrix with a row a cell: `key`, the cell, and its score in both scenarios."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for cell in run["matrix"]:
        index = {name: cell[name] for name in ("after_task", "task_index", "task", "n")}
        row = rows.setdefault((cell["after_task"], cell["task_index"]), {**key, **index})
        row[cell["scenario"]] = cell["score"]
    return list(rows.values())


def cost_row(run: Mapping[str, Any], key: Mapping[str, Any]) -> dict[str, Any]:
    """Return `key` and the cost of a run (`COST`)."""
    tasks: Sequence[Mapping[str, Any]] = run["cost"]
    return {
        **key,
        **{name: sum(task[name] for task in tasks) for name in ("seconds", "flops", "steps")},
        "run_seconds": run["seconds"],
        "peak_memory_mib": max(task["peak_memory_mib"] for task in tasks),
        **{name: tasks[-1][name] for name in ("memory_bytes", "memory_examples")},
    }


def distinct(mappings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each of some mappings once, in their order."""
    unique: list[dict[str, Any]] = []
    for mapping in mappings:
        if mapping not in unique:
            unique.append(dict(mapping))
    return unique


# -- tables ----------------------------------------------------------------------------------------------------------


def make_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], floats: Iterable[str] = ()) -> pd.DataFrame:
    """Return a table of rows, with the types that it has when it is read again."""
    return set_types(pd.DataFrame(list(rows), columns=list(columns)), columns, floats)


def set_types(table: pd.DataFrame, columns: Sequence[str], floats: Iterable[str] = ()) -> pd.DataFrame:
    """Return columns of a table with their types: scores, costs and `floats` as floats, `layer` as Int64.

    Raises:
        KeyError: If a column is missing.
    """
    kinds = {column: "float64" for column in columns if column in (*_FLOATS, *floats)}
    return table[list(columns)].astype(kinds | ({"layer": "Int64"} if "layer" in columns else {}))


def load_tables(
    folder: Path, prefix: str, record: str, columns: Mapping[str, Sequence[str]], floats: Iterable[str] = ()
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Read the tables PREFIX-NAME.csv of a folder by name, and the record. Raises UserError if one is missing."""
    try:
        tables = {
            name: set_types(pd.read_csv(folder / f"{prefix}-{name}.csv"), of, floats) for name, of in columns.items()
        }
        content = json.loads((folder / record).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"tables: expected {prefix}-*.csv and {record} in {folder}: {error}") from error
    return tables, content


def save_tables(
    folder: Path, prefix: str, record: str, tables: Mapping[str, pd.DataFrame], content: Mapping[str, Any]
) -> None:
    """Write tables and their record into a folder."""
    for name, table in tables.items():
        write_file(folder / f"{prefix}-{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    write_file(folder / record, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
