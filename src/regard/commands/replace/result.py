"""Frozen records of what came of replacing heads, to and from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import safetensors
import safetensors.torch
from torch import Tensor

from regard.commands.replace.figure import replace_figure
from regard.commands.replace.page import replace_page
from regard.commands.replace.scores import COLUMNS as SCORE_COLUMNS
from regard.commands.replace.scores import intervals, relative_drop
from regard.commands.replace.terminal import replace_summary
from regard.errors import UserError
from regard.runs.output_dir import RESULTS, atomic_folder, command_of
from regard.runs.result import PAGE
from regard.statistics.table import select_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

SCORES, HEADS, COST, CONSTANTS = "scores.parquet", "heads.json", "cost.parquet", "constants.safetensors"
HEAD_COLUMNS = ("site", "layer", "head", "rank", "value", "pattern")
COST_COLUMNS = ("dynamic_fraction", "latency_ms", "flops")

__all__ = ["COST_COLUMNS", "HEAD_COLUMNS", "SCORE_COLUMNS", "ReplaceResult", "intervals", "relative_drop"]


@dataclass(frozen=True)
class ReplaceResult:
    """What one run of replacing heads gave: scores, the order of the heads, costs, and where they come from.

    `scores` (`SCORE_COLUMNS`) has one row a run; rows with a `dynamic_fraction` of 1 are the untouched model, with
    "none" for constants and rank_heads_by; those of another operation have its name for constants, "attention" for
    rank_heads_by, and a fraction of 0. `heads` (`HEAD_COLUMNS`) has one row a head, `rank` 0 being kept dynamic
    longest. `cost` (`COST_COLUMNS`) is one forward of a batch at each fraction. `metadata` is the provenance,
    `matrices` the constants (head, query, key) by "site.layer", `constants` the same as the bytes of their file.
    """

    scores: pd.DataFrame
    heads: pd.DataFrame
    cost: pd.DataFrame
    metadata: dict[str, Any]
    matrices: dict[str, Tensor] = field(default_factory=dict)
    constants: bytes | None = None

    def frame(self, **equal: Any) -> pd.DataFrame:
        """The scores, and of these only those where a column equals a value, or one of several, or is null (None).

        `r.frame(task="sst2", dynamic_fraction=0)` are the scores with all heads constant.
        """
        return select_rows(self.scores, None, equal)

    def constant_heads(self, dynamic_fraction: float) -> list[tuple[str, int, int]]:
        """The heads (site, layer, head) that are constant where this fraction stays dynamic, in the run's order.

        As `regard.replacing` and `regard.replaced` take them. Raises UserError for a fraction outside 0 to 1.
        """
        if not 0 <= dynamic_fraction <= 1:
            raise UserError(f"dynamic-fraction: expected a number from 0 to 1, got {dynamic_fraction}")
        ordered = self.heads.sort_values("rank")
        rows = ordered.iloc[round(dynamic_fraction * len(ordered)) :]
        return sorted((str(row.site), int(row.layer), int(row.head)) for row in rows.itertuples())

    def plot(self, kind: Literal["fractions", "orders", "constants"] = "fractions") -> Figure:
        """A figure: scores by fraction for each source of constants, or for each order; or matrices of some heads."""
        return replace_figure(kind, self.scores, self.heads, self.metadata, self.matrices)

    def summary(self) -> RenderableType:
        """The few lines that a terminal shows, for rich's `print`."""
        return replace_summary(self.scores, self.heads, self.cost, self.metadata)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Where it was written: the folder, with record, tables, constants and report page; whole or not at all."""
        with atomic_folder(folder, overwrite=overwrite, verb="replace") as place:
            (place / RESULTS).write_text(_json(self.metadata, indent=2), encoding="utf-8")
            self.scores.to_parquet(place / SCORES, index=False)
            self.cost.to_parquet(place / COST, index=False)
            (place / HEADS).write_text(_json(self._order()), encoding="utf-8")
            if self.constants is not None:
                (place / CONSTANTS).write_bytes(self.constants)
            page = replace_page(self.scores, self.heads, self.cost, self.metadata, self.matrices)
            (place / PAGE).write_text(page, encoding="utf-8")
        return Path(folder)

    def _order(self) -> dict[str, Any]:
        """The heads, most dynamic first, as `heads.json` holds them."""
        heads = self.heads.sort_values("rank", kind="stable")
        places = zip(heads["site"], heads["layer"], heads["head"], strict=True)
        settings = self.metadata.get("settings")
        asked = settings.get("rank_heads_by") if isinstance(settings, Mapping) else None
        return {
            "rank_heads_by": asked[0] if isinstance(asked, (list, tuple)) and asked else asked,  # the order of `heads`
            "order": [[str(site), int(layer), int(head)] for site, layer, head in places],
            "value": [_number(value) for value in heads["value"]],
            "pattern": [None if pd.isna(pattern) else str(pattern) for pattern in heads["pattern"]],
        }

    @classmethod
    def load(cls, folder: str | Path) -> ReplaceResult:
        """What was saved to a folder. Raises UserError if there is nothing, or not whole, or of another verb."""
        folder = Path(folder)
        if not (folder / RESULTS).is_file():
            raise UserError(
                f"no run in {folder}: expected a folder with {RESULTS}, as `regard replace --out` writes it"
            )
        if (verb := command_of(folder / RESULTS)) not in (None, "replace"):
            raise UserError(f"the run in {folder} is one of `regard {verb}`: expected one of `regard replace`")
        if not (folder / SCORES).is_file():
            raise UserError(f"the run in {folder} is not one of replacing heads: expected {SCORES} beside {RESULTS}")
        try:
            record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
            scores, cost = pd.read_parquet(folder / SCORES), pd.read_parquet(folder / COST)
            heads = _heads(json.loads((folder / HEADS).read_text(encoding="utf-8")))
            constants = (folder / CONSTANTS).read_bytes() if (folder / CONSTANTS).exists() else None
            matrices = dict(_matrices(constants)) if constants is not None else {}
        except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise UserError(f"the run in {folder} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(record, dict):
            raise UserError(f"the run in {folder} cannot be read: {RESULTS} holds no record")
        for name, table, columns in ((SCORES, scores, SCORE_COLUMNS), (COST, cost, COST_COLUMNS)):
            missing = [column for column in columns if column not in table]
            if missing:
                raise UserError(f"the run in {folder} cannot be read: {name} lacks {', '.join(missing)}")
        return cls(scores, heads, cost, record, matrices, constants)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _number(value: Any) -> float | None:
    return None if pd.isna(value) or not math.isfinite(value) else float(value)


def _heads(told: Mapping[str, Any]) -> pd.DataFrame:
    """The table of heads from `heads.json`."""
    rows = [
        (site, layer, head, rank, value, pattern)
        for rank, ((site, layer, head), value, pattern) in enumerate(
            zip(told["order"], told["value"], told["pattern"], strict=True)
        )
    ]
    table = pd.DataFrame(rows, columns=list(HEAD_COLUMNS))
    return table.astype({"layer": "int64", "head": "int64", "rank": "int64", "value": "float64"})


def _matrices(constants: bytes) -> Iterator[tuple[str, Tensor]]:
    """The matrices of the constants' file, where they are named "site.layer.matrix", by "site.layer"."""
    for name, tensor in safetensors.torch.load(constants).items():
        place, _, what = name.rpartition(".")
        if what == "matrix":
            yield place, tensor
