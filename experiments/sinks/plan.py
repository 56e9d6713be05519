"""The runs of the sink experiment, row by row, and what is told of them in numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.sinks.run import BASE, COLUMNS, CURVES, RECORD, ROWS, TABLE
from regard.commands.pretrain.config import preset_config
from regard.commands.sweep.means import Difference, difference, mean
from regard.errors import UserError
from regard.runs.intervals import t_value

BASELINE = "softmax"
SINK = 5.0
"""The percentage of heads × samples from which on a sink rate is called a sink, as where emergence is told."""
INPUTS = ("fixed_token", "random_tokens", "data", "length")
"""What changes the sequences that a model reads."""
STAR = r"\*"
"""Marks what was measured on a distribution made of weights that are none."""
NO_NUMBER = "–"


@dataclass(frozen=True)
class Runs:
    """The ends of all runs (`COLUMNS`), one row a run; the mean curves of each row; what each row changed; the rest.

    `record` is what `experiments.sinks.run` keeps of the recipe of the row softmax, its model, data and watch, with
    the number of seeds that were asked for.
    """

    ends: pd.DataFrame
    curves: pd.DataFrame
    changes: Mapping[str, Mapping[str, Any]]
    record: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Runs:
        """What the experiment left in a folder. Raises UserError where it is not whole."""
        missing = [name for name in (TABLE, CURVES, RECORD) if not (folder / name).is_file()]
        if missing:
            raise UserError(f"no runs in {folder}: expected {TABLE}, {CURVES} and {RECORD}; missing: {missing[0]}")
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        ends = pd.read_csv(folder / TABLE)
        lacking = [name for name in COLUMNS if name not in ends]
        if lacking:
            raise UserError(f"{TABLE}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(lacking)}")
        return cls(ends, pd.read_csv(folder / CURVES), record.get("rows", ROWS), record)

    @property
    def rows(self) -> list[str]:
        """The rows of which there is a run, in their order."""
        return list(dict.fromkeys(self.ends["row"]))

    @property
    def absent(self) -> list[str]:
        """The rows that were asked for and of which there is no run."""
        return [name for name in self.changes if name not in self.rows]

    @property
    def seeds(self) -> int:
        """How many seeds were asked for; where the record does not say, how many any row has."""
        return int(self.record.get("seeds") or self.ends["seed"].nunique())

    @property
    def epsilon(self) -> float:
        """The threshold of the sink rates."""
        return float(self.record["watch"]["epsilon"])

    @property
    def length(self) -> int:
        """Tokens of a sequence on which sinks are measured."""
        return int(self.record["watch"]["length"])

    def base(self, field: str) -> Any:
        """A field of the recipe that the rows change."""
        return self.record["recipe"][field]

    def of(self, row: str) -> pd.DataFrame:
        """The runs of a row, by seed."""
        return self.ends[self.ends["row"] == row].sort_values("seed")

    def changing(self, *fields: str) -> dict[str, Any]:
        """The finished rows that change one of these fields and no other, with the value of that field."""
        alone = {row: self.changes[row] for row in self.rows if len(self.changes.get(row, {})) == 1}
        return {row: change[field] for row, change in alone.items() for field in fields if field in change}

    def values(self, row: str, column: str) -> list[float]:
        """The numbers of a column, one a seed; those that are missing left out."""
        return [float(value) for value in self.of(row)[column].dropna()]

    def over(self, row: str, column: str = "sink_rate") -> list[bool]:
        """For each seed, whether a rate makes a sink."""
        return [value >= SINK for value in self.values(row, column)]

    def where(self, row: str) -> list[int]:
        """The strongest position of each seed in which it is a sink."""
        found = self.of(row)
        return [int(position) for position in found[found["sink_rate_max"] >= SINK]["sink_position"]]

    def reference(self, row: str) -> str:
        """What a row's loss is compared with: the row that changes its inputs alike and nothing else, else softmax."""
        change = self.changes.get(row, {})
        inputs = {field: value for field, value in change.items() if field in INPUTS}
        if inputs and inputs != change:
            alike = [name for name in self.rows if self.changes.get(name) == inputs]
            return alike[0] if alike else BASELINE
        return BASELINE

    def comparable(self, row: str) -> bool:
        """Whether a row predicts the same tokens from the same sequences as its reference."""
        change, other = (self.changes.get(name, {}) for name in (row, self.reference(row)))
        ours, theirs = ({field: made[field] for field in INPUTS if field in made} for made in (change, other))
        return ours == theirs and "prefix" not in change

    def more(self, row: str, than: str, column: str) -> Difference | None:
        """How much more of a column a row has, over the seeds that both have; None where there are none.

        The interval is Student's t over the differences seed by seed; NaN for one seed.
        """
        ours, theirs = (self.of(name).dropna(subset=[column]) for name in (row, than))
        common = set(ours["seed"]) & set(theirs["seed"])
        return difference(theirs[theirs["seed"].isin(common)], ours[ours["seed"].isin(common)], column)

    def spec(self, row: str) -> Any:
        """The attention of a row."""
        return preset_config(BASE, **self.changes.get(row, {})).spec

    def starred(self, row: str) -> bool:
        """Whether a row's weights are no distribution, so that its sinks are measured on one made of them."""
        spec = self.spec(row)
        sums_to_one = spec.normalisation == "sum" and spec.weighting != "linear"  # kernels are starred in the paper
        return spec.weighting not in ("softmax", "softpick") and not sums_to_one


def plus_minus(center: float, half: float, digits: int, *, sign: bool = False) -> str:
    """A number with half its interval, and without where there is none."""
    center = round(center, digits) + 0.0  # no "-0.0"
    told = f"{center:{'+' if sign else ''}.{digits}f}"
    return told if math.isnan(half) else f"{told} ± {half:.{digits}f}"


def averaged(runs: Runs, row: str, column: str, digits: int) -> str:
    """The mean over seeds with half its 95 % interval, starred where it is a proxy's; a dash where there is none."""
    found = mean(runs.of(row), column)
    if not found.n:
        return NO_NUMBER
    half = t_value(found.n - 1) * found.error if found.n > 1 else math.nan
    proxied = column in ("sink_rate", "sink_rate_max", "alpha_first", "virtual_sink_rate") and runs.starred(row)
    return plus_minus(found.value, half, digits) + (STAR if proxied else "")


def differing(found: Difference | None, digits: int) -> str:
    """A difference with half its interval; a dash where there is none."""
    if found is None:
        return NO_NUMBER
    return plus_minus(found.value, (found.high - found.low) / 2, digits, sign=True)


def counted(flags: Sequence[bool]) -> str:
    """In how many of the seeds something is so."""
    return f"{sum(flags)} of {len(flags)} {'seed' if len(flags) == 1 else 'seeds'}"


def listed(words: Iterable[str]) -> str:
    """Words as in "a, b and c"."""
    *before, last = list(words)
    return f"{', '.join(before)} and {last}" if before else last


def by_count(found: Sequence[int]) -> str:
    """Positions, those of several seeds once, as in "0, 3"."""
    return ", ".join(str(position) for position in sorted(set(found)))
