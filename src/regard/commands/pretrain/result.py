"""Frozen records of pre-training runs, to and from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from regard.commands.pretrain.page import pretrain_page
from regard.commands.pretrain.terminal import pretrain_summary
from regard.errors import UserError
from regard.runs import result as runs_result
from regard.runs.output_dir import RESULTS, atomic_folder
from regard.runs.quiet import suppress_logging
from regard.runs.result import PAGE

if TYPE_CHECKING:
    from rich.console import RenderableType

HISTORY, SINKS, MODEL = "history.parquet", "sinks.parquet", "model"
VERB = "pretrain"
FINAL = (
    "loss",
    "valid_loss",
    "sink_rate",
    "sink_rate_max",
    "sink_position",
    "alpha_first",
    "alpha_uniform",
    "virtual_sink_rate",
    "norm_ratio",
)
"""What of the history a run ends with."""


@dataclass(frozen=True, repr=False)
class PretrainResult:
    """What one run of pre-training gave: a model with its tokenizer, and how both came to be.

    `history` has one row a logged step, `sinks` is tidy (both described in `docs/design.md`), `record` is the
    provenance. `model` and `tokenizer` are None where only the tables were read.
    """

    history: pd.DataFrame
    sinks: pd.DataFrame
    metadata: dict[str, Any]
    model: Any = None
    tokenizer: Any = None

    @property
    def final(self) -> dict[str, float]:
        """The last numbers of the history, by name."""
        return dict(self.metadata["final"])

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={self.final[name]:.3g}" for name in FINAL if self.final.get(name) is not None)
        return f"Pretraining({len(self.history)} rows, {told})"

    def summary(self) -> RenderableType:
        """The few lines that a terminal shows, for rich's `print`."""
        return pretrain_summary(self.history, self.sinks, self.metadata)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Where it was written: the folder, with model, tables, record and report page; whole or not at all."""
        with atomic_folder(folder, overwrite=overwrite, verb=VERB) as place:
            if self.model is not None:
                with suppress_logging():
                    self.model.save_pretrained(place / MODEL)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(place / MODEL)
            text = json.dumps(self.metadata, indent=2, ensure_ascii=False, allow_nan=False)
            (place / RESULTS).write_text(text + "\n", encoding="utf-8")
            self.history.to_parquet(place / HISTORY, index=False)
            self.sinks.to_parquet(place / SINKS, index=False)
            page = pretrain_page(self.history, self.sinks, self.metadata)
            (place / PAGE).write_text(page, encoding="utf-8")
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> PretrainResult:
        """The tables and the record in a folder, without the model. Raises UserError if they are not there or whole."""
        folder = Path(folder)
        record = read_record(folder)
        try:
            return cls(pd.read_parquet(folder / HISTORY), pd.read_parquet(folder / SINKS), record)
        except (OSError, ValueError) as error:
            raise UserError(f"the run in {folder} cannot be read: {' '.join(str(error).split())}") from error


def read_record(folder: str | Path) -> dict[str, Any]:
    """The record of a finished run in a folder. Raises UserError if there is none."""
    return runs_result.read_record(folder, verb=VERB, told="pre-training")


def final_metrics(history: pd.DataFrame) -> dict[str, float | None]:
    """The last number of each column that says how a run ended; None where there is none."""
    names = [name for name in (*FINAL, *history.columns) if name in history.columns]
    wanted = dict.fromkeys(name for name in names if name in FINAL or name.startswith("valid_loss."))
    found: dict[str, float | None] = {}
    for name in wanted:
        numbers = history[name].dropna()
        found[name] = float(numbers.iloc[-1]) if len(numbers) else None
    return found


def make_history(history: list[Mapping[str, float]]) -> pd.DataFrame:
    """The history as a table: the columns of every run, null where nothing was watched; steps as whole numbers."""
    frame = pd.DataFrame(history)
    frame = frame.assign(**{name: float("nan") for name in FINAL if name not in frame})
    whole = {name: "int64" for name in ("step", "tokens") if name in frame}
    return frame.astype(whole)
