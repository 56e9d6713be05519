"""Report on a pre-training run as one self-contained HTML file."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from regard.commands.pretrain import charts, words
from regard.report import labels
from regard.report.page import Command, Heading, Maps, Page, Panels, Part, Record, Section, Table, Text
from regard.report.panels import thinning_note

_SHOWN = ("config", "config_defaults", "data", "command_line", "final", "emergence", "name")
"""The metadata that other sections show."""
_SINKS = (
    "On held-out text. α₀ is a head’s mean attention on the first token, at position 0; Sink₀ is the share of heads × "
    "samples whose α₀ is above ε. Gu et al. 2025, who count from 1, write α₁ and Sink₁."
)
_MAPS = "Mean over the measured samples, by layer and head; the slider selects an earlier step."
_POSITIONS = (
    "The share of heads × samples whose mean attention on a position is above ε. "
    "The last positions are means over few queries and may pass it without a sink."
)
_NORMS = "|h₀| over the mean of |hₜ|, t > 0: the L2 norm of the first token’s hidden state against the others’."
_COMMAND = "regard pretrain --config results.json"
_AGAIN = (
    "results.json of this run holds every field of the recipe; the same data, seed and versions give this run again."
)
_NUMBERS = ("weight", "train_tokens", "valid_tokens")


def pretrain_page(history: pd.DataFrame, sinks: pd.DataFrame, metadata: dict[str, Any]) -> str:
    """Return the report as one self-contained HTML file."""
    losses, sinks_by_step = charts.loss_panels(history), charts.sink_panels(history, metadata)
    norms, positions = charts.norm_panels(history, sinks), charts.position_panels(sinks)
    rest = {key: value for key, value in metadata.items() if key not in _SHOWN}
    note = thinning_note([len(history)], "history.parquet")
    return Page(
        eyebrow="Regard · pre-training",
        title=words.name(metadata),
        ledes=words.ledes(history, metadata),
        key_figures=words.key_figures(history, metadata),
        sections=[
            Section("loss", "Loss", [Panels(losses, "loss", fit=True)], note),
            Section("sinks", "Sinks while they emerge", [Panels(sinks_by_step, "sinks", fit=True)], _SINKS),
            Section("maps", "Sink map", [Maps(charts.maps(sinks))], _MAPS),
            Section("positions", "Every position", [Panels(positions, "positions", fit=True)], _POSITIONS),
            Section("norms", "Norm of the first token", [Panels(norms, "norms", fit=True)], _NORMS),
            Section("recipe", "Recipe", _recipe(metadata)),
            Section("data", "Data", _data(metadata)),
            Section("again", "How to run it again", [Command(str(metadata.get("command_line") or _COMMAND))], _AGAIN),
            Section("provenance", "Provenance", [Record(rest)]),
        ],
        record=metadata,
    ).html()


def _recipe(metadata: Mapping[str, Any]) -> list[Part]:
    """Make a table of the fields that differ from the preset, then list the others."""
    config = labels.section(metadata, "config")
    if not config or "config_defaults" not in metadata:
        return [Record(config)]
    base = labels.section(metadata, "config_defaults")
    unchanged = {field: value for field, value in config.items() if field in base and base[field] == value}
    changed = {field: [value, base.get(field)] for field, value in config.items() if field not in unchanged}
    rows = [(field.replace("_", " "), "", list(map(labels.format_value, values))) for field, values in changed.items()]
    table = Table(rows, ["Differs from the base recipe", "Here", "Base recipe"], "Changed fields")
    return [
        table if rows else Text("Every field is the base recipe’s."),
        Heading("As in the base recipe" if unchanged else ""),
        Record(unchanged),
    ]


def _data(metadata: Mapping[str, Any]) -> list[Part]:
    data = labels.section(metadata, "data")
    rows = [_domain(domain) for domain in data.get("domains") or [] if isinstance(domain, Mapping)]
    head = ["Domain", "Weight", "Training tokens", "Validation tokens", "Of them in training", "Passes", "SHA-256"]
    return [Table(rows, head, "Domains"), Record({key: value for key, value in data.items() if key != "domains"})]


def _domain(domain: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    weight, *counts = (labels.metadata_number({"domain": domain}, "domain", key) for key in _NUMBERS)
    cells = ["–" if weight is None else labels.number(weight, 3)]
    cells += ["–" if count is None else labels.format_count(count) for count in counts]
    repeated, passes = (labels.metadata_number({"domain": domain}, "domain", key) for key in ("repeated", "passes"))
    cells.append("–" if repeated is None else f"{labels.number(100 * repeated, 2)} %")
    cells.append("–" if passes is None else labels.number(passes, 3))
    name, source, sha256 = (str(domain.get(key) or "") for key in ("name", "source", "sha256"))
    return name, source, [*cells, sha256[:12] or "–"]
