"""Frozen records of what was measured, to and from disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import safetensors
import safetensors.torch
from torch import Tensor

from regard.commands.measure.figure import figure as measure_figure
from regard.commands.measure.page import page as measure_page
from regard.commands.measure.terminal import summary as measure_summary
from regard.errors import UserError
from regard.runs.output_dir import RESULTS, atomic_folder, command_of
from regard.runs.result import PAGE
from regard.statistics.table import COLUMNS, check_statistic, select_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

TABLE, TOKENS = "statistics.parquet", "tokens.parquet"
MATRICES = "mean_attention.safetensors"


@dataclass(frozen=True)
class MeasureResult:
    """What one run measured: a tidy table, where it came from, and what does not fit a table.

    `table` has the columns `COLUMNS`; `tokens` (`TOKEN_COLUMNS`) says on which tokens the sinks stood, if that was
    asked; `record` is the provenance; `matrices` holds the mean attention (head, query, key) by "site.layer", if that
    was asked. `docs/design.md` describes each.
    """

    table: pd.DataFrame
    metadata: dict[str, Any]
    tokens: pd.DataFrame | None = None
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def frame(self, statistic: str | None = None, **equal: Any) -> pd.DataFrame:
        """The rows of a statistic (None: all), and of these only those where a column equals a value or is null (None).

        `m.frame("sink_rate", layer=None, position=0)` is the whole model's sink rate at the first token.
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
        """A figure of one statistic: a layers × heads map, a profile over positions, or a curve over layers."""
        check_statistic(self.table, statistic)
        return measure_figure(self.table, statistic, site=site, epsilon=epsilon, position=position, kind=kind)

    def summary(self) -> RenderableType:
        """The few lines that a terminal shows, for rich's `print`."""
        return measure_summary(self.table, self.metadata, self.tokens)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Where it was written: the folder, with record, tables, matrices and report page; whole or not at all."""
        with atomic_folder(folder, overwrite=overwrite, verb="measure") as place:
            record = json.dumps(self.metadata, indent=2, ensure_ascii=False, allow_nan=False)
            (place / RESULTS).write_text(record + "\n", encoding="utf-8")
            self.table.to_parquet(place / TABLE, index=False)
            if self.tokens is not None:
                self.tokens.to_parquet(place / TOKENS, index=False)
            if self.matrices:
                (place / MATRICES).write_bytes(safetensors.torch.save(self.matrices))
            page = measure_page(self.table, self.metadata, self.tokens)
            (place / PAGE).write_text(page, encoding="utf-8")
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> MeasureResult:
        """The measurements that were saved to a folder. Raises UserError if there are none, or not whole."""
        folder = Path(folder)
        if not (folder / RESULTS).is_file():
            raise UserError(
                f"no run in {folder}: expected a folder with {RESULTS}, as `regard measure --out` writes it"
            )
        if (verb := command_of(folder / RESULTS)) not in (None, "measure"):
            raise UserError(f"the run in {folder} is one of `regard {verb}`: expected one of `regard measure`")
        if not (folder / TABLE).is_file():
            raise UserError(f"the run in {folder} cannot be read: expected measurements, {TABLE} beside {RESULTS}")
        try:
            record = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
            table = pd.read_parquet(folder / TABLE)
            tokens = pd.read_parquet(folder / TOKENS) if (folder / TOKENS).exists() else None
            matrices = safetensors.torch.load_file(folder / MATRICES) if (folder / MATRICES).exists() else {}
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"the run in {folder} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(record, dict) or not set(COLUMNS) <= set(table.columns):
            raise UserError(f"the run in {folder} is not one of measurements: expected columns {', '.join(COLUMNS)}")
        return cls(table, record, tokens, matrices)
