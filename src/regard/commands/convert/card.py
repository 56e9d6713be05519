"""The card of a model that a run of `regard convert` saved."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from regard.runs.model_card import ModelCard, public_name

_STAGES = {
    "untouched": "the original model",
    "replaced": "with its attention replaced, no weight changed",
    "layers": "after each layer was matched to the original one",
    "model": "after training end to end",
}


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
