"""One run with replaced heads as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch import Tensor

from regard.commands.replace import charts, pictures, words
from regard.commands.replace.scores import (
    ATTENTION,
    check_scores,
    constant_rows,
    fraction_name,
    relative_drop,
    shown_constants,
)
from regard.report import labels
from regard.report.page import Box, Group, Maps, Page, Panels, Record, Row, Section, Table, read_asset


def replace_page(
    scores: pd.DataFrame,
    heads: pd.DataFrame,
    cost: pd.DataFrame,
    record: dict[str, Any],
    matrices: Mapping[str, Tensor],
) -> str:
    """Return the report as one self-contained HTML file.

    Args:
        scores: Rows in the schema of `scores.parquet`.
        heads: Rows in the schema of `heads.json`; may be empty.
        cost: Rows in the schema of `cost.parquet`; may be empty.
        record: The metadata in `results.json`.
        matrices: Constants, each (head, query, key), by "site.layer".

    Raises:
        UserError: The scores are empty or lack a column.
    """
    check_scores(scores)
    shown = pictures.pictures(heads, matrices)
    data = {"pictures": pictures.payload(shown)}
    return Page(
        eyebrow="Regard · replaced heads",
        title=labels.model_name(record),
        ledes=words.ledes(scores, heads, cost, record),
        key_figures=words.key_figures(scores, cost, record),
        sections=[
            *_scores(scores, record),
            Section("order", "Which heads stay dynamic", [Maps(charts.order_maps(heads, record))], _RANK),
            Section(
                "constants",
                "The constant matrices",
                [_patterns(heads), Box(shown, ["pictures"], css="pictures")],
                " ".join(part for part in (_both(record), pictures.about(shown)) if part),
            ),
            Section("cost", "Time and FLOPs", _cost(cost), _batch(record)),
            Section("provenance", "Provenance", [Record(record)]),
        ],
        record=record,
        data=data,
        script=read_asset("page.js", __package__),
    ).html()


def _scores(scores: pd.DataFrame, record: Mapping[str, Any]) -> list[Section]:
    constants, select = shown_constants(scores, record)
    sure = "Bars: 95 % intervals over seeds (Student’s t). " if scores["seed"].nunique() > 1 else ""
    left = (
        f"{sure}From the untouched model on the left to all heads constant on the right; heads in the order “{select}”."
    )
    drops = f"{_DROPS} Constants “{constants}”, order “{select}”."
    lines, orders = charts.score_panels(scores, record), charts.order_panels(scores, record)
    return [
        Section("scores", "Score by fraction of dynamic heads", [Panels(lines, "scores")], left),
        Section("drops", "What replacing costs", [_drops_table(words.main_drops(scores, record))], drops),
        Section("operations", "Other operations", [_operations_table(scores)], _OPERATIONS),
        Section("sources", "Sources of constants", [_sources_table(scores, record)], _sources_about(scores)),
        Section("orders", "Orders of the heads", [Panels(orders, "orders")], f"{sure}Constants “{constants}”."),
    ]


_DROPS = "Relative drop: (original − score) / |original|; for log perplexities the difference in nats."


def _drops_table(drops: pd.DataFrame) -> Table:
    """Tasks by fractions, with the mean over the tasks that have a drop in percent."""
    several = drops["model"].nunique() > 1
    fractions = sorted({float(fraction) for fraction in drops["dynamic_fraction"]}, reverse=True)
    lines = []
    for (model, task, metric), rows in drops.groupby(["model", "task", "metric"], sort=False):
        by = {float(row.dynamic_fraction): words.drop(float(row.drop), str(row.unit)) for row in rows.itertuples()}
        note = f"{words.metric(str(metric))}, original {labels.number(float(rows['original'].iloc[0]), 3)}"
        name = words.title(str(model), str(task), with_model=several)
        lines.append((name, note, [by.get(fraction, "–") for fraction in fractions]))
    percent = drops[(drops["unit"] == "%") & drops["drop"].notna()]
    counted = percent.groupby(["model", "task"]).ngroups
    if counted > 1:
        means = percent.groupby("dynamic_fraction")["drop"].mean()
        cells = [words.drop(float(means.get(fraction, float("nan"))), "%") for fraction in fractions]
        lines.append(("Mean", f"of {counted} tasks", cells))
    head = ["Dynamic heads", *(fraction_name(fraction) for fraction in fractions)]
    return Table(lines, head, "Relative drop by task and fraction")


_OPERATIONS = "Mean score with this operation in the place of softmax in all heads, and the relative drop."


def _operations_table(scores: pd.DataFrame) -> Table:
    """Operations by tasks."""
    return _by_task(words.operations(scores), "Operation", "untouched")


def _sources_table(scores: pd.DataFrame, record: Mapping[str, Any]) -> Table:
    """Sources of constants by tasks, with the fewest dynamic heads; empty where there is one source."""
    drops = _at_least(scores)
    if drops["constants"].nunique() < 2:
        drops = drops.iloc[:0]
    _, select = shown_constants(scores, record)
    drops = drops.assign(other=drops["rank_heads_by"] != select).sort_values("other", kind="stable")
    drops = drops.drop_duplicates(["model", "task", "metric", "constants"]).sort_index()
    return _by_task(drops, "Constants", "no head constant")


def _by_task(drops: pd.DataFrame, what: str, original: str) -> Table:
    """What stands where attention was by tasks: scores and drops."""
    several = drops["model"].nunique() > 1
    keys = list(dict.fromkeys(zip(drops["model"], drops["task"], drops["metric"], strict=True)))
    lines: list[Row] = [("original", original, [_original(drops, key) for key in keys])] if keys else []
    for name, rows in drops.groupby("constants", sort=False):
        by = {
            (row.model, row.task, row.metric): f"{labels.number(float(row.score), 3)} "
            f"({words.drop(float(row.drop), str(row.unit))})"
            for row in rows.itertuples()
        }
        lines.append((str(name), "", [by.get(key, "–") for key in keys]))
    head = [what, *(words.title(model, task, with_model=several) for model, task, _ in keys)]
    return Table(lines, head, f"Scores by {what.lower()} and task")


def _at_least(scores: pd.DataFrame) -> pd.DataFrame:
    drops = relative_drop(scores).loc[lambda rows: rows["rank_heads_by"] != ATTENTION]
    return drops[drops["dynamic_fraction"] == drops["dynamic_fraction"].min()]


def _original(drops: pd.DataFrame, key: tuple[str, str, str]) -> str:
    rows = drops[(drops["model"] == key[0]) & (drops["task"] == key[1]) & (drops["metric"] == key[2])]
    return labels.number(float(rows["original"].iloc[0]), 3)


def _sources_about(scores: pd.DataFrame) -> str:
    least = float(constant_rows(scores)["dynamic_fraction"].min())
    where = "all heads constant" if least == 0 else f"{fraction_name(least)} of the heads dynamic"
    return f"Mean score with {where}, and the relative drop."


_RANK = "Rank 0 stays dynamic longest; the head of the largest rank becomes constant first."


def _patterns(heads: pd.DataFrame) -> Table:
    """How many heads have each pattern, with a bar for each share."""
    counts = pictures.pattern_counts(heads)
    rows = [(name, "", [str(count), f"{labels.number(100 * share, 3)} %"]) for name, count, share in counts]
    return Table(rows, ["Pattern", "Heads", "Share"], "Pattern", bars=[100 * share for _, _, share in counts])


def _both(record: Mapping[str, Any]) -> str:
    """The shares of heads with a diagonal and on special tokens, where the record tells them."""
    told = labels.section(record, "patterns")
    parts = [
        f"{labels.number(100 * float(told[key]), 3)} % of the heads {what}"
        for key, what in (("has_diagonal", "show a diagonal"), ("on_special", "have most mass on special tokens"))
        if isinstance(told.get(key), (int, float))
    ]
    return f"{', '.join(parts)} (a head may do both)." if parts else ""


def _cost(cost: pd.DataFrame) -> list[Group]:
    """Time and FLOPs as a table, and beside it as lines; nothing without costs."""
    if cost.empty:
        return []
    rows = []
    for row in words.relative_cost(cost).to_dict("records"):
        milliseconds, work = labels.number(row["latency_ms"], 3), labels.number(row["flops"] / 1e9, 3)
        shares = [f"{labels.number(row[key], 3)} %" for key in ("time", "work")]
        rows.append((fraction_name(row["dynamic_fraction"]), "", [milliseconds, shares[0], work, shares[1]]))
    head = ["Dynamic heads", "Milliseconds", "of the original", "GFLOPs", "of the original"]
    table = Table(rows, head, "Time and FLOPs of a forward by fraction")
    return [Group([table, Panels(charts.cost_panels(cost), "cost")], "beside")]


def _batch(record: Mapping[str, Any]) -> str:
    """What one forward was, where the record tells it."""
    told = labels.section(record, "cost")
    parts = []
    if told.get("batch_size") is not None:
        parts.append(f"a batch of {told['batch_size']}")
    if told.get("length") is not None:
        parts.append(f"{told['length']} tokens")
    if told.get("device"):
        parts.append(f"on {told['device']}")
    return (
        f"One forward, median of repetitions: {', '.join(parts)}." if parts else "One forward, median of repetitions."
    )
