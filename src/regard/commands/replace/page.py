"""Report on a run with replaced heads as one self-contained HTML file."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from torch import Tensor

from regard.commands.replace import charts, words
from regard.commands.replace.config import GATED, TRAINED
from regard.commands.replace.scores import (
    ATTENTION,
    GROUP,
    KEYS,
    Outcome,
    drops_by_original,
    fraction_name,
    intervals,
    pattern_counts,
)
from regard.report import labels
from regard.report.page import Box, Group, Maps, Page, Panels, Record, Row, Section, Table, read_asset

_DROPS = "Relative drop: (original − score) / |original|; for log perplexities the difference in nats."
_OPERATIONS = "Mean score with this operation instead of softmax in all heads, and the relative drop."
_CORRELATION = (
    "Drop with the fewest dynamic heads over the original score, a dot a model, and Pearson’s r with its interval by "
    "Fisher’s z. Over all tasks: of the deviations from each task’s means, with the jackknife’s interval over models."
)
_RANK = "Rank 0 stays dynamic longest; the head of the largest rank becomes constant first."


def replace_page(
    scores: pd.DataFrame,
    heads: pd.DataFrame,
    cost: pd.DataFrame,
    metadata: dict[str, Any],
    matrices: Mapping[str, Tensor],
) -> str:
    """Return the report as one self-contained HTML file. Raises UserError without scores."""
    outcome = Outcome(scores, metadata)
    images = charts.pictures(heads, matrices)
    return Page(
        eyebrow="Regard · replaced heads",
        title=labels.model_name(metadata),
        ledes=words.ledes(outcome, cost, metadata),
        key_figures=words.key_figures(outcome, cost),
        sections=[
            *_scores(outcome, words.majority_of_all(outcome, metadata)),
            Section("order", "Ranking of heads", [Maps(charts.order_maps(heads, metadata))], _ranking(metadata)),
            Section(
                "constants",
                "Constant matrices",
                [_patterns(heads), Box(images, ["pictures"], css="pictures")],
                labels.join([_both(metadata), charts.about(images)], " "),
            ),
            Section("cost", "Time and FLOPs", _cost(cost), _batch(metadata)),
            Section("provenance", "Provenance", [Record(metadata)]),
        ],
        record=metadata,
        data={"pictures": charts.payload(images)},
        script=read_asset("page.js", __package__),
    ).html()


def _ranking(metadata: Mapping[str, Any]) -> str:
    """Say which ranking the table of heads has."""
    name = charts.head_ranking(metadata)
    drawn = " This is the order of seed 0; each seed draws its own." if name == "random" else ""
    return f"Ranking “{name}”. {_RANK}{drawn}" if name else _RANK


def several_page(scores: pd.DataFrame, cost: pd.DataFrame, metadata: dict[str, Any]) -> str:
    """Return the report over several models or tasks as one HTML file; each run has a page of its own."""
    outcome = Outcome(scores, metadata)
    correlations = drops_by_original(outcome)
    rows = [
        (str(row.task), "", [str(row.models), labels.number(row.r, 2), _interval(row.ci_low, row.ci_high)])
        for row in correlations.itertuples()
    ]
    table = Table(rows, ["Task", "Models", "r", "95 % interval"], "Correlation of drop and original score over models")
    dots = Panels(charts.model_panels(outcome), "models", fit=True)
    return Page(
        eyebrow="Regard · replaced heads",
        title=labels.model_name(metadata),
        ledes=[*words.ledes(outcome, cost, metadata), words.describe_correlations(correlations)],
        key_figures=words.key_figures(outcome, cost),
        sections=[
            *_scores(outcome, None),
            Section("models", "Do better models lose more?", [dots, table], _CORRELATION),
            Section("runs", "Runs", [_runs(metadata)], "Each has its heads, its cost and a page in its folder."),
            Section("provenance", "Provenance", [Record(metadata)]),
        ],
        record=metadata,
    ).html()


def _runs(metadata: Mapping[str, Any]) -> Group:
    rows = [
        (str(run["folder"]), "", [str(run["model"]["name"]), str(run["data"]["task"]), f"{run['cost']['seconds']:.0f}"])
        for run in metadata.get("runs", [])
    ]
    return Group([Table(rows, ["Folder", "Model", "Task", "Seconds"], "Runs by folder")], "texts")


def _interval(low: float, high: float) -> str:
    return "–" if math.isnan(low) else f"{labels.number(low, 2)} to {labels.number(high, 2)}"


def _scores(outcome: Outcome, majority: float | None) -> list[Section]:
    has_bars = outcome.scores["seed"].nunique() > 1 or outcome.units != "seeds"
    bars = f"Bars: 95 % intervals over {outcome.units} (Student’s t). {_trained_once(outcome)}" if has_bars else ""
    description = (
        f"{bars}From the original model (left) to all heads constant (right); head ranking “{outcome.ranking}”."
    )
    drops = f"{_DROPS} Constants “{outcome.constants}”, ranking “{outcome.ranking}”."
    lines, orders = charts.score_panels(outcome), charts.order_panels(outcome)
    operations = _by_task(outcome, outcome.operations, "Operation", "all heads")
    return [
        Section("scores", "Score by fraction of dynamic heads", [Panels(lines, "scores")], description),
        Section("drops", "Drop", [_drops_table(outcome)], drops),
        Section("operations", "Other operations", [operations], _OPERATIONS),
        _sources(outcome, majority),
        Section("orders", "Head rankings", [Panels(orders, "orders")], f"{bars}Constants “{outcome.constants}”."),
    ]


def _trained_once(outcome: Outcome) -> str:
    """Say what no seed varies, of scores of probes: what was trained before them; empty if nothing was."""
    scores = outcome.scores
    parts = (
        ("gates", scores["rank_heads_by"].isin(list(GATED))),
        ("trained constants", scores["constants"].isin(list(TRAINED))),
    )
    names = [name for name, rows in parts if rows.any()]
    if not names or scores["seed"].nunique() < 2:
        return ""
    return f"They are of the probes alone: {' and '.join(names)} were trained once, with seed 0. "


def _drops_table(outcome: Outcome) -> Table:
    """Make a table of drops by task and fraction, with the mean over tasks with a drop in percent."""
    drops = outcome.main
    fractions = sorted({float(fraction) for fraction in drops["dynamic_fraction"]}, reverse=True)
    table_rows = []
    for (model, task, metric), rows in drops.groupby(GROUP, sort=False):
        by_fraction = {float(row.dynamic_fraction): words.row_drop(row) for row in rows.itertuples()}
        note = f"{words.metric(str(metric))}, original {labels.number(float(rows['original'].iloc[0]), 3)}"
        name = words.title(outcome, str(model), str(task))
        table_rows.append((name, note, [by_fraction.get(fraction, "–") for fraction in fractions]))
    percent = drops[(drops["unit"] == "%") & drops["drop"].notna()]
    pairs = percent[["model", "task"]].drop_duplicates()
    if len(pairs) > 1:
        means = percent.groupby("dynamic_fraction")["drop"].mean()
        cells = [words.drop(float(means.get(fraction, float("nan"))), "%") for fraction in fractions]
        table_rows.append(("Mean", f"of {words.count_pairs(pairs)}", cells))
    head = ["Dynamic heads", *(fraction_name(fraction) for fraction in fractions)]
    return Table(table_rows, head, "Relative drop by task and fraction")


def _sources(outcome: Outcome, majority: float | None) -> Section:
    """Make a table of scores by source of constants and task, with the fewest dynamic heads; empty for one source.

    Below it stands the score of the best single label, if it is known.
    """
    drops = outcome.drops[outcome.drops["rank_heads_by"] != ATTENTION]
    fewest = drops["dynamic_fraction"].min() if len(drops) else 1.0
    drops = drops[drops["dynamic_fraction"] == fewest]
    if drops["constants"].nunique() < 2:
        drops = drops.iloc[:0]
    drops = drops.assign(other=drops["rank_heads_by"] != outcome.ranking).sort_values("other", kind="stable")
    drops = drops.drop_duplicates([*GROUP, "constants"]).sort_index()
    about = (
        f"Mean score ± 95 % over {outcome.units} with {words.describe_fraction(float(fewest))}, and the relative drop."
    )
    table = _by_task(outcome, drops, "Constants", "no head constant")
    if majority is not None and len(drops):
        rows = [*table.rows, ("majority", "the best single label", [labels.number(majority, 3)])]
        table = replace(table, rows=rows)
    return Section("sources", "Sources of constants", [table], about)


def _by_task(outcome: Outcome, drops: pd.DataFrame, column: str, original: str) -> Table:
    by_task = dict(list(drops.groupby(GROUP, sort=False)))
    means = intervals(outcome.scores).set_index(KEYS)
    margins = (means["ci_high"] - means["mean"]).to_dict()
    originals = means[means.index.get_level_values("dynamic_fraction") == 1].groupby(GROUP, sort=False).head(1)
    of_original = {key[:3]: margins[key] for key in originals.index}

    first = [
        labels.with_margin(float(rows["original"].iloc[0]), of_original.get(key, math.nan), digits=3)
        for key, rows in by_task.items()
    ]
    table_rows: list[Row] = [("original", original, first)] if by_task else []
    for name, rows in drops.groupby("constants", sort=False):
        by_key = {
            (row.model, row.task, row.metric): (
                f"{labels.with_margin(float(row.score), margins[tuple(getattr(row, key) for key in KEYS)], digits=3)}"
                f" ({words.row_drop(row)})"
            )
            for row in rows.itertuples()
        }
        table_rows.append((str(name), "", [by_key.get(key, "–") for key in by_task]))
    head = [column, *(words.title(outcome, model, task) for model, task, _ in by_task)]
    return Table(table_rows, head, f"Scores by {column.lower()} and task")


def _patterns(heads: pd.DataFrame) -> Table:
    counts = pattern_counts(heads)
    rows = [(name, "", [str(count), f"{labels.number(100 * share, 3)} %"]) for name, count, share in counts]
    return Table(rows, ["Pattern", "Heads", "Share"], "Pattern", bars=[100 * share for _, _, share in counts])


def _both(metadata: Mapping[str, Any]) -> str:
    """Describe the shares of heads with a diagonal and on special tokens, if recorded."""
    patterns = labels.section(metadata, "patterns")
    texts = {
        "has_diagonal": "have a diagonal brighter than its neighborhood",
        "on_special": "have more than half of their mass in the columns of special tokens",
    }
    parts = [
        f"{labels.number(100 * float(patterns[key]), 3)} % of the heads {text}"
        for key, text in texts.items()
        if isinstance(patterns.get(key), (int, float))
    ]
    both = "a head may do both; the table has each head once, by what exceeds a uniform row most"
    return f"{', '.join(parts)} ({both})." if parts else ""


def _cost(cost: pd.DataFrame) -> list[Group]:
    if cost.empty:
        return []
    rows = []
    for row in words.relative_cost(cost).to_dict("records"):
        latency, work = labels.number(row["latency_ms"], 3), labels.number(row["flops"] / 1e9, 3)
        percentages = [words.time_share(row), f"{labels.number(row['work'], 3)} %"]
        rows.append((fraction_name(row["dynamic_fraction"]), "", [latency, percentages[0], work, percentages[1]]))
    head = ["Dynamic heads", "Milliseconds", "of the original", "GFLOPs", "of the original"]
    table = Table(rows, head, "Time and FLOPs of a forward pass by fraction")
    return [Group([table, Panels(charts.cost_panels(cost), "cost")], "beside")]


def _batch(metadata: Mapping[str, Any]) -> str:
    cost = labels.section(metadata, "cost")
    texts = {"batch_size": "batch size {}", "length": "{} tokens", "device": "on {}"}
    parts = [text.format(cost[key]) for key, text in texts.items() if cost.get(key)]
    about = (
        " Fractions take turns; in brackets the middle half of the rounds. FLOPs count neither the softmax nor the "
        "memory that scores go through, so time may fall further."
    )
    return labels.join(["Forward pass, median of repetitions", ", ".join(parts)], ": ") + "." + about
