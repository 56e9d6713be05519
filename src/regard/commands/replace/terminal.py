"""Terminal summary of a run with replaced heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.replace import pictures as replace_pictures
from regard.commands.replace import words
from regard.commands.replace.scores import GROUP, Outcome, fraction_name, intervals
from regard.report import labels
from regard.report.terminal import WIDTH, plain, summary
from regard.report.words import pluralize

NAME, CELL = 22, 11
ROOM = (WIDTH - NAME) // CELL


def replace_summary(
    scores: pd.DataFrame, heads: pd.DataFrame, cost: pd.DataFrame, metadata: Mapping[str, Any]
) -> Group:
    """Summarize a run for a terminal of 80 columns: scores and drops by fraction, patterns, time and FLOPs.

    Raises UserError if the scores are empty or lack a column.
    """
    outcome = Outcome(scores, metadata)
    blocks = [_scores(outcome), _operations(outcome), _patterns(heads), _cost(cost)]
    return summary(labels.model_name(metadata), words.ledes(outcome, cost, metadata), blocks)


def _scores(outcome: Outcome) -> list[str]:
    """Format a line of scores and one of drops per task, by fraction of dynamic heads."""
    means, drops = intervals(outcome.scores), outcome.main
    if drops.empty and len(outcome.operations):
        return []
    is_main = (means["constants"] == outcome.constants) & (means["rank_heads_by"] == outcome.ranking)
    means = means[is_main | (means["dynamic_fraction"] == 1)]
    fractions = _spread(sorted({float(fraction) for fraction in means["dynamic_fraction"]}, reverse=True))
    replaced = f"Constants {outcome.constants}, ranking {outcome.ranking}"
    lines = [replaced if len(drops) else "No head was replaced"]
    lines.append(_line("dynamic heads", [fraction_name(fraction) for fraction in fractions]))
    drops_by_task = dict(list(drops.groupby(GROUP, sort=False)))
    for key, rows in means.groupby(GROUP, sort=False):
        by_fraction = {row.dynamic_fraction: labels.number(row.mean, 3) for row in rows.itertuples()}
        task_drops = drops_by_task.get(key, drops.iloc[:0])
        formatted_drops = {row.dynamic_fraction: words.row_drop(row) for row in task_drops.itertuples()}
        name = plain(words.title(outcome, str(key[0]), str(key[1])))
        lines.append(_line(name, [by_fraction.get(fraction, "–") for fraction in fractions]))
        if formatted_drops:
            lines.append(_line("  drop", [formatted_drops.get(fraction, "") for fraction in fractions]))
    return lines


def _operations(outcome: Outcome) -> list[str]:
    """Format a line per operation and task: score and drop."""
    lines = []
    for (model, task, _), rows in outcome.operations.groupby(GROUP, sort=False):
        lines.append(_line(plain(words.title(outcome, str(model), str(task))), ["score", "drop"]))
        lines.append(_line("  original", [labels.number(float(rows["original"].iloc[0]), 3), ""]))
        for row in rows.itertuples():
            cells = [labels.number(float(row.score), 3), words.row_drop(row)]
            lines.append(_line(f"  {labels.visible(str(row.constants))}", cells))
    return ["Other operations instead of softmax", *lines] if lines else []


def _spread(fractions: Sequence[float]) -> list[float]:
    """Select as many fractions as fit a line: the largest ones and the smallest."""
    return list(fractions) if len(fractions) <= ROOM else [*fractions[: ROOM - 1], fractions[-1]]


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name[: NAME - 1]:<{NAME}}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def _patterns(heads: pd.DataFrame) -> list[str]:
    lines = [
        f"  {labels.number(100 * share, 3):>6} %  {name} ({pluralize(count, 'head')})"
        for name, count, share in replace_pictures.pattern_counts(heads)
    ]
    return ["Patterns of the constant matrices", *lines] if lines else []


def _cost(cost: pd.DataFrame) -> list[str]:
    if cost.empty:
        return []
    rows = words.relative_cost(cost)
    shown = rows[rows["dynamic_fraction"].isin(_spread(rows["dynamic_fraction"].tolist()))].to_dict("records")
    return [
        _line("Forward pass", [fraction_name(row["dynamic_fraction"]) for row in shown]),
        _line("  milliseconds", [labels.number(row["latency_ms"], 3) for row in shown]),
        _line("  of the original", [f"{labels.number(row['time'], 3)} %" for row in shown]),
        _line("  GFLOPs", [labels.number(row["flops"] / 1e9, 3) for row in shown]),
    ]
