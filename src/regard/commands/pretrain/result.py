"""Result of `regard pretrain`, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import pandas as pd
from rich.console import RenderableType

from regard.commands.pretrain.charts import last_maps, loss_panels, sink_panels
from regard.commands.pretrain.page import pretrain_page
from regard.commands.pretrain.terminal import pretrain_summary
from regard.errors import UserError, check_choice
from regard.report.drawing import draw_maps, draw_panels
from regard.runs.model_card import ModelCard, save_with_card
from regard.runs.result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "model"
_MEASURES = {
    "valid_loss": "loss on held-out text, nats a token",
    "sink_rate": "sink rate of the first position, %",
    "alpha_first": "mean attention on the first position",
    "alpha_uniform": "the same if attention were uniform",
    "virtual_sink_rate": "sink rate of what stands beside the tokens, %",
}
PretrainKind = Literal["curves", "map"]
SINKS = ("sink_rate", "sink_rate_max", "sink_position", "alpha_first", "alpha_uniform", "virtual_sink_rate")
FINAL = ("loss", "valid_loss", *SINKS, "norm_ratio")
"""Columns of the history whose last values are kept in the metadata."""


@dataclass(frozen=True, repr=False)
class PretrainResult(RunResult):
    """Trained model, tokenizer and history; `docs/files.md` describes tables and metadata.

    Attributes:
        history: One row per logged step.
        sinks: Values of the sink monitor, one per row.
        metadata: Provenance of the results.
        model: The model; None, as its `tokenizer`, if the result was loaded from a folder.
    """

    command: ClassVar[str] = "pretrain"
    tables: ClassVar[Mapping[str, str]] = {"history": "history", "sinks": "sinks"}

    history: pd.DataFrame
    sinks: pd.DataFrame
    metadata: dict[str, Any]
    model: Any = None
    tokenizer: Any = None

    @property
    def final(self) -> dict[str, float]:
        return dict(self.metadata["final"])

    def headline(self) -> str:
        numbers = ", ".join(f"{name}={self.final[name]:.3g}" for name in FINAL if self.final.get(name) is not None)
        return f"{len(self.history)} rows, {numbers}"

    def plot(self, kind: PretrainKind = "curves") -> Figure:
        """Draw loss, sink rate and attention on the first token by step, or a map of it at the last monitored step.

        Raises UserError if there is nothing to draw.
        """
        check_choice("kind", kind, get_args(PretrainKind))
        if kind == "curves" and (panels := [*loss_panels(self.history), *sink_panels(self.history, self.metadata)]):
            return draw_panels(panels)
        if kind == "map" and (maps := last_maps(self.sinks)):
            return draw_maps(maps)
        raise UserError(f"there is no {kind} to draw: expected logged steps, and for a map those of the sink monitor")

    def figures_by_seed(self) -> dict[str, dict[Any, float]]:
        """Return the last values of losses and sinks, of the one seed of the run."""
        seed = self.metadata.get("config", {}).get("seed")
        return {name: {seed: float(value)} for name, value in self.final.items() if value is not None}

    def summary(self) -> RenderableType:
        return pretrain_summary(self.history, self.sinks, self.metadata)

    def page(self) -> str:
        return pretrain_page(self.history, self.sinks, self.metadata)

    def write_artifacts(self, folder: Path) -> None:
        if self.model is not None:
            card = describe_trained(self.model, self.metadata)
            save_with_card(folder / MODEL, self.model, self.tokenizer, card)


def final_metrics(history: pd.DataFrame) -> dict[str, float | None]:
    """Return the last number of each column in `FINAL`, and of the losses by domain; None where there is none."""
    domains = [name for name in history.columns if name.startswith("valid_loss.")]
    known = {name: history[name].dropna() for name in dict.fromkeys([*FINAL, *domains]) if name in history.columns}
    return {name: float(numbers.iloc[-1]) if len(numbers) else None for name, numbers in known.items()}


def make_history(history: Sequence[Mapping[str, float]]) -> pd.DataFrame:
    """Return the history as a table: the columns of every run, null where nothing was seen; steps as whole numbers."""
    frame = pd.DataFrame(history)
    frame = frame.assign(**{name: float("nan") for name in FINAL if name not in frame})
    whole = {name: "int64" for name in ("step", "tokens") if name in frame}
    return frame.astype(whole)


def describe_trained(model: Any, metadata: Mapping[str, Any]) -> ModelCard:
    """Return the card of a decoder with what its run trained it on and measured."""
    from regard.models.decoder_card import describe_decoder

    config, watch = metadata["config"], metadata["watch"]
    names = ", ".join(
        f"`{domain['name']}` (a text of {domain['train_tokens']:,} tokens)" for domain in metadata["data"]["domains"]
    )
    steps = f"{config['max_steps']:,} steps of {config['batch_size']:,} sequences of {config['length']:,} tokens"
    card = describe_decoder(model.config)
    return replace(
        card,
        about=(*card.about, f"It was trained from scratch by `regard pretrain` on {names}: {steps}."),
        measured={name: metadata["final"].get(key) for key, name in _MEASURES.items()},
        measured_on=f"At the last step; sinks in {watch['samples']} held-out sequences of {watch['length']} tokens, "
        f"threshold {watch['epsilon']}. From `results.json` of the run.",
    )
