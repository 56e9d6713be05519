"""Result of `regard replace`, its figures and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import pandas as pd
import safetensors.torch
from torch import Tensor

from regard.commands.replace.charts import Picture, order_panels, pictures, score_panels
from regard.commands.replace.page import replace_page
from regard.commands.replace.scores import ATTENTION, Outcome, intervals
from regard.commands.replace.terminal import replace_summary
from regard.commands.replace.words import brief_loss, describe_fraction
from regard.constants import count_dynamic
from regard.errors import UserError
from regard.report import colors, labels
from regard.report.drawing import draw_panels, grid
from regard.runs.result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

HEADS, CONSTANTS = "heads.json", "constants.safetensors"
HEAD_COLUMNS = ("site", "layer", "head", "rank", "value", "pattern")
COST_COLUMNS = ("dynamic_fraction", "latency_ms", "relative_time", "relative_time_low", "relative_time_high", "flops")
ReplaceKind = Literal["fractions", "orders", "constants"]
ANY_ORDER = "any order"
"""Ranking in figures of a model without dynamic heads."""


@dataclass(frozen=True, repr=False)
class ReplaceResult(RunResult):
    """Scores, head ranking and cost; `docs/files.md` describes the tables.

    Attributes:
        scores: One row per score (`COLUMNS` of `regard.commands.replace.scores`), with "none" for constants and
            rank_heads_by of the original model; other operations stand under constants, with "attention" for
            rank_heads_by and a fraction of 0.
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

    @property
    def _all_tables(self) -> dict[str, pd.DataFrame]:
        return {**super()._all_tables, "heads": self.heads}

    def headline(self) -> str:
        outcome = Outcome(self.scores, self.metadata)
        drops = outcome.main if len(outcome.main) else outcome.operations
        last = drops[drops["dynamic_fraction"] == drops["dynamic_fraction"].min()]
        parts = [brief_loss(outcome, row) for _, row in last.iterrows()]
        fraction = f", {describe_fraction(float(last['dynamic_fraction'].iloc[0]))}" if len(last) else ""
        tasks = labels.join(parts or map(str, self.scores["task"].unique()))
        return f"{labels.model_name(self.metadata)}: {tasks}{fraction}"

    def overview(self) -> pd.DataFrame:
        """Return the mean score over seeds of each task, constants, ranking and fraction, with its 95 % interval."""
        scores = intervals(self.scores)
        return scores if scores["model"].nunique() > 1 else scores.drop(columns="model")

    def constant_heads(self, dynamic_fraction: float) -> list[tuple[str, int, int]]:
        """Return the constant heads (site, layer, head) at a dynamic fraction. Raises UserError outside 0 to 1."""
        if not 0 <= dynamic_fraction <= 1:
            raise UserError(f"dynamic-fraction: expected a number from 0 to 1, got {dynamic_fraction}")
        ordered = self.heads.sort_values("rank")
        rows = ordered.iloc[count_dynamic(dynamic_fraction, len(ordered)) :]
        return sorted((str(row.site), int(row.layer), int(row.head)) for row in rows.itertuples())

    def plot(self, kind: ReplaceKind = "fractions") -> Figure:
        """Draw scores by fraction, a line per source of constants; by head ranking; or matrices of some heads.

        "fractions" and "orders" (PAPA, figure 5) have 95 % intervals. Raises UserError if there is nothing to draw.
        """
        if kind == "constants":
            images = pictures(self.heads, self.matrices)
            if not images:
                raise UserError("there are no constant matrices to draw: expected those of at least one layer")
            return _matrices(images)
        if kind not in get_args(ReplaceKind):
            raise UserError(f"cannot draw {kind!r}: expected one of {', '.join(get_args(ReplaceKind))}")
        draw, needed = score_panels, "scores with constant heads"
        if kind == "orders":
            draw, needed = order_panels, "scores in at least two orders of the heads"
        panels = draw(Outcome(self.scores, self.metadata))
        if not panels:
            raise UserError(f"there are no {kind} to draw: expected {needed}")
        return draw_panels(panels)

    def figures_by_seed(self) -> dict[str, dict[Any, float]]:
        """Return the score of each model of several, task, source, order of heads and fraction, by seed.

        With all heads constant there is no order, so that these figures are those of runs with another one.
        """
        keys = ["task", "metric", "constants", "rank_heads_by", "dynamic_fraction"]
        if self.scores["model"].nunique() > 1:
            keys = ["model", *keys]
        has_order = (self.scores["dynamic_fraction"] != 0) | (self.scores["rank_heads_by"] == ATTENTION)
        scores = self.scores.assign(rank_heads_by=self.scores["rank_heads_by"].where(has_order, ANY_ORDER))
        groups = scores.groupby(keys, sort=False, dropna=False)
        return {
            ", ".join(map(str, key)): dict(zip(rows["seed"], map(float, rows["score"]), strict=True))
            for key, rows in groups
        }

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


def _matrices(images: list[Picture]) -> Figure:
    from matplotlib.colors import PowerNorm

    figure, all_axes = grid(len(images), 4, 2.1, 2.3)
    for axes, image in zip(all_axes, images, strict=True):
        axes.imshow(image.weights, cmap=colors.ramp(), norm=PowerNorm(0.5, vmin=0), interpolation="nearest")
        axes.set_title(f"{image.site} {image.layer}.{image.head}\n{image.pattern}".rstrip(), fontsize=8, loc="left")
        axes.set_xticks([])
        axes.set_yticks([])
    return figure
