"""The summary of a run on replaced heads for a terminal of 80 columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Group

from regard.commands.replace.scores import ATTENTION, GROUP, Outcome, fraction_name, intervals, pattern_counts
from regard.commands.replace.words import (
    drop,
    drop_bounds,
    ledes,
    majority_of_all,
    relative_cost,
    row_drop,
    time_share,
    title,
)
from regard.report import labels
from regard.report.labels import pluralize
from regard.report.terminal import WIDTH, plain, summary

NAME, CELL = 22, 11
WIDEST = WIDTH - 2 * (CELL + 1)
"""Room for the name in a line of two cells, which a small drop in nats widens."""
ROOM = (WIDTH - NAME) // CELL


def replace_summary(
    scores: pd.DataFrame, heads: pd.DataFrame, cost: pd.DataFrame, metadata: Mapping[str, Any]
) -> Group:
    """Summarize a run for a terminal of 80 columns. Raises UserError without scores."""
    outcome = Outcome(scores, metadata)
    blocks = [_scores(outcome), _baselines(outcome, metadata), _operations(outcome), _patterns(heads), _cost(cost)]
    return summary(labels.model_name(metadata), ledes(outcome, cost, metadata), blocks)


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
        formatted_drops = {row.dynamic_fraction: row_drop(row) for row in task_drops.itertuples()}
        name = plain(title(outcome, str(key[0]), str(key[1])))
        lines.append(_line(name, [by_fraction.get(fraction, "–") for fraction in fractions]))
        if formatted_drops:
            lines.append(_line("  drop", [formatted_drops.get(fraction, "") for fraction in fractions]))
        margins = {row["dynamic_fraction"]: _margin(outcome, row) for _, row in task_drops.iterrows()}
        if any(margins.values()):
            lines.append(_line(f"  ± 95 % ({outcome.units})", [margins.get(fraction, "") for fraction in fractions]))
    return lines


def _margin(outcome: Outcome, row: pd.Series) -> str:
    """Format half of the interval of a drop; "" if there is none."""
    low, high = drop_bounds(outcome, pd.DataFrame([row]))
    return "" if math.isnan(low) else drop((high - low) / 2, str(row["unit"]))


def _baselines(outcome: Outcome, metadata: Mapping[str, Any]) -> list[str]:
    """Format what a task without attention scores: other constants in all heads, and the best single label."""
    others = outcome.drops[(outcome.drops["rank_heads_by"] != ATTENTION) & (outcome.drops["dynamic_fraction"] == 0)]
    others = others[others["constants"] != outcome.constants].drop_duplicates([*GROUP, "constants"])
    lines = [
        line
        for (model, task, _), rows in others.groupby(GROUP, sort=False)
        for line in _named(outcome, model, task, rows)
    ]
    if lines and (majority := majority_of_all(outcome, metadata)) is not None:
        lines.append(_line("  best single label", [labels.number(majority, 3), ""], WIDEST))
    return ["For comparison, all heads constant", *lines] if lines else []


def _named(outcome: Outcome, model: Any, task: Any, rows: pd.DataFrame) -> list[str]:
    """Format the title of a task, and a line of score and drop for each row of drops."""
    lines = [_line(plain(title(outcome, str(model), str(task))), ["score", "drop"], WIDEST)]
    for row in rows.itertuples():
        cells = [labels.number(float(row.score), 3), row_drop(row)]
        lines.append(_line(f"  {labels.visible(str(row.constants))}", cells, WIDEST))
    return lines


def _operations(outcome: Outcome) -> list[str]:
    lines = []
    for (model, task, _), rows in outcome.operations.groupby(GROUP, sort=False):
        head, *named = _named(outcome, model, task, rows)
        original = _line("  original", [labels.number(float(rows["original"].iloc[0]), 3), ""], WIDEST)
        lines += [head, original, *named]
    return ["Other operations instead of softmax", *lines] if lines else []


def _spread(fractions: Sequence[float]) -> list[float]:
    """Select as many fractions as fit a line: the largest ones and the smallest."""
    return list(fractions) if len(fractions) <= ROOM else [*fractions[: ROOM - 1], fractions[-1]]


def _line(name: str, cells: Sequence[str], width: int = NAME) -> str:
    """Return a name, cut to a width with a mark, and cells, each behind a blank."""
    short = name if len(name) < width else f"{name[: width - 2]}…"
    return f"{short:<{width}}" + "".join(f" {cell:>{CELL - 1}}" for cell in cells)


def _patterns(heads: pd.DataFrame) -> list[str]:
    lines = [
        f"  {labels.number(100 * share, 3):>6} %  {name} ({pluralize(count, 'head')})"
        for name, count, share in pattern_counts(heads)
    ]
    return ["Patterns of the constant matrices", *lines] if lines else []


def _cost(cost: pd.DataFrame) -> list[str]:
    if cost.empty:
        return []
    rows = relative_cost(cost)
    shown = rows[rows["dynamic_fraction"].isin(_spread(rows["dynamic_fraction"].tolist()))].to_dict("records")
    times = [time_share(row).partition(" (")[0] for row in shown]
    return [
        _line("Forward pass", [fraction_name(row["dynamic_fraction"]) for row in shown]),
        _line("  milliseconds", [labels.number(row["latency_ms"], 3) for row in shown]),
        _line("  of the original", times),
        _line("  GFLOPs", [labels.number(row["flops"] / 1e9, 3) for row in shown]),
    ]
