"""Terminal summary of a run with replaced heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.replace import pictures as replace_pictures
from regard.commands.replace import words
from regard.commands.replace.scores import check_scores, fraction_name, shown_constants
from regard.report import labels
from regard.report.terminal import WIDTH, plain, summary

NAME = 22
CELL = 11
ROOM = (WIDTH - NAME) // CELL


def replace_summary(
    scores: pd.DataFrame, heads: pd.DataFrame, cost: pd.DataFrame, metadata: Mapping[str, Any]
) -> Group:
    """Summarize a run for a terminal of 80 columns: scores and drops by fraction, patterns, time and FLOPs.

    Raises:
        UserError: The scores are empty or lack a column.
    """
    check_scores(scores)
    blocks = [_scores(scores, metadata), _operations(scores), _patterns(heads), _cost(cost)]
    return summary(labels.model_name(metadata), words.ledes(scores, heads, cost, metadata), blocks)


def _scores(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Format a line of scores and one of drops per task, by fraction of dynamic heads."""
    rows, drops = words.summary_rows(scores, metadata), words.main_drops(scores, metadata)
    if drops.empty and len(words.operations(scores)):
        return []
    constants, ranking = shown_constants(scores, metadata)
    fractions = _spread(sorted({float(fraction) for fraction in rows["dynamic_fraction"]}, reverse=True))
    multiple_models = scores["model"].nunique() > 1
    lines = [f"Constants {constants}, ranking {ranking}" if len(drops) else "No head was replaced"]
    lines.append(_line("dynamic heads", [fraction_name(fraction) for fraction in fractions]))
    for (model, task, metric), group in rows.groupby(["model", "task", "metric"], sort=False):
        name = words.title(str(model), str(task), with_model=multiple_models)
        means = dict(zip(group["dynamic_fraction"], group["mean"], strict=True))
        task_drops = drops[(drops["model"] == model) & (drops["task"] == task) & (drops["metric"] == metric)]
        formatted_drops = {
            row.dynamic_fraction: words.drop(float(row.drop), str(row.unit)) for row in task_drops.itertuples()
        }
        formatted_scores = [labels.number(means[fraction], 3) if fraction in means else "–" for fraction in fractions]
        lines.append(_line(plain(name), formatted_scores))
        if formatted_drops:
            lines.append(_line("  drop", [formatted_drops.get(fraction, "") for fraction in fractions]))
    return lines


def _operations(scores: pd.DataFrame) -> list[str]:
    """Format a line per operation and task: score and drop."""
    drops = words.operations(scores)
    multiple_models, lines = scores["model"].nunique() > 1, []
    for (model, task, _), rows in drops.groupby(["model", "task", "metric"], sort=False) if len(drops) else ():
        name = plain(words.title(str(model), str(task), with_model=multiple_models))
        lines.append(_line(name, ["score", "drop"]))
        lines.append(_line("  original", [labels.number(float(rows["original"].iloc[0]), 3), ""]))
        for row in rows.itertuples():
            cells = [labels.number(float(row.score), 3), words.drop(float(row.drop), str(row.unit))]
            lines.append(_line(f"  {labels.visible(str(row.constants))}", cells))
    return ["Other operations instead of softmax", *lines] if lines else []


def _spread(fractions: Sequence[float]) -> list[float]:
    """Select as many fractions as fit a line: the largest ones and the smallest."""
    return list(fractions) if len(fractions) <= ROOM else [*fractions[: ROOM - 1], fractions[-1]]


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name[: NAME - 1]:<{NAME}}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def _patterns(heads: pd.DataFrame) -> list[str]:
    counts = replace_pictures.pattern_counts(heads)
    lines = [
        f"  {labels.number(100 * share, 3):>6} %  {name} ({count} {'head' if count == 1 else 'heads'})"
        for name, count, share in counts
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
