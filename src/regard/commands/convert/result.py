"""Result of `regard convert`, its sentences, and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from rich.console import RenderableType

from regard.commands.convert.page import convert_page, layer_panels, ledes, loss_panels, stage_lines
from regard.report.drawing import draw_panels
from regard.report.terminal import summary
from regard.runs.model_card import ModelCard, public_name, save_with_card
from regard.runs.result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "model"
_STAGES = {
    "untouched": "the original model",
    "replaced": "with its attention replaced, no weight changed",
    "layers": "after each layer was matched to the original one",
    "model": "after training end to end",
}


@dataclass(frozen=True, repr=False)
class ConvertResult(RunResult):
    """Converted model, its tokenizer, and what each stage did.

    Attributes:
        stages: Loss on held-out text, in nats a token: `untouched`, `replaced`, after `layers`, after `model`.
        layers: Relative error of each layer's attention, before and after the first stage.
        history: Rows of training: of `layers` with the `relative_error`, of `model` with the `loss`, both with the
            loss on held-out text.
        metadata: Provenance of the results.
        model: The model; None, as its `tokenizer`, if the result was loaded from a folder.
    """

    command: ClassVar[str] = "convert"
    tables: ClassVar[Mapping[str, str]] = {"stages": "stages", "layers": "layers", "history": "history"}

    stages: pd.DataFrame
    layers: pd.DataFrame
    history: pd.DataFrame
    metadata: dict[str, Any]
    model: Any = None
    tokenizer: Any = None

    def headline(self) -> str:
        return ", ".join(f"{row.stage}: loss {row.loss:.3f}" for row in self.stages.itertuples())

    def plot(self) -> Figure:
        """Draw the loss of both stages by step, and the error of each layer."""
        return draw_panels([*loss_panels(self.history), *layer_panels(self.layers)])

    def figures_by_seed(self) -> dict[str, dict[Any, float]]:
        """Return the losses on held-out text, of the one seed of the run."""
        seed = self.metadata.get("config", {}).get("seed")
        return {f"loss, {row.stage}": {seed: float(row.loss)} for row in self.stages.itertuples()}

    def summary(self) -> RenderableType:
        title = f"{self.metadata['model']['name']} with {self.metadata['config']['attention']}"
        return summary(title, ledes(self.stages, self.metadata), [stage_lines(self.stages)])

    def page(self) -> str:
        return convert_page(self.stages, self.layers, self.history, self.metadata)

    def write_artifacts(self, folder: Path) -> None:
        if self.model is not None:
            card = describe_conversion(self.model, self.stages, self.metadata)
            save_with_card(folder / MODEL, self.model, self.tokenizer, card)


def describe_conversion(model: Any, stages: pd.DataFrame, metadata: Mapping[str, Any]) -> ModelCard:
    """Return the card of a converted model with what each stage of its run measured."""
    from regard.hooks.replaced_model import describe_saved

    config, name = metadata["config"], public_name(metadata["model"]["name"])
    card = describe_saved(model.config, name)
    steps = f"{config['layer_steps']:,} steps layer by layer, {config['model_steps']:,} end to end"
    text = ", ".join(f"`{domain['name']}`" for domain in metadata["data"]["domains"])
    trained = f"`regard convert` put `{config['attention']}` there and trained on {text}: {steps}."
    return replace(
        card,
        about=(*card.about, trained),
        measured={f"loss, {_STAGES[row.stage]}": float(row.loss) for row in stages.itertuples()},
        measured_on=f"Mean loss in nats a token over {int(stages['rows'].iloc[0])} held-out sequences of "
        f"{config['length']} tokens of this text, from the run's tables.",
    )
