"""Report on a run with replaced heads as one self-contained HTML file."""

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
    metadata: dict[str, Any],
    matrices: Mapping[str, Tensor],
) -> str:
    """Return the report as one self-contained HTML file.

    Args:
        scores: Rows in the schema of `scores.parquet`.
        heads: Rows in the schema of `heads.json`; may be empty.
        cost: Rows in the schema of `cost.parquet`; may be empty.
        metadata: The metadata in `results.json`.
        matrices: Constants of shape (head, query, key), by "site.layer".

    Raises:
        UserError: The scores are empty or lack a column.
    """
    check_scores(scores)
    images = pictures.pictures(heads, matrices)
    data = {"pictures": pictures.payload(images)}
    return Page(
        eyebrow="Regard · replaced heads",
        title=labels.model_name(metadata),
        ledes=words.ledes(scores, heads, cost, metadata),
        key_figures=words.key_figures(scores, cost, metadata),
        sections=[
            *_scores(scores, metadata),
            Section("order", "Ranking of heads", [Maps(charts.order_maps(heads, metadata))], _RANK),
            Section(
                "constants",
                "Constant matrices",
                [_patterns(heads), Box(images, ["pictures"], css="pictures")],
                " ".join(part for part in (_both(metadata), pictures.about(images)) if part),
            ),
            Section("cost", "Time and FLOPs", _cost(cost), _batch(metadata)),
            Section("provenance", "Provenance", [Record(metadata)]),
        ],
        record=metadata,
        data=data,
        script=read_asset("page.js", __package__),
    ).html()


def _scores(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> list[Section]:
    constants, ranking = shown_constants(scores, metadata)
    bars = "Bars: 95 % intervals over seeds (Student’s t). " if scores["seed"].nunique() > 1 else ""
    description = f"{bars}From the original model (left) to all heads constant (right); head ranking “{ranking}”."
    drops = f"{_DROPS} Constants “{constants}”, ranking “{ranking}”."
    lines, orders = charts.score_panels(scores, metadata), charts.order_panels(scores, metadata)
    return [
        Section("scores", "Score by fraction of dynamic heads", [Panels(lines, "scores")], description),
        Section("drops", "Drop", [_drops_table(words.main_drops(scores, metadata))], drops),
        Section("operations", "Other operations", [_operations_table(scores)], _OPERATIONS),
        Section("sources", "Sources of constants", [_sources_table(scores, metadata)], _sources_about(scores)),
        Section("orders", "Head rankings", [Panels(orders, "orders")], f"{bars}Constants “{constants}”."),
    ]


_DROPS = "Relative drop: (original − score) / |original|; for log perplexities the difference in nats."


def _drops_table(drops: pd.DataFrame) -> Table:
    """Make a table of drops by task and fraction, with the mean over tasks with a drop in percent."""
    multiple_models = drops["model"].nunique() > 1
    fractions = sorted({float(fraction) for fraction in drops["dynamic_fraction"]}, reverse=True)
    table_rows = []
    for (model, task, metric), rows in drops.groupby(["model", "task", "metric"], sort=False):
        by_fraction = {
            float(row.dynamic_fraction): words.drop(float(row.drop), str(row.unit)) for row in rows.itertuples()
        }
        note = f"{words.metric(str(metric))}, original {labels.number(float(rows['original'].iloc[0]), 3)}"
        name = words.title(str(model), str(task), with_model=multiple_models)
        table_rows.append((name, note, [by_fraction.get(fraction, "–") for fraction in fractions]))
    percent = drops[(drops["unit"] == "%") & drops["drop"].notna()]
    num_tasks = percent.groupby(["model", "task"]).ngroups
    if num_tasks > 1:
        means = percent.groupby("dynamic_fraction")["drop"].mean()
        cells = [words.drop(float(means.get(fraction, float("nan"))), "%") for fraction in fractions]
        table_rows.append(("Mean", f"of {num_tasks} tasks", cells))
    head = ["Dynamic heads", *(fraction_name(fraction) for fraction in fractions)]
    return Table(table_rows, head, "Relative drop by task and fraction")


_OPERATIONS = "Mean score with this operation instead of softmax in all heads, and the relative drop."


def _operations_table(scores: pd.DataFrame) -> Table:
    """Make a table of scores by operation and task."""
    return _by_task(words.operations(scores), "Operation", "all heads")


def _sources_table(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> Table:
    """Make a table of scores by source of constants and task, with the fewest dynamic heads; empty for one source."""
    drops = _at_least(scores)
    if drops["constants"].nunique() < 2:
        drops = drops.iloc[:0]
    _, ranking = shown_constants(scores, metadata)
    drops = drops.assign(other=drops["rank_heads_by"] != ranking).sort_values("other", kind="stable")
    drops = drops.drop_duplicates(["model", "task", "metric", "constants"]).sort_index()
    return _by_task(drops, "Constants", "no head constant")


def _by_task(drops: pd.DataFrame, column: str, original: str) -> Table:
    """Make a table of scores and drops by replacement and task."""
    multiple_models = drops["model"].nunique() > 1
    keys = list(dict.fromkeys(zip(drops["model"], drops["task"], drops["metric"], strict=True)))
    table_rows: list[Row] = [("original", original, [_original(drops, key) for key in keys])] if keys else []
    for name, rows in drops.groupby("constants", sort=False):
        by_key = {
            (row.model, row.task, row.metric): f"{labels.number(float(row.score), 3)} "
            f"({words.drop(float(row.drop), str(row.unit))})"
            for row in rows.itertuples()
        }
        table_rows.append((str(name), "", [by_key.get(key, "–") for key in keys]))
    head = [column, *(words.title(model, task, with_model=multiple_models) for model, task, _ in keys)]
    return Table(table_rows, head, f"Scores by {column.lower()} and task")


def _at_least(scores: pd.DataFrame) -> pd.DataFrame:
    drops = relative_drop(scores).loc[lambda rows: rows["rank_heads_by"] != ATTENTION]
    return drops[drops["dynamic_fraction"] == drops["dynamic_fraction"].min()]


def _original(drops: pd.DataFrame, key: tuple[str, str, str]) -> str:
    rows = drops[(drops["model"] == key[0]) & (drops["task"] == key[1]) & (drops["metric"] == key[2])]
    return labels.number(float(rows["original"].iloc[0]), 3)


def _sources_about(scores: pd.DataFrame) -> str:
    min_fraction = float(constant_rows(scores)["dynamic_fraction"].min())
    condition = "all heads constant" if min_fraction == 0 else f"{fraction_name(min_fraction)} of the heads dynamic"
    return f"Mean score with {condition}, and the relative drop."


_RANK = "Rank 0 stays dynamic longest; the head of the largest rank becomes constant first."


def _patterns(heads: pd.DataFrame) -> Table:
    """Make a table of the heads' patterns, with a bar per share."""
    counts = pictures.pattern_counts(heads)
    rows = [(name, "", [str(count), f"{labels.number(100 * share, 3)} %"]) for name, count, share in counts]
    return Table(rows, ["Pattern", "Heads", "Share"], "Pattern", bars=[100 * share for _, _, share in counts])


def _both(metadata: Mapping[str, Any]) -> str:
    """Describe the shares of heads with a diagonal and on special tokens, if recorded."""
    patterns = labels.section(metadata, "patterns")
    parts = [
        f"{labels.number(100 * float(patterns[key]), 3)} % of the heads {description}"
        for key, description in (
            ("has_diagonal", "show a diagonal"),
            ("on_special", "have most mass on special tokens"),
        )
        if isinstance(patterns.get(key), (int, float))
    ]
    return f"{', '.join(parts)} (a head may do both)." if parts else ""


def _cost(cost: pd.DataFrame) -> list[Group]:
    """Make the table and the lines of time and FLOPs."""
    if cost.empty:
        return []
    rows = []
    for row in words.relative_cost(cost).to_dict("records"):
        latency, work = labels.number(row["latency_ms"], 3), labels.number(row["flops"] / 1e9, 3)
        percentages = [f"{labels.number(row[key], 3)} %" for key in ("time", "work")]
        rows.append((fraction_name(row["dynamic_fraction"]), "", [latency, percentages[0], work, percentages[1]]))
    head = ["Dynamic heads", "Milliseconds", "of the original", "GFLOPs", "of the original"]
    table = Table(rows, head, "Time and FLOPs of a forward pass by fraction")
    return [Group([table, Panels(charts.cost_panels(cost), "cost")], "beside")]


def _batch(metadata: Mapping[str, Any]) -> str:
    """Describe the forward pass that was timed."""
    cost = labels.section(metadata, "cost")
    parts = []
    if cost.get("batch_size") is not None:
        parts.append(f"batch size {cost['batch_size']}")
    if cost.get("length") is not None:
        parts.append(f"{cost['length']} tokens")
    if cost.get("device"):
        parts.append(f"on {cost['device']}")
    return (
        f"Forward pass, median of repetitions: {', '.join(parts)}." if parts else "Forward pass, median of repetitions."
    )
