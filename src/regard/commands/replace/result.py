"""The result of `regard replace`, to and from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
import safetensors.torch
from torch import Tensor

from regard.commands.replace.figure import replace_figure
from regard.commands.replace.page import replace_page
from regard.commands.replace.scores import COLUMNS as SCORE_COLUMNS
from regard.commands.replace.scores import intervals, relative_drop
from regard.commands.replace.terminal import replace_summary
from regard.errors import UserError
from regard.runs.result import RunResult
from regard.statistics.table import select_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

HEADS, CONSTANTS = "heads.json", "constants.safetensors"
HEAD_COLUMNS = ("site", "layer", "head", "rank", "value", "pattern")
COST_COLUMNS = ("dynamic_fraction", "latency_ms", "flops")

__all__ = ["COST_COLUMNS", "HEAD_COLUMNS", "SCORE_COLUMNS", "ReplaceResult", "intervals", "relative_drop"]


@dataclass(frozen=True)
class ReplaceResult(RunResult):
    """Scores, the order of the heads, costs, and where they come from. `docs/design.md` describes them.

    Attributes:
        scores: One row for each score (`SCORE_COLUMNS`). Rows with a `dynamic_fraction` of 1 are the untouched model,
            with "none" for constants and rank_heads_by. Rows of another operation have its name for constants,
            "attention" for rank_heads_by, and a fraction of 0.
        heads: One row for each head (`HEAD_COLUMNS`); that of rank 0 stays dynamic longest.
        cost: One forward pass of a batch at each fraction (`COST_COLUMNS`).
        metadata: Where the numbers come from.
        matrices: The constants, of shape (head, query, key), by "site.layer".
        constants: The same as the bytes of their file.
    """

    command: ClassVar[str] = "replace"
    tables: ClassVar[Mapping[str, str]] = {"scores": "scores", "cost": "cost"}

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
        return replace_summary(self.scores, self.heads, self.cost, self.metadata)

    def page(self) -> str:
        return replace_page(self.scores, self.heads, self.cost, self.metadata, self.matrices)

    def write_artifacts(self, folder: Path) -> None:
        """Write the order of the heads, and the constants if there are any."""
        text = json.dumps(self._order(), ensure_ascii=False, allow_nan=False)
        (folder / HEADS).write_text(text + "\n", encoding="utf-8")
        if self.constants is not None:
            (folder / CONSTANTS).write_bytes(self.constants)

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Read what `write_artifacts` wrote."""
        heads = _heads(json.loads((folder / HEADS).read_text(encoding="utf-8")))
        if CONSTANTS not in metadata["files"]:
            return {"heads": heads}
        constants = (folder / CONSTANTS).read_bytes()
        return {"heads": heads, "constants": constants, "matrices": dict(_matrices(constants))}

    def _order(self) -> dict[str, Any]:
        """The heads, most dynamic first, as `heads.json` holds them."""
        heads = self.heads.sort_values("rank", kind="stable")
        places = zip(heads["site"], heads["layer"], heads["head"], strict=True)
        rankings = self.metadata["config"]["rank_heads_by"]
        return {
            "rank_heads_by": rankings[0] if rankings else None,  # the order of `heads`
            "order": [[str(site), int(layer), int(head)] for site, layer, head in places],
            "value": [_number(value) for value in heads["value"]],
            "pattern": [None if pd.isna(pattern) else str(pattern) for pattern in heads["pattern"]],
        }


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
