"""Which head the methods of a comparison have: their own, or that of the labels' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from regard.commands.learn.config import LearnConfig
    from regard.data.stream import Stream
    from regard.models.heads import HeadName
    from regard.models.pretrained import Loaded

HEAD = "head"
"""Key of the head in a run's metadata."""
Head = Literal["labels", "method"]


def choose_head(configs: Sequence[LearnConfig], stream: Stream, loaded: Loaded) -> Head:
    """Choose the head of all compared methods: that of the "labels", or that of each "method".

    By default it is "labels" on an encoder where a method trains adapters, none needs weights in its head, and all
    labels are words that the model may know and that differ (no codes as "A" or "class 2"): a linear head is trained on
    one task after another and tells classes of different tasks apart badly (docs/rates.md).

    Args:
        configs: The configuration of each method.
        stream: The tasks.
        loaded: The model that all of them begin with.
    """
    from regard.models.classifier import reads_to_the_right
    from regard.models.heads import are_distinct_words
    from regard.models.limits import maximum_length

    first, methods = configs[0], [config.make_method() for config in configs]
    if first.head != "auto" or stream.text:
        return "labels" if first.head == "labels" else "method"
    has_adapters = first.lora_rank is not None or any(method.trains_adapters for method in methods)
    is_allowed = all(method.allows_label_head and method.head == "linear" for method in methods)
    model = loaded.model.config
    is_encoder = not model.is_encoder_decoder and not reads_to_the_right(model)
    if not (has_adapters and is_allowed and is_encoder):
        return "method"
    limit = maximum_length(loaded.model, loaded.tokenizer)
    return "labels" if are_distinct_words(stream.classes, loaded.tokenizer, limit) else "method"


def warn_of_codes(asked: str, config: LearnConfig, stream: Stream, loaded: Loaded) -> list[str]:
    """Warn that the head was chosen for the labels of the first stream, while those of a later one are no words."""
    from regard.models.heads import are_distinct_words

    if asked != "auto" or config.head != "labels" or are_distinct_words(stream.classes, loaded.tokenizer):
        return []
    problem = "that of the labels' words was chosen for the first tasks, and some labels of later ones are codes or "
    return [f"head: {problem}unknown words. Try --head method, over all tasks from the start"]


def chosen_head(config: LearnConfig) -> HeadName | None:
    """Return the head that a run has in the place of its method's."""
    return "labels" if config.head == "labels" else None


def describe_head(runs: Sequence[Mapping[str, Any]], asked: str) -> str:
    """Say that methods were given the head of the labels' words without being asked; empty if not."""
    if asked != "auto" or not any(run.get(HEAD) for run in runs):
        return ""
    return "all methods compare texts with the words of the labels (--head labels); --head method: a linear head"
