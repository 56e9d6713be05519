"""Sentences and key figures of a report on replaced heads."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.replace.scores import (
    ATTENTION,
    GROUP,
    TEXT_PARTS,
    ZEROS,
    Outcome,
    drop_interval,
    fraction_name,
    intervals,
)
from regard.data.missing_values import LEFT_OUT
from regard.report import labels
from regard.report.labels import join, pluralize, run_time
from regard.report.page import KeyFigure

_TASKS = {"cola": "CoLA", "sst2": "SST-2", **{name: name.upper() for name in ("mrpc", "mnli", "ner", "pos", "mlm")}}
_METRICS = {"mcc": "Matthews correlation", "f1": "F1", "entity_f1": "entity F1", "token_f1": "F1"}


def metric(name: str) -> str:
    """Return the metric's name in words."""
    return _METRICS.get(name, name.replace("_", " "))


def title(outcome: Outcome, model: str, name: str) -> str:
    """Return the task's title, and the model's name if there are several."""
    return f"{task_title(name)}, {outcome.model_names[model]}" if outcome.multiple_models else task_title(name)


def task_title(name: str) -> str:
    """Return the task's title."""
    return _TASKS.get(name, name)


def drop(value: float, unit: str, places: int | None = None) -> str:
    """Format a drop and its unit, as in "6.2 %"; a gain is negative.

    Of less than 0.01 nats the first digit is told, unless the number of decimals is given.
    """
    if math.isnan(value):
        return "–"
    text = f"{value:.{places or (1 if unit == '%' else 2)}f}"
    if not places and _is_small(value, unit):
        text = f"{value:.1g}"  # a small drop is not none
    return f"{text.replace('-', '' if float(text) == 0 else '−', 1)} {unit}"


def _is_small(value: float, unit: str) -> bool:
    return unit != "%" and 0 < abs(value) < 0.01


def row_drop(row: Any) -> str:
    """Format the drop in a row of `relative_drop`."""
    return drop(float(row.drop), str(row.unit))


def brief_loss(outcome: Outcome, row: pd.Series) -> str:
    """Say in a few words what a row of `relative_drop` loses or gains; nothing that its interval does not show."""
    low, high = drop_bounds(outcome, pd.DataFrame([row]))
    task, constants, loss = row["task"], row["constants"], drop(float(row["drop"]), str(row["unit"]))
    if low <= 0 <= high:
        return f"{task} loses nothing that is shown with {constants} ({loss})"
    if row["drop"] < 0:
        return f"{task} gains {drop(-float(row['drop']), str(row['unit']))} with {constants}"
    return f"{task} loses {loss} with {constants}"


def ledes(outcome: Outcome, cost: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Write what was run, then the outcome of replacing, then of other operations."""
    windows = labels.metadata_number(metadata, "data", "validation")
    over_parts = outcome.units == TEXT_PARTS and windows is not None
    parts = [
        labels.model_size(metadata),
        pluralize(outcome.scores["task"].nunique(), "task"),
        pluralize(int(windows or 0), "window") if over_parts else pluralize(outcome.scores["seed"].nunique(), "seed"),
        _truncation(metadata),
        _write_left_out(metadata),
        run_time(metadata, "run in"),
    ]
    about_drops = [_write_drops(outcome), _write_majority(outcome, metadata), _write_zeros(outcome), _write_costs(cost)]
    return [join(parts, " · "), join(about_drops, " "), _write_operations(outcome)]


def majorities(outcome: Outcome, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return what the best single label scores, by task, where it is known."""
    tasks = list(dict.fromkeys(outcome.scores["task"]))
    known = dict[str, float]()
    for run in metadata.get("runs") or [metadata]:
        majority = labels.metadata_number(run, "data", "majority")
        task = labels.section(run, "data").get("task") if len(tasks) > 1 else tasks[0]
        if majority is not None:
            known[str(task)] = majority
    return known


def majority_of_all(outcome: Outcome, metadata: Mapping[str, Any]) -> float | None:
    """Return what the best single label scores if there is one task, else None."""
    known = majorities(outcome, metadata)
    return next(iter(known.values())) if outcome.scores["task"].nunique() == len(known) == 1 else None


def _write_majority(outcome: Outcome, metadata: Mapping[str, Any]) -> str:
    """Say which tasks show no loss: those where the original is not shown to be above the best single label."""
    known = majorities(outcome, metadata)
    means = intervals(outcome.scores)
    original = means[(means["dynamic_fraction"] == 1) & means["task"].isin(list(known))]
    low = original["ci_low"].fillna(original["mean"]).groupby([original["model"], original["task"]], sort=False).max()
    weak = [(model, task) for (model, task), value in low.items() if value <= known[task]]
    if not weak:
        return ""
    what = "The original model is not shown to score more than the best single label"
    if len(low) == 1:
        return f"{what} ({labels.number(known[weak[0][1]], 3)}): this task cannot show what its heads do."
    named = [f"{title(outcome, model, task)} ({labels.number(known[task], 3)})" for model, task in weak]
    return f"{what} in {len(weak)} of {len(low)} cases, which cannot show what heads do: {', '.join(named)}."


def _write_zeros(outcome: Outcome) -> str:
    """Say which tasks do not show what heads do: those where nothing is shown to be lost without attention."""
    drops = outcome.drops
    rows = drops[(drops["constants"] == ZEROS) & (drops["dynamic_fraction"] == 0)].drop_duplicates(GROUP)
    lows = [drop_bounds(outcome, rows.loc[[index]])[0] for index in rows.index]
    differences = rows["drop"].fillna(rows["original"] - rows["score"])  # no drop is known of an original score of 0
    lows = [mean if math.isnan(low) else low for low, mean in zip(lows, differences, strict=True)]
    unshown = [(str(row.model), str(row.task)) for row, low in zip(rows.itertuples(), lows, strict=True) if low <= 0]
    if not unshown or outcome.constants == ZEROS:
        return ""
    what = "Zeros in all heads are not shown to score less than the original model"
    if len(rows) == 1:
        return f"{what}: this task does not show what its heads do."
    named = ", ".join(title(outcome, model, task) for model, task in unshown)
    return f"{what} in {len(unshown)} of {len(rows)} cases, which do not show what heads do: {named}."


def _truncation(metadata: Mapping[str, Any]) -> str:
    """Say how many inputs were cut to the length; "" if none was."""
    counts = [labels.metadata_number(metadata, "data", name) for name in ("truncated", "train", "validation")]
    truncated, train, validation = (int(count or 0) for count in counts)
    return f"{truncated:,} of {train + validation:,} inputs cut to the length" if truncated else ""


def _write_left_out(metadata: Mapping[str, Any]) -> str:
    """Say how many rows were left out since they have no label or no text; "" if none was."""
    count = int(labels.metadata_number(metadata, "data", LEFT_OUT) or 0)
    return f"{pluralize(count, 'row')} without a label or a text left out" if count else ""


def _in_one_unit(drops: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the known drops in percent, else those in the first unit, and the unit."""
    drops = drops[drops["drop"].notna()]
    units = [str(unit) for unit in drops["unit"].unique()]
    unit = "%" if "%" in units else next(iter(units), "")
    return drops[drops["unit"] == unit], unit


def _write_drop(outcome: Outcome, rows: pd.DataFrame, unit: str, worst: str = "") -> str:
    """Say by how much the score drops on average, and what else (`worst`), or that no drop is shown."""
    low, high = drop_bounds(outcome, rows)
    if low == high == 0 and not _of_single_pairs(outcome, rows, high):
        return "the score is the same for every seed"
    if low <= 0 <= high:
        return f"no drop is shown: {_not_excluded(outcome, rows, high)}"
    mean = float(rows["drop"].mean())
    interval = f", {_NO_INTERVAL}" if math.isnan(low) else ""
    return f"the score {'drops' if mean >= 0 else 'rises'} by {drop(abs(mean), unit)}{worst}{interval}"


def _write_operations(outcome: Outcome) -> str:
    """Describe the cost of other operations, averaged over tasks with drops in one unit."""
    drops, unit = _in_one_unit(outcome.operations)
    if drops.empty:
        return ""
    parts = []
    for name, rows in drops.groupby("constants", sort=False):
        parts.append(f"with {name} {_write_drop(outcome, rows, unit)}")
    average = ", on average" if outcome.operations.dropna(subset="drop")["task"].nunique() > 1 else ""
    return f"Other operations instead of softmax{average}: {'; '.join(parts)}."


_NO_INTERVAL = "without an interval"
"""What is said of a drop of a single score, or of equal ones, which may be chance."""


def _of_single_pairs(outcome: Outcome, rows: pd.DataFrame, high: float) -> str:
    """Say how much larger a drop of a single pair may be than that of their average."""
    highs = pd.Series({index: drop_bounds(outcome, rows.loc[[index]])[1] for index in rows.index})
    if not highs.max() > high:
        return ""
    row = rows.loc[highs.idxmax()]
    most = drop(float(highs.max()), str(row["unit"]))
    return f"on average, and of up to {most} in {title(outcome, str(row['model']), str(row['task']))}, "


def _not_excluded(outcome: Outcome, rows: pd.DataFrame, high: float) -> str:
    """Say how large a drop may be whose interval, which contains 0, ends at `high`."""
    most = drop(high, str(rows["unit"].iloc[0]))
    return f"one of up to {most} {_of_single_pairs(outcome, rows, high)}cannot be excluded over {outcome.units}"


def _write_drops(outcome: Outcome) -> str:
    """Describe the drop with the fewest dynamic heads, and with half of them."""
    drops, unit = _in_one_unit(outcome.main)
    if drops.empty:
        return ""
    parts = []
    for fraction in dict.fromkeys((float(drops["dynamic_fraction"].min()), 0.5)):
        rows = drops[drops["dynamic_fraction"] == fraction]
        if rows.empty:
            continue
        worst_of_all = ""
        if len(rows) > 1:
            worst = rows.loc[rows["drop"].idxmax()]
            most, name = drop(float(worst["drop"]), unit), title(outcome, str(worst["model"]), str(worst["task"]))
            worst_of_all = f" on average over {count_pairs(rows)}, at most by {most} ({name})"
        parts.append(f"with {describe_fraction(fraction)} {_write_drop(outcome, rows, unit, worst_of_all)}")
    sentence = "; ".join(parts)
    return f"Constants: {outcome.constants}. {sentence[:1].upper()}{sentence[1:]}."


def count_pairs(rows: pd.DataFrame) -> str:
    """Say of how many tasks, models, or tasks with a model rows of drops are."""
    tasks, models = rows["task"].nunique(), rows["model"].nunique()
    if models == 1:
        return pluralize(tasks, "task")
    return pluralize(models, "model") if tasks == 1 else f"{len(rows)} pairs of task and model"


def drop_bounds(outcome: Outcome, rows: pd.DataFrame) -> tuple[float, float]:
    """Return the 95 % interval of the mean drop of rows; NaN for one seed, and for equal drops that are not 0."""
    interval = drop_interval(outcome.scores, rows)
    return interval.ci_low, interval.ci_high


def _drop_with_interval(outcome: Outcome, row: pd.Series) -> str:
    """Format a row's drop, with its interval if there is one, in equal decimals."""
    low, high = drop_bounds(outcome, pd.DataFrame([row]))
    unit = str(row["unit"])
    value = float(row["drop"])
    if math.isnan(low):
        return drop(value, unit)
    is_small = any(_is_small(one, unit) for one in (value, low, high))
    places = labels.interval_decimals((high - low) / 2, low, high, 2) if is_small else None
    told, begin, end = (drop(one, unit, places) for one in (value, low, high))
    return f"{told} ({begin.removesuffix(f' {unit}')} to {end})"


def describe_fraction(fraction: float) -> str:
    """Name a fraction of dynamic heads in words."""
    if fraction == 0:
        return "all heads constant"
    return f"{'half' if fraction == 0.5 else fraction_name(fraction)} of the heads dynamic"


def _write_costs(cost: pd.DataFrame) -> str:
    costs = relative_cost(cost)
    if len(costs) < 2:
        return ""
    fewest = costs.iloc[-1]
    names = {"time": "time", "work": "FLOPs"} if _is_faster(fewest) else {"work": "FLOPs"}
    parts = [f"{fewest[key]:.0f} % of the {name}" for key, name in names.items() if not math.isnan(fewest[key])]
    condition = describe_fraction(float(fewest["dynamic_fraction"]))
    return f"One forward pass with {condition} takes {' and '.join(parts)} of the original model." if parts else ""


def _is_faster(row: Mapping[Any, Any]) -> bool:
    """Return whether the middle half of the rounds lies below the original model's time."""
    return bool(row["relative_time_high"] < 1)


def describe_correlations(correlations: pd.DataFrame) -> str:
    """Say whether models of higher scores lose more; "" for fewer than two models."""
    if correlations.empty:
        return ""
    row = correlations.iloc[-1]
    if math.isnan(row["ci_low"]):
        return "Whether models of higher scores lose more cannot be told from so few models."
    r, low, high = (f"{row[name]:.2f}".replace("-", "−") for name in ("r", "ci_low", "ci_high"))
    numbers = f"r = {r}, 95 % interval {low} to {high}"
    if row["ci_low"] <= 0 <= row["ci_high"]:
        return f"Whether models of higher scores lose more cannot be told ({numbers})."
    return f"Models of higher scores lose {'more' if row['r'] > 0 else 'less'} ({numbers})."


def relative_cost(cost: pd.DataFrame) -> pd.DataFrame:
    """Sort costs from all heads dynamic to the fewest, with `time` and `work` in percent of the original model's.

    Time may be below the share of the FLOPs, which count neither the softmax nor the memory that scores go through.
    """
    rows = cost.sort_values("dynamic_fraction", ascending=False, ignore_index=True).astype("float64")
    original = rows[rows["dynamic_fraction"] == 1].head(1)
    rows["work"] = 100 * rows["flops"] / (float(original["flops"].iloc[0]) if len(original) else math.nan)
    return rows.assign(time=100 * rows["relative_time"])


def time_share(row: Mapping[Any, Any]) -> str:
    """Format the time of a row of `relative_cost` in percent of the original model's, with its quartiles."""
    if math.isnan(row["time"]):
        return "–"
    low, high = (labels.number(100 * row[f"relative_time_{end}"], 3) for end in ("low", "high"))
    spread = "" if row["dynamic_fraction"] == 1 else f" ({low}–{high})"
    return f"{labels.number(row['time'], 3)} %{spread}"


def key_figures(outcome: Outcome, cost: pd.DataFrame) -> list[KeyFigure]:
    """Make the score of each task with the fewest dynamic heads and with the best operation, then the speed-up."""
    fewest_rows = [rows.loc[rows["dynamic_fraction"].idxmin()] for _, rows in outcome.main.groupby(GROUP, sort=False)]
    by_task = [rows for _, rows in outcome.operations.groupby(GROUP, sort=False)]
    figures = [_make_figure(outcome, row) for row in fewest_rows]
    figures += [_make_figure(outcome, rows.loc[rows["score"].idxmax()], best_of=len(rows)) for rows in by_task]
    costs = relative_cost(cost)
    if len(costs) > 1 and not math.isnan(costs["time"].iloc[-1]) and _is_faster(costs.iloc[-1]):
        fewest = costs.iloc[-1]
        latency = labels.number(float(fewest["latency_ms"]), 3)
        slow, fast = (1 / float(fewest[f"relative_time_{end}"]) for end in ("high", "low"))
        spread = f"middle half of the rounds {slow:.2f} to {fast:.2f}×"
        note = f"{latency} ms, {describe_fraction(float(fewest['dynamic_fraction']))}; {spread}"
        figures.append(KeyFigure("Speed-up of a forward pass", f"{100 / fewest['time']:.2f}×", note))
    return figures


def _make_figure(outcome: Outcome, row: pd.Series, *, best_of: int = 1) -> KeyFigure:
    name = f"{title(outcome, str(row['model']), str(row['task']))}, {metric(str(row['metric']))}"
    note = f"original {labels.number(float(row['original']), 3)}, drop {_drop_with_interval(outcome, row)}"
    if row["rank_heads_by"] == ATTENTION:
        chosen = f", the best of {best_of} by these scores" if best_of > 1 else ""
        note = f"with {row['constants']}{chosen}; {note}"
    elif row["dynamic_fraction"] > 0:
        note += f", {fraction_name(float(row['dynamic_fraction']))} of the heads dynamic"
    return KeyFigure(name, labels.number(float(row["score"]), 3), note)
