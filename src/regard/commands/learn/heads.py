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
OBSTACLE = "head_obstacle"
"""Key of the reason why a run has no head of the labels' words."""
Head = Literal["labels", "method"]
_READ_LABELS = "--head labels compares texts with the words of the labels"


def choose_head(configs: Sequence[LearnConfig], stream: Stream, loaded: Loaded) -> Head:
    """Choose the head of all compared methods: that of the "labels", or that of each "method".

    By default it is "labels" on an encoder where a method trains adapters, none needs weights in its head, and all
    labels are words that the model may know and that differ (no codes as "A" or "class 2"): a linear head is trained on
    one task after another and tells classes of different tasks apart badly (docs/rates.md).
    """
    first = configs[0]
    if first.head != "auto" or stream.text:
        return "labels" if first.head == "labels" else "method"
    return "labels" if _suits_labels(configs, loaded) and not find_obstacle(configs, stream, loaded) else "method"


def _suits_labels(configs: Sequence[LearnConfig], loaded: Loaded) -> bool:
    """Return whether the model is an encoder, and some method trains adapters in it."""
    from regard.models.classifier import reads_to_the_right

    model = loaded.model.config
    trains = configs[0].lora_rank is not None or any(config.make_method().trains_adapters for config in configs)
    return trains and not model.is_encoder_decoder and not reads_to_the_right(model)


def find_obstacle(configs: Sequence[LearnConfig], stream: Stream, loaded: Loaded) -> str:
    """Return why methods that train adapters in an encoder do without the labels' words, and what can be done.

    Empty without a reason. `--head labels` is named only where it is not refused.
    """
    from regard.models.heads import are_distinct_words, find_longer_words, find_same_words
    from regard.models.limits import maximum_length

    if stream.text or not _suits_labels(configs, loaded):
        return ""
    methods = {config.method: config.make_method() for config in configs}
    own = [name for name, method in methods.items() if not (method.allows_label_head and method.head == "linear")]
    if own:
        return f"{', '.join(own)} cannot do without; {_READ_LABELS} of the other methods alone"
    tokenizer, limit = loaded.tokenizer, maximum_length(loaded.model, loaded.tokenizer)
    if are_distinct_words(stream.classes, tokenizer, limit):
        return ""
    problem = "not all labels are words that the model may know and that differ"
    if same := find_same_words(stream.classes, tokenizer):
        advice = "rename one, or both alike if they are one class"
        return f"{problem}: '{same[0]}' and '{same[1]}' are the same tokens; {advice}"
    if limit is not None and (long := find_longer_words(stream.classes, tokenizer, limit)):
        return f"{problem}: the label '{long[:40]}…' has more than the {limit} tokens that the model takes; shorten it"
    unknown = [name for name in stream.classes if not are_distinct_words([name], tokenizer, limit)]
    named = f"the label '{unknown[0]}' is none" if unknown else "two labels are the same but for digits or case"
    return f"{problem}: {named}; {_READ_LABELS}"


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
    """Say that methods were given the head of the labels' words without being asked, or why not; else empty."""
    if asked != "auto":
        return ""
    if not any(run.get(HEAD) for run in runs):
        reasons = [str(run[OBSTACLE]) for run in runs if run.get(OBSTACLE)]
        return f"all methods have linear heads, for {reasons[0]}" if reasons else ""
    return "all methods compare texts with the words of the labels (--head labels); --head method: a linear head"
