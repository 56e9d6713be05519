"""Sentences, figures and page of a conversion."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.report import labels
from regard.report.labels import format_duration, format_fixed, format_signed, number, pluralize
from regard.report.page import Command, KeyFigure, Page, Panels, Record, Section, Table
from regard.report.panels import Panel, curve, panel
from regard.report.repeats import describe_repeats

STAGES = {
    "untouched": "the model as it was",
    "replaced": "its attention replaced, no weight changed",
    "layers": "each layer matched to the untouched one",
    "model": "trained end to end",
}
"""What is measured, by the name of the stage."""
_LOSS = (
    "Mean over held-out sequences, in nats a token, with 95 % intervals over ten parts of them in their order "
    "(Student’s t; neighbouring sequences are of one subject). The change is paired: each sequence against itself "
    "under the untouched model."
)
_LAYERS = (
    "Squared difference between a layer’s attention output and the untouched layer’s, on the untouched model’s hidden "
    "states, over the mean square of that output: 1 is as far as a layer that gives nothing."
)
PLACES = 3
"""Decimals of a change of the loss, at least."""
_AGAIN = "regard convert MODEL --config results.json"
_SHOWN = ("config", "command_line", "final", "data")


def ledes(stages: pd.DataFrame, metadata: Mapping[str, Any]) -> list[str]:
    """Say what was converted, and what is left of the damage."""
    rows = {row.stage: row for row in stages.itertuples()}
    untouched, last = rows["untouched"], stages.iloc[-1]
    change = _change(last, rows["replaced"])
    steps = int(stages["steps"].sum())
    parts = [
        f"{metadata['config']['attention']} in the place of softmax attention, {pluralize(steps, 'step')} of training.",
        f"Perplexity on held-out text: {number(untouched.perplexity, 3)} untouched, "
        f"{number(rows['replaced'].perplexity, 3)} with the attention replaced, {number(last['perplexity'], 3)} at the "
        f"end. {change}",
        describe_repeats(metadata),
    ]
    return [part for part in parts if part]


def _change(row: Any, replaced: Any) -> str:
    """State the change of the loss at the end only as far as its interval supports it.

    Training explains a lower loss only where replacing alone, which trains nothing, has not lowered it.
    """
    low, high = row["change_low"], row["change_high"]
    values = (-row["change"], -high, -low) if high < 0 else (row["change"], low, high)
    places = labels.interval_decimals((high - low) / 2, low, high, PLACES)
    change, low, high = (format_fixed(value, places) for value in values)
    interval = f"{change} [{low}, {high}] nats a token"
    if row["change_low"] > 0:
        return f"The loss is still above the untouched model’s, by {interval}."
    if row["change_high"] < 0:
        reason = "" if replaced.change_high < 0 else ": it has learnt this text as well"
        return f"The loss is below the untouched model’s, by {interval}{reason}."
    return f"Whether the loss differs from the untouched model’s cannot be told: {interval}."


def stage_lines(stages: pd.DataFrame) -> list[str]:
    """List the stages for a terminal."""
    lines = [f"{'stage':<12}{'steps':>7}{'loss':>9}{'perplexity':>12}{'change':>10}  95 % interval"]
    for row in stages.itertuples():
        change, interval = ("", "") if row.stage == "untouched" else _signed(row._asdict())
        line = f"{row.stage:<12}{row.steps:>7,}{row.loss:>9.3f}{number(row.perplexity, 4):>12}{change:>10}  {interval}"
        lines.append(line.rstrip())
    return lines


def loss_panels(history: pd.DataFrame) -> list[Panel]:
    """Plot the error of the first stage and the loss of the second, with validation."""
    panels: list[Panel] = []
    for stage, caption, column, unit in (
        ("layers", "Matching layers", "relative_error", "relative error, mean over layers"),
        ("model", "Training the model", "loss", "nats per token"),
    ):
        rows = history[history["stage"] == stage] if len(history) else history
        if rows.empty:
            continue
        panels += panel(caption, unit, "step", curve("training", rows, column))
        valid = curve("validation", rows, "valid_loss")
        panels += panel(f"{caption}: validation loss", "nats per token", "step", valid)
    return panels


def layer_panels(layers: pd.DataFrame) -> list[Panel]:
    """Plot the error of each layer before and after the first stage."""
    points = [
        point
        for stage, rows in layers.groupby("stage", sort=False)
        for point in curve(str(stage), rows, "relative_error", axis="layer")
    ]
    return panel("Error by layer", "relative to the untouched output", "layer", points)


def convert_page(stages: pd.DataFrame, layers: pd.DataFrame, history: pd.DataFrame, metadata: dict[str, Any]) -> str:
    """Return the report as one self-contained HTML file."""
    rest = {key: value for key, value in metadata.items() if key not in _SHOWN}
    return Page(
        eyebrow="Regard · conversion",
        title=f"{metadata['model']['name']} with {metadata['config']['attention']}",
        ledes=ledes(stages, metadata),
        key_figures=_key_figures(stages, metadata),
        sections=[
            Section("loss", "Loss on held-out text", [_table(stages)], _LOSS),
            Section("layers", "Each layer", [Panels(layer_panels(layers), "layers", fit=True)], _LAYERS),
            Section("training", "Training", [Panels(loss_panels(history), "training", fit=True)]),
            Section("recipe", "Recipe", [Record(labels.section(metadata, "config"))]),
            Section("data", "Data", [Record(labels.section(metadata, "data"))]),
            Section("again", "How to run it again", [Command(str(metadata.get("command_line") or _AGAIN))]),
            Section("provenance", "Provenance", [Record(rest)]),
        ],
        record=metadata,
    ).html()


def _table(stages: pd.DataFrame) -> Table:
    head = ["Stage", "Steps", "Loss", "95 %", "Perplexity", "Change", "95 % of the change"]
    rows = []
    for row in stages.itertuples():
        is_first = row.stage == "untouched"
        cells = [f"{row.steps:,}", number(row.loss, 4), f"{number(row.loss_low, 4)} – {number(row.loss_high, 4)}"]
        cells.append(number(row.perplexity, 4))
        cells += ["–", "–"] if is_first else _signed(row._asdict())
        rows.append((str(row.stage), STAGES[str(row.stage)], cells))
    return Table(rows, head, "Loss by stage")


def _signed(row: Mapping[Any, Any]) -> tuple[str, str]:
    """Write the change of a stage, and its interval, in equal decimals."""
    low, high = row["change_low"], row["change_high"]
    places = labels.interval_decimals((high - low) / 2, low, high, PLACES)
    change, low, high = (format_signed(value, places) for value in (row["change"], low, high))
    return change, f"{low} to {high}"


def _key_figures(stages: pd.DataFrame, metadata: Mapping[str, Any]) -> list[KeyFigure]:
    last = stages.iloc[-1]
    figures = [
        KeyFigure(f"Perplexity, {row.stage}", number(row.perplexity, 3), STAGES[str(row.stage)])
        for row in stages.itertuples()
    ]
    seconds = labels.metadata_number(metadata, "cost", "seconds")
    change, interval = _signed(last)
    figures.append(KeyFigure("Change of the loss", change, f"{interval} nats a token"))
    if seconds is not None:
        steps = int(stages["steps"].sum())
        figures.append(KeyFigure("Training", format_duration(seconds), pluralize(steps, "step")))
    return figures
