"""The card of a model that a run of `regard pretrain` saved."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.runs.model_card import ModelCard

_MEASURES = {
    "valid_loss": "loss on held-out text, nats a token",
    "sink_rate": "sink rate of the first position, %",
    "alpha_first": "mean attention on the first position",
    "alpha_uniform": "the same if attention were uniform",
    "virtual_sink_rate": "sink rate of what stands beside the tokens, %",
}


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
