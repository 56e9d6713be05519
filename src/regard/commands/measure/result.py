"""Result of `regard measure`, its figures and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import safetensors.torch
from torch import Tensor

from regard.commands.measure.page import page as measure_page
from regard.commands.measure.terminal import measure_summary
from regard.constants.constants import Head
from regard.errors import UserError
from regard.report import labels
from regard.report.drawing import Kind, draw_statistic, statistic_overview
from regard.runs.result import RunResult
from regard.runs.selection import select_rows
from regard.statistics.table import KEY_HEADS, select_heads, select_statistic, spread_key_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from regard.commands.look.run import LookResult

TOKENS, MATRICES = "tokens.parquet", "mean_attention.safetensors"


@dataclass(frozen=True, repr=False)
class MeasureResult(RunResult):
    """Result of a measurement; `docs/files.md` describes tables and metadata.

    Attributes:
        table: All values, with the columns `regard.statistics.table.COLUMNS`.
        metadata: Provenance of the results.
        tokens: Tokens with sinks (`TOKEN_COLUMNS`); None if `sink_tokens` was not measured.
        matrices: Mean attention of shape (head, query, key) by "site.layer", if `input_dependence` was measured.
    """

    command: ClassVar[str] = "measure"
    tables: ClassVar[Mapping[str, str]] = {"table": "statistics"}

    table: pd.DataFrame
    metadata: dict[str, Any]
    tokens: pd.DataFrame | None = None
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def frame(self, statistic: str | None = None, **equal: Any) -> pd.DataFrame:
        """Return the rows of a statistic by column (None is null): `m.frame("sink_rate", layer=None, position=0)`."""
        return select_rows(select_statistic(self.table, statistic), equal, statistic)

    def heads(
        self,
        statistic: str,
        *,
        below: float | None = None,
        above: float | None = None,
        relative: bool = False,
        **equal: Any,
    ) -> set[Head]:
        """Return the heads whose value of a statistic passes a threshold, as `regard.replacing` takes them.

        Args:
            statistic: One with a value by head.
            below: The value is smaller; None: not asked. One of the two thresholds at least.
            above: The value is larger.
            relative: Thresholds are of the value over the mean of the layer's heads.
            equal: Which rows of the statistic, as in `frame`: `position=0`; by default those of no position.

        Returns:
            Heads (site, layer, head): query heads. Of norms of keys and values, all that read a key/value head.

        Raises:
            UserError: The statistic was not measured or has not just one such value a head, or there is no threshold.
        """
        selected = select_heads(self.frame(statistic), statistic, below, above, relative, {"position": None, **equal})
        return spread_key_heads(selected, self.table) if statistic.startswith(KEY_HEADS) else selected

    def plot(
        self,
        statistic: str | None = None,
        *,
        site: str | None = None,
        epsilon: float | None = None,
        position: int | None = None,
        kind: Kind | None = None,
    ) -> Figure:
        """Draw a statistic as a map (layers × heads), curves over layers, or a profile over positions.

        What is None is the first one possible, the sink rate if measured; a position of None is the whole sequence if
        measured, else the first position. Raises UserError for what the table lacks.
        """
        table = select_statistic(self.table, statistic)
        return draw_statistic(table, site=site, epsilon=epsilon, position=position, kind=kind)

    def headline(self) -> str:
        about = labels.join([f"{self.table['statistic'].nunique()} statistics", labels.samples(self.metadata)])
        return f"{labels.model_name(self.metadata)}: {about}"

    def overview(self) -> pd.DataFrame:
        """Return the mean, smallest and largest value of each statistic."""
        return statistic_overview(self.table)

    def look(self, text: str, **options: Any) -> LookResult:
        """Return a look at a text by the model of these numbers, which is loaded by its name (`regard.look`).

        Raises UserError if its files are no longer those that were measured.
        """
        from regard import models
        from regard.commands.look.run import look

        model = self.metadata["model"]
        loaded = models.load(model["name"], adapter=model.get("adapter")) if model["sha256"] else None
        if loaded is None or loaded.sha256 != model["sha256"]:
            problem = "its files have changed" if loaded else "it was given as an object, not by its name"
            raise UserError(f"model: expected {model['name']} as it was measured; {problem}. Use regard.look(model, …)")
        return look(loaded, None, text, **options)

    def summary(self) -> RenderableType:
        return measure_summary(self.table, self.metadata, self.tokens)

    def page(self) -> str:
        return measure_page(self.table, self.metadata, self.tokens)

    def write_artifacts(self, folder: Path) -> None:
        if self.tokens is not None:
            self.tokens.to_parquet(folder / TOKENS, index=False)
        if self.matrices:
            (folder / MATRICES).write_bytes(safetensors.torch.save(self.matrices))

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        files = metadata["files"]
        matrices = safetensors.torch.load_file(folder / MATRICES) if MATRICES in files else {}
        return {
            "tokens": pd.read_parquet(folder / TOKENS) if TOKENS in files else None,
            "matrices": matrices,
        }
