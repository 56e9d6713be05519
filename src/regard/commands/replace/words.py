"""What a report of replaced heads says in words and key figures."""

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
    """The task's title."""
    return _TASKS.get(name, name)


def metric(name: str) -> str:
    """The metric's name in words."""
    return _METRICS.get(name, name.replace("_", " "))


def title(model: str, name: str, *, with_model: bool) -> str:
    """The task's title, and the model's name where there are several."""
    return f"{task(name)}, {model}" if with_model else task(name)


def drop(value: float, unit: str) -> str:
    """The drop and its unit, as in "6.2 %"; a gain has a minus."""
    return "–" if math.isnan(value) else f"{_signed(value, 1 if unit == '%' else 2)} {unit}"


def interval(mean: float, low: float, high: float) -> str:
    """The mean, with half of its interval where there is one."""
    sure = "" if math.isnan(low) else f" ± {labels.number((high - low) / 2, 2)}"
    return f"{labels.number(mean, 3)}{sure}"


def _signed(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def main_drops(scores: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    """The drops of the constants and the order that the run is about."""
    constants, select = shown_constants(scores, record)
    drops = relative_drop(scores)
    return drops[(drops["constants"] == constants) & (drops["rank_heads_by"] == select)]


def ledes(scores: pd.DataFrame, heads: pd.DataFrame, cost: pd.DataFrame, record: Mapping[str, Any]) -> list[str]:
    """What was run, and what came of it, a line each."""
    run = [size] if (size := labels.model_size(record)) else []
    tasks, seeds = scores["task"].nunique(), scores["seed"].nunique()
    run.append(f"{tasks} {'task' if tasks == 1 else 'tasks'}")
    run.append(f"{seeds} {'seed' if seeds == 1 else 'seeds'}")
    seconds = labels.section(record, "cost").get("seconds")
    if isinstance(seconds, (int, float)):
        run.append(f"run in {labels.number(float(seconds), 3)} s")
    found = " ".join(part for part in (_found(scores, record), _saved(cost)) if part)
    return [" · ".join(run), found, _swapped(scores)]


def operations(scores: pd.DataFrame) -> pd.DataFrame:
    """The drops of other operations in the place of softmax."""
    return relative_drop(scores).loc[lambda rows: rows["rank_heads_by"] == ATTENTION]


def _swapped(scores: pd.DataFrame) -> str:
    """What other operations cost, each on average over the tasks that have a drop in the same unit."""
    drops = operations(scores)
    drops = drops if drops.empty else drops[drops["drop"].notna()]
    if drops.empty:
        return ""
    unit = "%" if (drops["unit"] == "%").any() else str(drops["unit"].iloc[0])
    means = drops[drops["unit"] == unit].groupby("constants", sort=False)["drop"].mean()
    told = ", ".join(f"{name} {drop(float(value), unit)}" for name, value in means.items())
    average = "on average " if drops["task"].nunique() > 1 else ""
    return f"With another operation in the place of softmax the score drops {average}by: {told}."


def _found(scores: pd.DataFrame, record: Mapping[str, Any]) -> str:
    """What the fewest dynamic heads cost, and half of them."""
    drops = main_drops(scores, record)
    drops = drops[drops["drop"].notna()]
    if drops.empty:
        return ""
    unit = "%" if (drops["unit"] == "%").any() else str(drops["unit"].iloc[0])
    drops = drops[drops["unit"] == unit]
    constants, _ = shown_constants(scores, record)
    least = float(drops["dynamic_fraction"].min())
    parts = []
    for fraction in dict.fromkeys((least, 0.5)):
        there = drops[drops["dynamic_fraction"] == fraction]
        if there.empty:
            continue
        text = f"the score drops by {drop(float(there['drop'].mean()), unit)}"
        if len(there) > 1:
            worst = there.loc[there["drop"].idxmax()]
            text += f" on average over {len(there)} tasks, at the most by {drop(float(worst['drop']), unit)}"
            text += f" ({task(str(worst['task']))})"
        parts.append(f"{_with(fraction)} {text}")
    told = "; ".join(parts)
    return f"Constants: {constants}. {told[:1].upper()}{told[1:]}."


def _with(fraction: float) -> str:
    if fraction == 0:
        return "with all heads constant"
    return (
        "with half of the heads dynamic" if fraction == 0.5 else f"with {fraction_name(fraction)} of the heads dynamic"
    )


def _saved(cost: pd.DataFrame) -> str:
    shares = relative_cost(cost)
    if len(shares) < 2:
        return ""
    last = shares.iloc[-1]
    parts = [f"{last['time']:.0f} % of the time"] if not math.isnan(last["time"]) else []
    parts += [f"{last['work']:.0f} % of the FLOPs"] if not math.isnan(last["work"]) else []
    where = "then" if last["dynamic_fraction"] == 0 else _with(float(last["dynamic_fraction"]))
    return f"One forward {where} takes {' and '.join(parts)}." if parts else ""


def relative_cost(cost: pd.DataFrame) -> pd.DataFrame:
    """The costs from all heads dynamic to the fewest, with `time` and `work` in percent of the untouched model's."""
    rows = cost.sort_values("dynamic_fraction", ascending=False, ignore_index=True).astype("float64")
    whole = rows[rows["dynamic_fraction"] == 1].head(1)
    for name, column in (("time", "latency_ms"), ("work", "flops")):
        rows[name] = 100 * rows[column] / (float(whole[column].iloc[0]) if len(whole) else math.nan)
    return rows


def key_figures(scores: pd.DataFrame, cost: pd.DataFrame, record: Mapping[str, Any]) -> list[KeyFigure]:
    """For each task the score with the fewest dynamic heads, then that of the best operation; then the speed-up."""
    several = scores["model"].nunique() > 1
    figures = []
    for drops, best in ((main_drops(scores, record), False), (operations(scores), True)):
        for _, rows in drops.groupby(["model", "task", "metric"], sort=False) if len(drops) else ():
            row = rows.loc[rows["score"].idxmax() if best else rows["dynamic_fraction"].idxmin()]
            figures.append(_figure(row, several=several))
    shares = relative_cost(cost)
    if len(shares) > 1 and not math.isnan(shares["time"].iloc[-1]):
        last = shares.iloc[-1]
        note = f"{labels.number(float(last['latency_ms']), 3)} ms, {_with(float(last['dynamic_fraction']))[5:]}"
        figures.append(KeyFigure("Speed-up of a forward", f"{100 / last['time']:.2f}×", note))
    return figures


def _figure(row: pd.Series, *, several: bool) -> KeyFigure:
    """The score in a row, with the original one and the drop."""
    name = f"{title(str(row['model']), str(row['task']), with_model=several)}, {metric(str(row['metric']))}"
    note = f"original {labels.number(float(row['original']), 3)}, drop {drop(float(row['drop']), str(row['unit']))}"
    if row["rank_heads_by"] == ATTENTION:
        note = f"with {row['constants']}; {note}"
    elif row["dynamic_fraction"] > 0:
        note += f", {fraction_name(float(row['dynamic_fraction']))} of the heads dynamic"
    return KeyFigure(name, labels.number(float(row["score"]), 3), note)


def summary_rows(scores: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    """The `intervals` of the untouched model, and of the constants and the order that the run is about."""
    constants, select = shown_constants(scores, record)
    found = intervals(scores)
    ours = (found["constants"] == constants) & (found["rank_heads_by"] == select)
    return found[ours | (found["dynamic_fraction"] == 1)]
