"""What a measurement is made of."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from regard.errors import UserError
from regard.runs.config import MAX_SEED, Config, config_field
from regard.runs.idle_options import IdleOptions

TOKENS_PER_BATCH = 4096
"""Tokens of a batch whose size is not given."""


OF_SINKS = ("sink_rate", "secondary_sinks", "sinks_by_token_class")
"""Statistics that say from which attention on a key is a sink."""


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Return the layers that a text lists as numbers and ranges, such as 0,3,8-11. Raises ValueError."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(part)
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(layers))


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(Config):
    """Everything that a run of `regard measure` depends on beside model and text.

    `statistics` may hold instances of `regard.statistics.Statistic`; a copy of each is used. Layers are counted from 0;
    −1 are the embeddings.
    """

    command: ClassVar[str] = "measure"

    idle: ClassVar[tuple[IdleOptions, ...]] = (
        IdleOptions(
            ("epsilon", "minimum_queries"),
            f"none of {', '.join(OF_SINKS)} is among the statistics",
            applies=lambda config: not config.has_any_of(OF_SINKS),
        ),
    )

    statistics: tuple[Any, ...] = config_field(
        ("default",),
        "default, all, or names. Slow: spectral_bound, matrix_entropy, output_rank, input_dependence, and "
        "perturbation_spread, which is not in all: it needs a second forward pass",
    )
    input: Literal["natural", "random", "repeated"] = config_field(
        "natural", "tokens that are read: natural (the text), random, or repeated (one token)"
    )
    bos: Literal["keep", "drop", "add"] = config_field("keep", "keep, drop or add the token before the text")
    chat_template: str | None = config_field(
        None,
        "Jinja file with the chat template that writes conversations (default: the tokenizer's own)",
        metavar="FILE",
    )
    prompt: str | None = config_field(
        None,
        "text beside each image, sound or video, for models that read both (default: Describe the image., … sound. "
        "or … video.)",
        metavar="TEXT",
        blank=True,
    )
    frames: int | None = config_field(
        None, "frames of each video, spread evenly (default: as many as the model takes, else all)", none_word="auto"
    )
    samples: int = config_field(100, "windows, images, sounds or videos to measure")
    length: int = config_field(64, "tokens in a window")
    epsilon: tuple[float, ...] = config_field(
        (0.3,), "thresholds of the sink rate", exclusive_minimum=0, exclusive_maximum=1, min_items=1
    )
    minimum_queries: int = config_field(8, "a key can be a sink only if at least so many queries may see it")
    perturb: Literal["middle", "first"] = config_field(
        "middle", "the token that perturbation_spread replaces, among those that are not special: middle or first"
    )
    layer_ids: tuple[int, ...] | None = config_field(
        None,
        "layers to observe, counted from 0, such as 0,3,8-11 (default: all)",
        minimum=-1,
        min_items=1,
        parser=parse_layer_ids,
        syntax="numbers and ranges such as 0,3,8-11",
        none_word="all",
    )
    part: str | None = config_field(
        None, "path of one part of the model, to measure it alone, such as model.language_model (default: all)"
    )
    positions: Literal["all", "thin", "none"] = config_field(
        "all", "positions with rows in the table: all, thin (0 to 15, powers of two and the last), or none"
    )
    batch_size: int | None = config_field(
        None,
        "windows, images, sounds or videos per forward pass (default: auto; 4,096 tokens of text, one image)",
        none_word="auto",
    )
    skip_verification: bool = config_field(
        False, "do not compare a few tokens with the model's own attention first, as is done once for each model"
    )
    seed: int = config_field(0, "seed of the choice of windows and of random weights", minimum=0, maximum=MAX_SEED)

    def check(self) -> None:
        from regard.statistics import Statistic, expand_selection, statistic_factories, statistic_names

        statistics: Any = self.statistics
        if all(isinstance(statistic, str) for statistic in statistics):
            statistics = statistic_names(statistics[0] if len(statistics) == 1 else statistics)
        statistics = expand_selection(statistics)
        statistic_factories(statistics)
        if unnamed := [part.name for part in statistics if isinstance(part, Statistic) and not hasattr(part, "info")]:
            raise UserError(f"statistic {unnamed[0]}: expected its info, a StatisticInfo that the page shows, got none")
        object.__setattr__(self, "statistics", tuple(statistics))
        if self.perturb != "middle":
            self.check_perturb()

    def check_perturb(self) -> None:
        """Raise a UserError if no statistic replaces a token, for a user who has said which."""
        from regard.statistics import PerturbationSpread, statistic_factories

        names = list(statistic_factories(self.statistics))
        if not self.has_any_of([PerturbationSpread.name]):
            raise UserError(
                f"perturb: expected {PerturbationSpread.name} among the statistics, for which it says where a token is "
                f"replaced, got {', '.join(names)}; add it, or leave perturb out"
            )

    def has_any_of(self, names: Collection[str]) -> bool:
        """Return whether one of these is among the statistics."""
        from regard.statistics import statistic_factories

        return not set(names).isdisjoint(statistic_factories(self.statistics))

    @property
    def batch_rows(self) -> int:
        return self.batch_size or max(1, min(self.samples, TOKENS_PER_BATCH // self.length))

    def to_dict(self) -> dict[str, Any]:
        from regard.statistics import statistic_factories

        return {**super().to_dict(), "statistics": list(statistic_factories(self.statistics))}
