"""Runs of continual learning as a few lines for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.learn import matrix as learn_matrix
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn import words
from regard.commands.learn.metrics import Estimate
from regard.commands.learn.tables import SETTINGS, Tables
from regard.report.terminal import WIDTH, plain, summary

GAP = 2
LEAST = 14
"""The fewest characters that a long name of a method is cut to."""
SHOWN = ("average_performance", "forgetting")
NAME, SCORE = 9, 8
AHEAD = "In parentheses: not yet learnt."


def learn_summary(tables: Tables, record: Mapping[str, Any]) -> Group:
    """What matters most, for a terminal of 80 columns: AP and FGT by method, who kept most; the matrix of a single run.

    Raises UserError as `learn_page`.
    """
    learn_tables.check_tables(tables)
    matrix = tables["matrix"]
    first, *others = words.ledes(tables, record)
    blocks = [_methods(tables), *_matrices(matrix)]
    return summary(words.title(matrix, record), [first], blocks, [*others, *words.warnings(tables, record)])


def _methods(tables: Tables) -> list[str]:
    """A line for each method, the highest AP first."""
    found = [(name, one, learn_metrics.final(tables["summary"], one, name)) for one in SETTINGS for name in SHOWN]
    found = [(name, setting, scores) for name, setting, scores in found if scores]
    if not found:
        return []
    methods = learn_metrics.ranked(learn_tables.methods(tables["matrix"]), found[0][2])
    columns = [["runs", *(str(_runs([scores.get(method) for _, _, scores in found])) for method in methods)]]
    for name, setting, scores in found:
        head = f"{learn_metrics.metric(name).title} {SETTINGS[setting]}"
        columns.append([head, *(learn_metrics.shown(scores.get(method)) for method in methods)])
    widths = [GAP + max(map(len, column)) for column in columns]
    names = ["method", *map(plain, methods)]
    wide = min(max(map(len, names)), max(LEAST, WIDTH - sum(widths)))
    return [
        f"{_cut(name, wide):<{wide}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for name, *row in zip(names, *columns, strict=True)
    ]


def _runs(known: Sequence[Estimate | None]) -> int:
    return max((one.n for one in known if one is not None), default=0)


def _cut(name: str, wide: int) -> str:
    return name if len(name) <= wide else f"{name[: wide - 1]}…"


def _matrices(matrix: pd.DataFrame) -> list[list[str]]:
    """The accuracy matrix by setting where there is one run only."""
    if len(matrix[learn_tables.RUN].drop_duplicates()) > 1:
        return []
    return [_matrix(matrix[matrix["scenario"] == one], SETTINGS[one]) for one in learn_tables.settings(matrix)]


def _matrix(rows: pd.DataFrame, setting: str) -> list[str]:
    """A line for each number of tasks learnt; scores of tasks not yet learnt stand in parentheses."""
    whole = learn_tables.count_tasks(rows)
    names = [plain(name) for name in learn_tables.task_names(rows)]
    afters = sorted(int(after) for after in rows["after_task"].unique())
    end = " " if len(learn_tables.learnt(rows)) < len(rows) else ""
    wide = max(SCORE, min(1 + max(map(len, names)) + len(end), (WIDTH - NAME) // whole))
    lines = [_line(setting, [name + end for name in apart(names, wide - 1 - len(end))], wide)]
    for after, line in zip(afters, learn_matrix.cells(rows, afters, whole), strict=True):
        cells = [_score(value, end, ahead=place > after) for place, value in enumerate(line, 1)]
        lines.append(_line(f"after {after}" if after else "before", cells, wide))
    return [*lines, AHEAD] if end else lines


def _line(name: str, cells: Sequence[str], wide: int) -> str:
    return (f"{name:<{NAME}}" + "".join(f"{cell:>{wide}}" for cell in cells)).rstrip()


def _score(value: float | None, end: str, *, ahead: bool) -> str:
    """The score, before an end as wide as a parenthesis where others stand in parentheses."""
    if value is None:
        return f"–{end}"
    return f"({value:.1f})" if ahead else f"{value:.1f}{end}"


def apart(names: Sequence[str], wide: int) -> list[str]:
    """The names in at most so many characters: where one is too long, without their common beginning.

    Those that are cut to the same text get their numbers before it.
    """
    if max(map(len, names)) > wide:
        names = [name[_common(names) :] for name in names]
    cut = [_cut(name, wide) for name in names]
    return [
        one if cut.count(one) == 1 else _cut(f"{number} {name}", wide)
        for number, (one, name) in enumerate(zip(cut, names, strict=True), 1)
    ]


def _common(names: Sequence[str]) -> int:
    """The length of the beginning that all names share, which ends where a word or a number does; 0 for one name."""
    least = min(map(len, names)) - 1
    whole = next((place for place in range(least) if len({name[place] for name in names}) > 1), least)
    inside = re.compile(r"[^\W\d_]{2}|\d{2}")
    while whole and any(inside.fullmatch(name[whole - 1 : whole + 1]) for name in names):
        whole -= 1
    return whole if len(names) > 1 else 0
