"""Sentences and key figures of a report on replaced heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.replace.scores import ATTENTION, fraction_name, intervals, relative_drop, shown_constants
from regard.report import labels
from regard.report.key_figure import KeyFigure

_TASKS = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "mnli": "MNLI",
    "ner": "NER",
    "pos": "POS",
    "mlm": "MLM",
}
_METRICS = {
    "mcc": "Matthews correlation",
    "accuracy": "accuracy",
    "f1": "F1",
    "entity_f1": "entity F1",
    "token_f1": "F1",
    "negative_log_perplexity": "negative log perplexity",
}


def task(name: str) -> str:
    """Return the task's title."""
    return _TASKS.get(name, name)


def metric(name: str) -> str:
    """Return the metric's name in words."""
    return _METRICS.get(name, name.replace("_", " "))


def title(model: str, name: str, *, with_model: bool) -> str:
    """Return the task's title, and the model's name if there are several."""
    return f"{task(name)}, {model}" if with_model else task(name)


def drop(value: float, unit: str) -> str:
    """Format a drop and its unit, as in "6.2 %"; a gain is negative."""
    return "–" if math.isnan(value) else f"{_signed(value, 1 if unit == '%' else 2)} {unit}"


def interval(mean: float, ci_low: float, ci_high: float) -> str:
    """Format a mean with its margin, if there is an interval."""
    margin = "" if math.isnan(ci_low) else f" ± {labels.number((ci_high - ci_low) / 2, 2)}"
    return f"{labels.number(mean, 3)}{margin}"


def _signed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def main_drops(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Return the drops of the run's main constants and head ranking."""
    constants, ranking = shown_constants(scores, metadata)
    drops = relative_drop(scores)
    return drops[(drops["constants"] == constants) & (drops["rank_heads_by"] == ranking)]


def ledes(scores: pd.DataFrame, heads: pd.DataFrame, cost: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was run, then the outcome of replacing, then of other operations."""
    parts = [size] if (size := labels.model_size(metadata)) else []
    tasks, seeds = scores["task"].nunique(), scores["seed"].nunique()
    parts.append(f"{tasks} {'task' if tasks == 1 else 'tasks'}")
    parts.append(f"{seeds} {'seed' if seeds == 1 else 'seeds'}")
    seconds = labels.section(metadata, "cost").get("seconds")
    if isinstance(seconds, (int, float)):
        parts.append(f"run in {labels.number(float(seconds), 3)} s")
    result = " ".join(part for part in (_found(scores, metadata), _saved(cost)) if part)
    return [" · ".join(parts), result, _swapped(scores)]


def operations(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the drops of other operations in place of softmax."""
    return relative_drop(scores).loc[lambda rows: rows["rank_heads_by"] == ATTENTION]


def _swapped(scores: pd.DataFrame) -> str:
    """Describe the cost of other operations, averaged over tasks with drops in one unit."""
    drops = operations(scores)
    drops = drops if drops.empty else drops[drops["drop"].notna()]
    if drops.empty:
        return ""
    unit = "%" if (drops["unit"] == "%").any() else str(drops["unit"].iloc[0])
    means = drops[drops["unit"] == unit].groupby("constants", sort=False)["drop"].mean()
    by_operation = ", ".join(f"{name} {drop(float(value), unit)}" for name, value in means.items())
    average = "on average " if drops["task"].nunique() > 1 else ""
    return f"With another operation instead of softmax the score drops {average}by: {by_operation}."


def _found(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> str:
    """Describe the drop with the fewest dynamic heads, and with half of them."""
    drops = main_drops(scores, metadata)
    drops = drops[drops["drop"].notna()]
    if drops.empty:
        return ""
    unit = "%" if (drops["unit"] == "%").any() else str(drops["unit"].iloc[0])
    drops = drops[drops["unit"] == unit]
    constants, _ = shown_constants(scores, metadata)
    min_fraction = float(drops["dynamic_fraction"].min())
    parts = []
    for fraction in dict.fromkeys((min_fraction, 0.5)):
        rows = drops[drops["dynamic_fraction"] == fraction]
        if rows.empty:
            continue
        text = f"the score drops by {drop(float(rows['drop'].mean()), unit)}"
        if len(rows) > 1:
            worst = rows.loc[rows["drop"].idxmax()]
            text += f" on average over {len(rows)} tasks, at most by {drop(float(worst['drop']), unit)}"
            text += f" ({task(str(worst['task']))})"
        parts.append(f"{_with(fraction)} {text}")
    sentence = "; ".join(parts)
    return f"Constants: {constants}. {sentence[:1].upper()}{sentence[1:]}."


def _with(fraction: float) -> str:
    if fraction == 0:
        return "with all heads constant"
    return (
        "with half of the heads dynamic" if fraction == 0.5 else f"with {fraction_name(fraction)} of the heads dynamic"
    )


def _saved(cost: pd.DataFrame) -> str:
    costs = relative_cost(cost)
    if len(costs) < 2:
        return ""
    fewest = costs.iloc[-1]
    parts = [f"{fewest['time']:.0f} % of the time"] if not math.isnan(fewest["time"]) else []
    parts += [f"{fewest['work']:.0f} % of the FLOPs"] if not math.isnan(fewest["work"]) else []
    condition = "then" if fewest["dynamic_fraction"] == 0 else _with(float(fewest["dynamic_fraction"]))
    return f"One forward pass {condition} takes {' and '.join(parts)}." if parts else ""


def relative_cost(cost: pd.DataFrame) -> pd.DataFrame:
    """Sort costs from all heads dynamic to the fewest, with `time` and `work` in percent of the original model's."""
    rows = cost.sort_values("dynamic_fraction", ascending=False, ignore_index=True).astype("float64")
    original = rows[rows["dynamic_fraction"] == 1].head(1)
    for name, column in (("time", "latency_ms"), ("work", "flops")):
        rows[name] = 100 * rows[column] / (float(original[column].iloc[0]) if len(original) else math.nan)
    return rows


def key_figures(scores: pd.DataFrame, cost: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    """Make the score of each task with the fewest dynamic heads and with the best operation, then the speed-up."""
    multiple_models = scores["model"].nunique() > 1
    figures = []
    for drops, best in ((main_drops(scores, metadata), False), (operations(scores), True)):
        for _, rows in drops.groupby(["model", "task", "metric"], sort=False) if len(drops) else ():
            row = rows.loc[rows["score"].idxmax() if best else rows["dynamic_fraction"].idxmin()]
            figures.append(_figure(row, multiple_models=multiple_models))
    costs = relative_cost(cost)
    if len(costs) > 1 and not math.isnan(costs["time"].iloc[-1]):
        fewest = costs.iloc[-1]
        note = f"{labels.number(float(fewest['latency_ms']), 3)} ms, {_with(float(fewest['dynamic_fraction']))[5:]}"
        figures.append(KeyFigure("Speed-up of a forward pass", f"{100 / fewest['time']:.2f}×", note))
    return figures


def _figure(row: pd.Series, *, multiple_models: bool) -> KeyFigure:
    """Make the figure of a score, with the original score and the drop."""
    name = f"{title(str(row['model']), str(row['task']), with_model=multiple_models)}, {metric(str(row['metric']))}"
    note = f"original {labels.number(float(row['original']), 3)}, drop {drop(float(row['drop']), str(row['unit']))}"
    if row["rank_heads_by"] == ATTENTION:
        note = f"with {row['constants']}; {note}"
    elif row["dynamic_fraction"] > 0:
        note += f", {fraction_name(float(row['dynamic_fraction']))} of the heads dynamic"
    return KeyFigure(name, labels.number(float(row["score"]), 3), note)


def summary_rows(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Return the `intervals` of the original model and of the main constants and ranking."""
    constants, ranking = shown_constants(scores, metadata)
    rows = intervals(scores)
    is_main = (rows["constants"] == constants) & (rows["rank_heads_by"] == ranking)
    return rows[is_main | (rows["dynamic_fraction"] == 1)]
