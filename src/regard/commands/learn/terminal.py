"""The summary of a run of continual learning for a terminal of 80 columns."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.learn import matrix as learn_matrix
from regard.commands.learn import metrics as learn_metrics
from regard.commands.learn import tables as learn_tables
from regard.commands.learn.metrics import Estimate
from regard.commands.learn.tables import SCENARIOS, Tables
from regard.commands.learn.words import stream_name, write_ledes, write_warnings
from regard.report.terminal import WIDTH, plain, summary

GAP = 2
MIN_NAME_WIDTH = 14
"""Characters a method's name is cut to, at least."""
METRICS = ("average_performance", "forgetting")
NAME, SCORE = 9, 8
FUTURE_NOTE = "In parentheses: not yet trained."


def learn_summary(tables: Tables, metadata: Mapping[str, Any]) -> Group:
    """Summarize runs for a terminal of 80 columns: AP and FGT by method, and the matrix of a single run."""
    matrix = tables["matrix"]
    lede, *outcomes = write_ledes(tables, metadata)
    has_one_run = len(matrix[learn_tables.RUN_KEYS].drop_duplicates()) == 1
    scenarios = learn_tables.find_scenarios(matrix) if has_one_run else []
    matrices = [_matrix(matrix[matrix["scenario"] == name], SCENARIOS[name]) for name in scenarios]
    notes = [*outcomes, *write_warnings(tables, metadata)]
    return summary(stream_name(matrix, metadata), [lede], [_methods(tables), *matrices], notes)


def _methods(tables: Tables) -> list[str]:
    """Format a line per method, highest AP first."""
    columns: dict[str, Mapping[str, Estimate]] = {}
    for scenario, scenario_name in SCENARIOS.items():
        estimates = learn_metrics.make_estimates(tables["summary"], scenario)
        for name in METRICS:
            if name in estimates:
                columns[f"{learn_metrics.get_metric(name).title} {scenario_name}"] = estimates[name]
    if not columns:
        return []
    methods = learn_metrics.rank_methods(learn_tables.method_names(tables["matrix"]), next(iter(columns.values())))
    rows = [["method", "runs", *columns]]
    for method in methods:
        runs = max((scores[method].n for scores in columns.values() if method in scores), default=0)
        cells = [learn_metrics.format_estimate(scores.get(method)) for scores in columns.values()]
        rows.append([plain(method), str(runs), *cells])
    name_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    widths = [GAP + width for width in widths]
    name_width = min(name_width, max(MIN_NAME_WIDTH, WIDTH - sum(widths)))
    return [
        f"{_cut(name, name_width):<{name_width}}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _matrix(rows: pd.DataFrame, scenario: str) -> list[str]:
    """Format a line per number of tasks trained, with scores of future tasks in parentheses."""
    num_tasks = learn_tables.count_tasks(rows)
    names = [plain(name) for name in learn_tables.task_names(rows)]
    afters = learn_matrix.find_afters(rows)
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
