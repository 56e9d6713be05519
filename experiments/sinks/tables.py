"""The stored tables of the sink experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.claims import format_interval
from experiments.common.comparison import mean_of, paired, where
from experiments.common.parts import RESULTS
from experiments.sinks.run import BASE, COLUMNS, CURVES, RECORD, ROWS, TABLE
from regard.commands.pretrain.config import preset_config
from regard.errors import UserError
from regard.runs.intervals import Interval

BASELINE = "softmax"
ACTIVATIONS = "sinks-activations.csv"
SINKING, SINKLESS = "with a sink", "without"
"""Heads whose first token is a sink, and the others."""
SINK = 5.0
"""Per cent of heads × samples from which on a rate counts as a sink, as for the step of emergence."""
INPUTS = ("fixed_token", "random_tokens", "data", "length")
"""Fields that change the sequences a model reads."""
STAR = r"\*"
"""Marks rates measured on |A| / Σ|A|, where weights are no distribution."""
PROXIED = ("sink_rate", "sink_rate_max", "alpha_first", "virtual_sink_rate")


@dataclass(frozen=True)
class Tables:
    """The final numbers of all runs (`COLUMNS`), mean curves by row, the changes of each row, and the record.

    `activations` are those of `experiments.sinks.activations`; None: it was not run.
    """

    ends: pd.DataFrame
    curves: pd.DataFrame
    changes: Mapping[str, Mapping[str, Any]]
    record: Mapping[str, Any]
    activations: pd.DataFrame | None = None

    @classmethod
    def load(cls, folder: Path = RESULTS) -> Tables:
        """Read the tables of a folder. Raises UserError if one is missing or lacks a column."""
        missing = [name for name in (TABLE, CURVES, RECORD) if not (folder / name).is_file()]
        if missing:
            raise UserError(f"no runs in {folder}: expected {TABLE}, {CURVES} and {RECORD}; missing: {missing[0]}")
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        ends = pd.read_csv(folder / TABLE)
        lacking = [name for name in COLUMNS if name not in ends]
        if lacking:
            raise UserError(f"{TABLE}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(lacking)}")
        activations = pd.read_csv(folder / ACTIVATIONS) if (folder / ACTIVATIONS).is_file() else None
        return cls(ends, pd.read_csv(folder / CURVES), record.get("rows", ROWS), record, activations)

    @property
    def rows(self) -> list[str]:
        """The rows with runs."""
        return list(dict.fromkeys(self.ends["row"]))

    @property
    def absent(self) -> list[str]:
        """The planned rows without runs."""
        return [name for name in self.changes if name not in self.rows]

    @property
    def seeds(self) -> int:
        """The planned number of seeds."""
        return int(self.record.get("seeds") or self.ends["seed"].nunique())

    @property
    def epsilon(self) -> float:
        """The threshold of the sink rates."""
        return float(self.record["watch"]["epsilon"])

    @property
    def length(self) -> int:
        """Tokens of a sequence on which sinks are measured."""
        return int(self.record["watch"]["length"])

    @property
    def judged_streams(self) -> Sequence[str]:
        """The one text that all runs read."""
        return ("novels",)

    def has_row(self, stream: str, row: str) -> bool:
        """Whether a row has runs."""
        return row in self.rows

    def base(self, field: str) -> Any:
        """Return a field of the base recipe."""
        return self.record["recipe"][field]

    def of(self, row: str) -> pd.DataFrame:
        """Return the runs of a row by seed."""
        return self.ends[self.ends["row"] == row].sort_values("seed")

    def changing(self, *fields: str) -> dict[str, Any]:
        """Return the rows with runs that change one of these fields alone, with its value."""
        alone = {row: self.changes[row] for row in self.rows if len(self.changes.get(row, {})) == 1}
        return {row: change[field] for row, change in alone.items() for field in fields if field in change}

    def values(self, row: str, column: str) -> dict[int, float]:
        """Return the values of a column by seed, missing ones left out."""
        runs = self.of(row).dropna(subset=[column])
        return {int(seed): float(value) for seed, value in zip(runs["seed"], runs[column], strict=True)}

    def mean(self, row: str, column: str) -> Interval | None:
        """Return the mean of a column over seeds; None without a value."""
        return mean_of(self.values(row, column))

    def difference(self, row: str, reference: str, column: str) -> Interval | None:
        """Return a column of a row minus that of another, paired by seed; None without a seed in common."""
        return paired(self.values(row, column), self.values(reference, column))

    def activation(self, row: str, heads: str, column: str) -> dict[int, float]:
        """Return a column of the activations of some heads by seed, without seeds that have no such heads."""
        if self.activations is None:
            return {}
        found = where(self.activations, row=row, heads=heads)
        return {int(seed): float(value) for seed, value in zip(found["seed"], found[column], strict=True)}

    def has_sink(self, row: str, column: str = "sink_rate") -> list[bool]:
        """Return for each seed whether a rate counts as a sink."""
        return [value >= SINK for value in self.values(row, column).values()]

    def sink_positions(self, row: str) -> list[int]:
        """Return the strongest position of each seed in which it is a sink."""
        runs = self.of(row)
        return [int(position) for position in runs[runs["sink_rate_max"] >= SINK]["sink_position"]]

    def reference(self, row: str) -> str:
        """Return the row that a loss is compared with: the one with the same inputs and no other change, or softmax."""
        change = self.changes.get(row, {})
        inputs = {field: value for field, value in change.items() if field in INPUTS}
        if inputs and inputs != change:
            rows = [name for name in self.rows if self.changes.get(name) == inputs]
            return rows[0] if rows else BASELINE
        return BASELINE

    def is_comparable(self, row: str) -> bool:
        """Whether a row predicts the same tokens from the same sequences as its reference."""
        change, other = (self.changes.get(name, {}) for name in (row, self.reference(row)))
        ours, theirs = ({field: made[field] for field in INPUTS if field in made} for made in (change, other))
        return ours == theirs and "prefix" not in change

    def spec(self, row: str) -> Any:
        """Return the attention of a row."""
        return preset_config(BASE, **self.changes.get(row, {})).spec

    def is_proxy(self, row: str) -> bool:
        """Whether a row's weights are no distribution, so that its rates are those of a proxy."""
        spec = self.spec(row)
        sums_to_one = spec.normalisation == "sum" and spec.weighting != "linear"  # kernels are starred in the paper
        return spec.weighting not in ("softmax", "softpick") and not sums_to_one


def format_mean(tables: Tables, row: str, column: str, digits: int) -> str:
    """Format the mean over seeds ± half its 95 % interval, with a star where it is that of a proxy."""
    mean = tables.mean(row, column)
    has_star = column in PROXIED and mean is not None and tables.is_proxy(row)
    return format_interval(mean, digits) + (STAR if has_star else "")


def format_positions(positions: Sequence[int]) -> str:
    """Format positions, each once."""
    return ", ".join(str(position) for position in sorted(set(positions)))
