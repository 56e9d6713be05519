"""Result of `regard measure`, and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
import safetensors.torch
from torch import Tensor

from regard.commands.measure.figure import figure as measure_figure
from regard.commands.measure.page import page as measure_page
from regard.commands.measure.terminal import summary as measure_summary
from regard.runs.result import RunResult
from regard.statistics.table import check_statistic, select_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

TOKENS, MATRICES = "tokens.parquet", "mean_attention.safetensors"


@dataclass(frozen=True)
class MeasureResult(RunResult):
    """Result of a measurement; `docs/design.md` describes tables and metadata.

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
        """Return the rows of a statistic whose columns have these values, or are null (None).

        `m.frame("sink_rate", layer=None, position=0)` is the whole model's sink rate.
        """
        return select_rows(self.table, statistic, equal)

    def plot(
        self,
        statistic: str,
        *,
        site: str | None = None,
        epsilon: float | None = None,
        position: int | None = None,
        kind: Literal["map", "profile", "layers"] | None = None,
    ) -> Figure:
        """Draw one statistic: a layers × heads map, a profile over positions, or a curve over layers."""
        check_statistic(self.table, statistic)
        return measure_figure(self.table, statistic, site=site, epsilon=epsilon, position=position, kind=kind)

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
        return {
            "tokens": pd.read_parquet(folder / TOKENS) if TOKENS in files else None,
            "matrices": safetensors.torch.load_file(folder / MATRICES) if MATRICES in files else {},
        }
