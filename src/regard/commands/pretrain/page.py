"""One pre-training run as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.pretrain import charts as pretrain_charts
from regard.commands.pretrain import words
from regard.commands.pretrain.curves import check_history
from regard.report import html as markup
from regard.report import labels
from regard.report.page import assemble
from regard.report.panels import Panel, specifications, thinning_note
from regard.report.words import format_count


def pretrain_page(history: pd.DataFrame, sinks: pd.DataFrame, record: dict[str, Any]) -> str:
    """The report as one self-contained HTML file: it fetches nothing.

    The tables follow the schema of `history.parquet` and `sinks.parquet`, `record` that of `results.json`, to which
    it may add `config_defaults` (the fields of the preset) and `command_line`. What is empty or was not
    watched is not shown. Raises UserError on a history that is empty or lacks a column.
    """
    check_history(history)
    title = words.name(record)
    panels = {
        "loss": pretrain_charts.loss_panels(history),
        "sinks": pretrain_charts.sink_panels(history, record),
        "norms": pretrain_charts.norm_panels(history, sinks),
        "positions": pretrain_charts.position_panels(sinks),
    }
    maps = pretrain_charts.maps(sinks)
    top = markup.header(
        "Regard · pre-training", title, words.ledes(history, record), words.key_figures(history, record)
    )
    note = thinning_note([len(history)], "history.parquet")
    body = "".join(
        [
            top,
            "<main>",
            markup.section("loss", "Loss", _figures("loss", panels), note),
            markup.section("sinks", "Sinks while they emerge", _figures("sinks", panels), _SINKS),
            markup.section("maps", "Sink map", markup.step_maps(maps), _MAPS),
            markup.section("positions", "Every position", _figures("positions", panels), _POSITIONS),
            markup.section("norms", "Norm of the first token", _figures("norms", panels), _NORMS),
            markup.section("recipe", "Recipe", _config(record)),
            markup.section("data", "Data", _data(record)),
            markup.section(
                "again", "How to run it again", markup.command(str(record.get("command_line") or _COMMAND)), _AGAIN
            ),
            markup.section("provenance", "Provenance", markup.provenance(_rest(record))),
            "</main>",
            markup.footer(record),
        ]
    )
    data = {"panels": {key: found for key, found in panels.items() if found}, "maps": maps}
    return assemble(
        f"{title} · Regard", body, data, specifications=specifications(), script=markup.asset("training.js")
    )


def _figures(key: str, panels: Mapping[str, list[Panel]]) -> str:
    return markup.panels(key, panels[key], fit=True)


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


def _config(record: Mapping[str, Any]) -> str:
    """The fields that differ from the base recipe as a table, then all others."""
    recipe = labels.section(record, "config")
    if "config_defaults" not in record:
        return markup.provenance(recipe) if recipe else ""
    base = labels.section(record, "config_defaults")
    changed = {field: value for field, value in recipe.items() if field not in base or base[field] != value}
    same = {field: value for field, value in recipe.items() if field not in changed}
    rows = [
        (field.replace("_", " "), "", [markup.in_words(value), markup.in_words(base.get(field))])
        for field, value in changed.items()
    ]
    table = markup.values_table(["Differs from the base recipe", "Here", "Base recipe"], rows, "Changed fields")
    first = table if rows else '<p class="about">Every field is the base recipe’s.</p>'
    rest = f"<h3>As in the base recipe</h3>{markup.provenance(same)}" if same else ""
    return first + rest if recipe else ""


def _data(record: Mapping[str, Any]) -> str:
    """The domains as a table, then the tokenizer."""
    told = labels.section(record, "data")
    rows = [_domain(one) for one in told.get("domains") or [] if isinstance(one, Mapping)]
    head = ["Domain", "Weight", "Training tokens", "Validation tokens", "SHA-256"]
    table = markup.values_table(head, rows, "Domains") if rows else ""
    rest = {key: value for key, value in told.items() if key != "domains"}
    return table + (markup.provenance(rest) if rest else "")


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
