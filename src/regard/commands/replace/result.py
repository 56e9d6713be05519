"""Result of `regard replace`, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
    """Scores, head ranking and cost; `docs/design.md` describes the tables.

    Attributes:
        scores: One row per score (`SCORE_COLUMNS`). Rows with a `dynamic_fraction` of 1 are the original model, with
            "none" for constants and rank_heads_by. Rows of another operation have its name for constants, "attention"
            for rank_heads_by, and a fraction of 0.
        heads: One row per head (`HEAD_COLUMNS`); rank 0 stays dynamic longest.
        cost: One forward pass of a batch at each fraction (`COST_COLUMNS`).
        metadata: Provenance of the results.
        matrices: Constants of shape (head, query, key), by "site.layer".
        constants: Bytes of the file of constants.
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
        """Return scores, filtered by column: `result.frame(task="sst2", dynamic_fraction=0)`; None is null."""
        return select_rows(self.scores, None, equal)

    def constant_heads(self, dynamic_fraction: float) -> list[tuple[str, int, int]]:
        """Return the heads (site, layer, head) that are constant at a dynamic fraction, in the run's ranking.

        Use them with `regard.replacing` and `regard.replaced`. Raises UserError for a fraction outside 0 to 1.
        """
        if not 0 <= dynamic_fraction <= 1:
            raise UserError(f"dynamic-fraction: expected a number from 0 to 1, got {dynamic_fraction}")
        ordered = self.heads.sort_values("rank")
        rows = ordered.iloc[round(dynamic_fraction * len(ordered)) :]
        return sorted((str(row.site), int(row.layer), int(row.head)) for row in rows.itertuples())

    def plot(self, kind: Literal["fractions", "orders", "constants"] = "fractions") -> Figure:
        """Plot scores by fraction for each source of constants or ranking, or matrices of some heads."""
        return replace_figure(kind, self.scores, self.heads, self.metadata, self.matrices)

    def summary(self) -> RenderableType:
        return replace_summary(self.scores, self.heads, self.cost, self.metadata)

    def page(self) -> str:
        return replace_page(self.scores, self.heads, self.cost, self.metadata, self.matrices)

    def write_artifacts(self, folder: Path) -> None:
        heads = self.heads.sort_values("rank", kind="stable")
        places = zip(heads["site"], heads["layer"], heads["head"], strict=True)
        rankings = self.metadata["config"]["rank_heads_by"]
        ranking = {
            "rank_heads_by": rankings[0] if rankings else None,  # the order of `heads`
            "order": [[str(site), int(layer), int(head)] for site, layer, head in places],
            "value": [float(value) if pd.notna(value) and math.isfinite(value) else None for value in heads["value"]],
            "pattern": [None if pd.isna(pattern) else str(pattern) for pattern in heads["pattern"]],
        }
        text = json.dumps(ranking, ensure_ascii=False, allow_nan=False)
        (folder / HEADS).write_text(text + "\n", encoding="utf-8")
        if self.constants is not None:
            (folder / CONSTANTS).write_bytes(self.constants)

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        ranking = json.loads((folder / HEADS).read_text(encoding="utf-8"))
        heads = pd.DataFrame(ranking["order"], columns=["site", "layer", "head"])
        heads = heads.assign(rank=range(len(heads)), value=ranking["value"], pattern=ranking["pattern"])
        heads = heads.astype({"layer": "int64", "head": "int64", "rank": "int64", "value": "float64"})
        if CONSTANTS not in metadata["files"]:
            return {"heads": heads}
        constants = (folder / CONSTANTS).read_bytes()
        tensors = safetensors.torch.load(constants).items()
        matrices = {name.removesuffix(".matrix"): tensor for name, tensor in tensors if name.endswith(".matrix")}
        return {"heads": heads, "constants": constants, "matrices": matrices}
