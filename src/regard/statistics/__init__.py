"""What is measured: pure functions, and one mergeable accumulator each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from regard.errors import UserError
from regard.statistics.dependence import InputDependence
from regard.statistics.keys import HiddenNorm, KeyNorm, QKCosine, QKNorm, ValueNorm, ValueWeightedMass
from regard.statistics.layers import MassiveActivations, MatrixEntropy, OverSmoothing, SpectralBound
from regard.statistics.observation import Observation
from regard.statistics.rows import Distance, Entropy, HeadOutputNorm, RowSum, VirtualSinkMass
from regard.statistics.sinks import ColumnMass, CommonSinkRatio, FirstMass, SinkDeviation, SinkRate, SinkTokens
from regard.statistics.statistic import (
    Average,
    PerLayer,
    SampleValues,
    Statistic,
    StatisticInfo,
    StatisticKey,
    StatisticRow,
)

STATISTICS: dict[str, Callable[[], Statistic]] = {
    "sink_rate": SinkRate,
    "column_mass": ColumnMass,
    "first_mass": FirstMass,
    "sink_deviation": SinkDeviation,
    "sink_tokens": SinkTokens,
    "common_sink_ratio": CommonSinkRatio,
    "entropy": Entropy,
    "distance": Distance,
    "row_sum": RowSum,
    "virtual_sink_mass": VirtualSinkMass,
    "over_smoothing": OverSmoothing,
    "spectral_bound": SpectralBound,
    "hidden_norm": HiddenNorm,
    "massive_activations": MassiveActivations,
    "key_norm": KeyNorm,
    "value_norm": ValueNorm,
    "qk_cosine": QKCosine,
    "qk_norm": QKNorm,
    "value_weighted_mass": ValueWeightedMass,
    "head_output_norm": HeadOutputNorm,
    "matrix_entropy": MatrixEntropy,
    "input_dependence": InputDependence,
}

DEFAULT = (
    "sink_rate",
    "column_mass",
    "sink_deviation",
    "sink_tokens",
    "common_sink_ratio",
    "entropy",
    "distance",
    "over_smoothing",
    "hidden_norm",
    "key_norm",
    "value_norm",
)


def statistic_names(wanted: str | Iterable[str]) -> tuple[str, ...]:
    """Names of statistics: "default", "all", or as given (separated by commas in a string), each checked, each once."""
    if isinstance(wanted, str):
        wanted = {"default": DEFAULT, "all": tuple(STATISTICS)}.get(wanted.strip(), tuple(wanted.split(",")))
    found = tuple(dict.fromkeys(name.strip() for name in wanted))
    unknown = [name for name in found if name not in STATISTICS]
    if unknown or not found:
        raise UserError(
            f"unknown statistic {', '.join(map(repr, unknown)) or '(none given)'}; "
            f"expected default, all, or some of: {', '.join(STATISTICS)}"
        )
    return found


def statistic_factories(wanted: Any) -> dict[str, Callable[[], Statistic]]:
    """By name, how to make each statistic that is wanted; one that is given ready-made is itself.

    `wanted`: a string as in `statistic_names`, or several names and `Statistic`s. Raises UserError for anything else.
    """
    if isinstance(wanted, str):
        wanted = statistic_names(wanted)
    if not isinstance(wanted, Iterable):
        raise UserError(f"statistics: expected default, all, or names and statistics in a list; got {wanted!r}")
    wanted = list(wanted)
    if wrong := [one for one in wanted if not isinstance(one, (str, Statistic))]:
        raise UserError(
            f"statistics: expected names, or statistics that are set up such as SinkRate(); got {wrong[0]!r}"
        )
    given = [s if isinstance(s, Statistic) else statistic_names([s])[0] for s in wanted]
    found = {s if isinstance(s, str) else s.name: STATISTICS[s] if isinstance(s, str) else _same(s) for s in given}
    if len(found) < len(given) or not found:
        listed = [s if isinstance(s, str) else s.name for s in given]
        raise UserError(f"expected at least one statistic and none twice, got: {listed}")
    return found


def _same(statistic: Statistic) -> Callable[[], Statistic]:
    return lambda: statistic


def select_statistics(wanted: Any) -> list[Statistic]:
    """Fresh statistics for names, ready-made ones as they are."""
    return [make() for make in statistic_factories(wanted).values()]


__all__ = [
    "DEFAULT",
    "STATISTICS",
    "Average",
    "ColumnMass",
    "CommonSinkRatio",
    "FirstMass",
    "InputDependence",
    "Observation",
    "PerLayer",
    "SampleValues",
    "SinkDeviation",
    "SinkRate",
    "SinkTokens",
    "Statistic",
    "StatisticInfo",
    "StatisticKey",
    "StatisticRow",
    "select_statistics",
    "statistic_factories",
    "statistic_names",
]
