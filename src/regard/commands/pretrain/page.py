"""One pre-training run as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.pretrain import charts, words
from regard.commands.pretrain.curves import check_history
from regard.report import labels
from regard.report.page import Command, Heading, Maps, Page, Panels, Part, Record, Section, Table, Text
from regard.report.panels import thinning_note
from regard.report.words import format_count, format_value


def pretrain_page(history: pd.DataFrame, sinks: pd.DataFrame, record: dict[str, Any]) -> str:
    """Return the report as one self-contained HTML file.

    Args:
        history: Rows in the schema of `history.parquet`.
        sinks: Rows in the schema of `sinks.parquet`; empty where sinks were not watched.
        record: The metadata in `results.json`. It may add `config_defaults` (the preset's fields) and `command_line`.

    Raises:
        UserError: The history is empty or lacks a column.
    """
    check_history(history)
    losses, watched = charts.loss_panels(history), charts.sink_panels(history, record)
    norms, positions = charts.norm_panels(history, sinks), charts.position_panels(sinks)
    note = thinning_note([len(history)], "history.parquet")
    return Page(
        eyebrow="Regard · pre-training",
        title=words.name(record),
        ledes=words.ledes(history, record),
        key_figures=words.key_figures(history, record),
        sections=[
            Section("loss", "Loss", [Panels(losses, "loss", fit=True)], note),
            Section("sinks", "Sinks while they emerge", [Panels(watched, "sinks", fit=True)], _SINKS),
            Section("maps", "Sink map", [Maps(charts.maps(sinks))], _MAPS),
            Section("positions", "Every position", [Panels(positions, "positions", fit=True)], _POSITIONS),
            Section("norms", "Norm of the first token", [Panels(norms, "norms", fit=True)], _NORMS),
            Section("recipe", "Recipe", _recipe(record)),
            Section("data", "Data", _data(record)),
            Section("again", "How to run it again", [Command(str(record.get("command_line") or _COMMAND))], _AGAIN),
            Section("provenance", "Provenance", [Record(_rest(record))]),
        ],
        record=record,
    ).html()


_SINKS = (
    "On held-out text. α₁ is a head’s mean attention on the first token; "
    "Sink₁ is the share of heads × samples whose α₁ is above ε."
)
_MAPS = "Mean over the watched samples, by layer and head; the slider turns to earlier steps."
_POSITIONS = (
    "The share of heads × samples whose mean attention on a position is above ε. "
    "The last positions are means over few queries and may pass it without a sink."
)
_NORMS = "|h₁| over the mean of |hₜ|, t > 1: the L2 norm of the first token’s hidden state against the others’."
_COMMAND = "regard pretrain --config results.json"
_AGAIN = (
    "results.json of this run holds every field of the recipe; the same data, seed and versions give this run again."
)


def _recipe(record: Mapping[str, Any]) -> list[Part]:
    """The fields that differ from the base recipe as a table, then all others."""
    recipe = labels.section(record, "config")
    if not recipe or "config_defaults" not in record:
        return [Record(recipe)]
    base = labels.section(record, "config_defaults")
    same = {field: value for field, value in recipe.items() if field in base and base[field] == value}
    rows = [
        (field.replace("_", " "), "", [format_value(value), format_value(base.get(field))])
        for field, value in recipe.items()
        if field not in same
    ]
    table = Table(rows, ["Differs from the base recipe", "Here", "Base recipe"], "Changed fields")
    return [
        table if rows else Text("Every field is the base recipe’s."),
        Heading("As in the base recipe" if same else ""),
        Record(same),
    ]


def _data(record: Mapping[str, Any]) -> list[Part]:
    """The domains as a table, then the tokenizer."""
    data = labels.section(record, "data")
    rows = [_domain(domain) for domain in data.get("domains") or [] if isinstance(domain, Mapping)]
    head = ["Domain", "Weight", "Training tokens", "Validation tokens", "SHA-256"]
    return [Table(rows, head, "Domains"), Record({key: value for key, value in data.items() if key != "domains"})]


def _domain(one: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    counts = [one.get(key) for key in ("train_tokens", "valid_tokens")]
    shown = [format_count(float(count)) if isinstance(count, (int, float)) else "–" for count in counts]
    weight = one.get("weight")
    share = labels.number(float(weight), 3) if isinstance(weight, (int, float)) else "–"
    return str(one.get("name", "")), str(one.get("source") or ""), [share, *shown, str(one.get("sha256") or "–")[:12]]


_SHOWN = ("config", "config_defaults", "data", "command_line", "final", "emergence", "name")


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """What no other section shows."""
    return {key: value for key, value in record.items() if key not in _SHOWN}
