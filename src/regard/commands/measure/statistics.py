"""Statistics of a measurement: those that its options ask for, what is said of them, and tables beside the main one."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from regard import data, models
from regard.commands.measure.config import OF_SINKS, MeasureConfig
from regard.commands.measure.media import Media, kind_of
from regard.commands.measure.perturbation import describe_replacement
from regard.data.tokenizers import token_names
from regard.errors import UserError, warn_user
from regard.hooks import Watch
from regard.hooks.perturbation import PairedSpread
from regard.statistics import DEFAULT, STATISTICS, PerturbationSpread, Statistic, cost_class
from regard.statistics.columns import Columns
from regard.statistics.dependence import InputDependence
from regard.statistics.modalities import ModalityMass
from regard.statistics.sink_tokens import CommonSinkRatio, SinksByTokenClass, SinkTokens
from regard.statistics.sinks import SecondarySinks, SinkRate
from regard.statistics.table import TOKEN_COLUMNS, is_of_statistic, make_table

AXES = ("layer", "head", "position", "epsilon")
"""Columns of the table that say where a value is of."""


def make_statistics(config: MeasureConfig, loaded: models.Loaded, media: Media | None) -> list[Statistic]:
    """Return the statistics that are asked for, with the options that they take."""
    configured: dict[str, Callable[[], Statistic]] = {
        "sink_rate": lambda: SinkRate(config.epsilon, config.minimum_queries),
        "secondary_sinks": lambda: SecondarySinks(config.epsilon, config.minimum_queries),
        "input_dependence": lambda: InputDependence(config.length if media is None else None),
        "perturbation_spread": PairedSpread,
    }
    if loaded.tokenizer is not None:
        configured |= {
            "common_sink_ratio": lambda: CommonSinkRatio(data.common_tokens(loaded.tokenizer)),
            "sinks_by_token_class": lambda: _make_sinks_by_token_class(config, loaded.tokenizer),
            "modality_mass": lambda: ModalityMass(data.special_tokens(loaded.tokenizer)),
        }
    names = [part.name if isinstance(part, PerturbationSpread) else part for part in config.statistics]
    return [
        copy.deepcopy(name) if isinstance(name, Statistic) else configured.get(name, STATISTICS[name])()
        for name in names
    ]


def _make_sinks_by_token_class(config: MeasureConfig, tokenizer: Any) -> SinksByTokenClass:
    special = data.special_tokens(tokenizer)
    delimiters = data.common_tokens(tokenizer).union(data.line_breaks(tokenizer)).difference(special)
    return SinksByTokenClass(special, delimiters, config.epsilon, config.minimum_queries)


def describe_statistics(observer: Watch, columns: Sequence[Columns], config: MeasureConfig) -> dict[str, Any]:
    """Describe each statistic that has rows: its axes, what it is, and its cost."""
    described = {}
    for name, statistic in observer.statistics.items():
        parts = [part for part in columns if is_of_statistic(part.statistic, name)]
        if name in observer.left_out or not parts:
            continue
        axes = [axis for axis in AXES if any(getattr(part, axis) is not None for part in parts)]
        work = {"cost": cost_class(statistic), "seconds": round(observer.seconds[name], 3)}
        replaced = {"replaced": describe_replacement(config)} if isinstance(statistic, PairedSpread) else {}
        described[name] = {"axes": axes, **vars(statistic.info), **replaced, **work}
    return described


def check_statistics(observer: Watch, config: MeasureConfig, columns: Sequence[Columns], media: Media | None) -> None:
    """Raise a UserError for statistics without a row; only warn of images, sounds and videos, if others have rows."""
    names = [name for name in observer.statistics if name not in observer.left_out]
    empty = [name for name in names if not any(is_of_statistic(part.statistic, name) for part in columns)]
    if columns and media is not None:
        if named := [name for name in empty if name not in DEFAULT]:
            warn_user(f"{', '.join(named)} cannot be measured on these {kind_of(media)}, and is left out")
        dependence = None if InputDependence.name in empty else _input_dependence(observer)
        for site, length in dependence.single_lengths().items() if dependence is not None else ():
            warn_user(
                f"input_dependence has no rows at {site}: of its {length} tokens, the first length without padding, "
                f"there is one sample; it compares {kind_of(media)} of one length"
            )
    elif media is not None:
        raise UserError(f"statistics: {', '.join(empty)} cannot be measured on these {kind_of(media)}")
    elif empty:
        of_sinks = not set(OF_SINKS).isdisjoint(empty)
        lower = f"lower --minimum-queries (now {config.minimum_queries}), " if of_sinks else ""
        raise UserError(
            f"statistics: {', '.join(empty)} has no data: {config.samples} windows of {config.length} tokens are too "
            f"few or too short for this model. Increase --samples or --length, {lower}or remove it from "
            "--statistics."
        )


def tabulate_sink_tokens(observer: Watch, tokenizer: Any | None) -> pd.DataFrame | None:
    """Return the tokens with sinks; None if these were not measured."""
    statistic = observer.statistics.get("sink_tokens")
    if not isinstance(statistic, SinkTokens):
        return None
    rows = statistic.tokens()
    texts = dict[int, str | None]()
    if tokenizer is not None:  # of sounds a feature extractor may be all that there is
        ids = sorted({row[4] for row in rows if row[4] >= 0})
        texts = dict(zip(ids, token_names(tokenizer, ids), strict=True))
    return make_table([(*row[:4], texts.get(row[4]), *row[5:]) for row in rows], TOKEN_COLUMNS)


def _input_dependence(observer: Watch) -> InputDependence | None:
    statistic = observer.statistics.get(InputDependence.name)
    return statistic if isinstance(statistic, InputDependence) else None


def mean_matrices(observer: Watch) -> dict[str, Tensor]:
    """Return the mean attention of each layer, if `input_dependence` was measured."""
    statistic = _input_dependence(observer)
    if statistic is None:
        return {}
    return {f"{site}.{layer}": mean.float() for (site, layer), mean in statistic.mean_attention().items()}
