"""Terminal summary of continual-learning runs."""

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
from regard.commands.learn.tables import SCENARIOS, Tables
from regard.report.terminal import WIDTH, plain, summary

GAP = 2
MIN_NAME_WIDTH = 14
"""Characters a method's name is cut to, at least."""
METRICS = ("average_performance", "forgetting")
NAME, SCORE = 9, 8
FUTURE_NOTE = "In parentheses: not yet trained."


def learn_summary(tables: Tables, metadata: Mapping[str, Any]) -> Group:
    """Summarize runs for a terminal of 80 columns: AP and FGT by method, and the matrix of a single run.

    Raises:
        UserError: As for `learn_page`.
    """
    learn_tables.check_tables(tables)
    matrix = tables["matrix"]
    lede, *outcomes = words.write_ledes(tables, metadata)
    blocks = [_methods(tables), *_matrices(matrix)]
    notes = [*outcomes, *words.write_warnings(tables, metadata)]
    return summary(words.stream_name(matrix, metadata), [lede], blocks, notes)


def _methods(tables: Tables) -> list[str]:
    """Format a line per method, highest AP first."""
    estimates = [
        (name, scenario, learn_metrics.final_estimates(tables["summary"], scenario, name))
        for scenario in SCENARIOS
        for name in METRICS
    ]
    estimates = [(name, scenario, scores) for name, scenario, scores in estimates if scores]
    if not estimates:
        return []
    methods = learn_metrics.rank_methods(learn_tables.method_names(tables["matrix"]), estimates[0][2])
    columns = [["runs", *(str(_runs([scores.get(method) for _, _, scores in estimates])) for method in methods)]]
    for name, scenario, scores in estimates:
        title = f"{learn_metrics.get_metric(name).title} {SCENARIOS[scenario]}"
        columns.append([title, *(learn_metrics.format_estimate(scores.get(method)) for method in methods)])
    widths = [GAP + max(map(len, column)) for column in columns]
    names = ["method", *map(plain, methods)]
    name_width = min(max(map(len, names)), max(MIN_NAME_WIDTH, WIDTH - sum(widths)))
    return [
        f"{_cut(name, name_width):<{name_width}}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for name, *row in zip(names, *columns, strict=True)
    ]


def _runs(estimates: Sequence[Estimate | None]) -> int:
    return max((estimate.n for estimate in estimates if estimate is not None), default=0)


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _matrices(matrix: pd.DataFrame) -> list[list[str]]:
    """Format the accuracy matrix of each scenario if there is one run."""
    if len(matrix[learn_tables.RUN_KEYS].drop_duplicates()) > 1:
        return []
    return [
        _matrix(matrix[matrix["scenario"] == scenario], SCENARIOS[scenario])
        for scenario in learn_tables.find_scenarios(matrix)
    ]


def _matrix(rows: pd.DataFrame, scenario: str) -> list[str]:
    """Format a line per number of tasks trained, with scores of future tasks in parentheses."""
    num_tasks = learn_tables.count_tasks(rows)
    names = [plain(name) for name in learn_tables.task_names(rows)]
    afters = sorted(int(after) for after in rows["after_task"].unique())
    suffix = " " if len(learn_tables.select_trained(rows)) < len(rows) else ""
    width = max(SCORE, min(1 + max(map(len, names)) + len(suffix), (WIDTH - NAME) // num_tasks))
    lines = [_line(scenario, [name + suffix for name in shorten_names(names, width - 1 - len(suffix))], width)]
    for after, scores in zip(afters, learn_matrix.average_scores(rows, afters, num_tasks), strict=True):
        cells = [_score(value, suffix, is_future=position > after) for position, value in enumerate(scores, 1)]
        lines.append(_line(f"after {after}" if after else "before", cells, width))
    return [*lines, FUTURE_NOTE] if suffix else lines


def _line(name: str, cells: Sequence[str], width: int) -> str:
    return (f"{name:<{NAME}}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()


def _score(value: float | None, suffix: str, *, is_future: bool) -> str:
    """Format a score; `suffix` aligns it with scores in parentheses."""
    if value is None:
        return f"–{suffix}"
    return f"({value:.1f})" if is_future else f"{value:.1f}{suffix}"


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Cut names to a width, without their common prefix if one is too long; number those that become equal."""
    if max(map(len, names)) > width:
        names = [name[_common(names) :] for name in names]
    short_names = [_cut(name, width) for name in names]
    return [
        short_name if short_names.count(short_name) == 1 else _cut(f"{index} {name}", width)
        for index, (short_name, name) in enumerate(zip(short_names, names, strict=True), 1)
    ]


def _common(names: Sequence[str]) -> int:
    """Return the length of the prefix shared by all names, which ends at a word or number; 0 for one name."""
    max_length = min(map(len, names)) - 1
    length = next((index for index in range(max_length) if len({name[index] for name in names}) > 1), max_length)
    inner = re.compile(r"[^\W\d_]{2}|\d{2}")
    while length and any(inner.fullmatch(name[length - 1 : length + 1]) for name in names):
        length -= 1
    return length if len(names) > 1 else 0
