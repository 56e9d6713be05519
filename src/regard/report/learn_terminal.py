"""Runs of continual learning as a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from regard.report import labels, learn_matrix, learn_metrics, learn_tables
from regard.report import learn_words as words
from regard.report.learn_metrics import Estimate
from regard.report.learn_tables import SETTINGS, Tables

WIDTH, RUNS, CELL = 80, 6, 15
SHOWN = ("ap", "fgt")
NAME, SCORE = 9, 8


def learn_summary(tables: Tables, record: Mapping[str, Any]) -> Group:
    """What matters most, for a terminal of 80 columns: AP and FGT by method, who kept most; the matrix of a single run.

    Raises UserError as `learn_page`.
    """
    learn_tables.check_tables(tables)
    matrix = tables["matrix"]
    first, *others = words.ledes(tables, record)
    parts: list[RenderableType] = [Text(_plain(words.title(matrix, record)), style="bold"), Text(_plain(first))]
    for lines in (_methods(tables), *_matrices(matrix)):
        parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)] if lines else []
    told = [line for line in (*others, *words.warnings(tables, record)) if line]
    return Group(*parts, *([Text()] if told else []), *(Text(_plain(line)) for line in told))


def _plain(text: str) -> str:
    return labels.visible(text).replace("␣", " ")


def _methods(tables: Tables) -> list[str]:
    """A line for each method, the highest AP first."""
    found = [(name, one, learn_metrics.final(tables["summary"], one, name)) for one in SETTINGS for name in SHOWN]
    found = [(name, setting, scores) for name, setting, scores in found if scores]
    if not found:
        return []
    methods = learn_metrics.ranked(learn_tables.methods(tables["matrix"]), found[0][2])
    wide = min(max(len("method"), *(len(_plain(name)) for name in methods)), WIDTH - RUNS - CELL * len(found))
    head = "".join(f"{f'{learn_metrics.metric(name).title} {SETTINGS[setting]}':>{CELL}}" for name, setting, _ in found)
    lines = [f"{'method':<{wide}}{'runs':>{RUNS}}{head}"]
    for method in methods:
        known = [scores.get(method) for _, _, scores in found]
        cells = "".join(f"{learn_metrics.shown(one):>{CELL}}" for one in known)
        lines.append(f"{_cut(_plain(method), wide):<{wide}}{_runs(known):>{RUNS}}{cells}")
    return lines


def _runs(known: Sequence[Estimate | None]) -> int:
    return max((one.n for one in known if one is not None), default=0)


def _cut(name: str, wide: int) -> str:
    return name if len(name) <= wide else f"{name[: wide - 1]}…"


def _matrices(matrix: pd.DataFrame) -> list[list[str]]:
    """The accuracy matrix by setting where there is one run only."""
    if len(matrix[learn_tables.RUN].drop_duplicates()) > 1:
        return []
    return [_matrix(matrix[matrix["setting"] == one], SETTINGS[one]) for one in learn_tables.settings(matrix)]


def _matrix(rows: pd.DataFrame, setting: str) -> list[str]:
    names, whole = learn_tables.task_names(rows), learn_tables.count_tasks(rows)
    afters = sorted(int(after) for after in rows["after_task"].unique())
    head = "".join(f"{_cut(_plain(name), SCORE - 1):>{SCORE}}" for name in names)
    lines = [f"{setting:<{NAME}}{head}"]
    for after, line in zip(afters, learn_matrix.cells(rows, afters, whole), strict=True):
        scores = "".join(f"{'–' if value is None else f'{value:.1f}':>{SCORE}}" for value in line)
        lines.append(f"{f'after {after}' if after else 'before':<{NAME}}{scores}")
    return lines
