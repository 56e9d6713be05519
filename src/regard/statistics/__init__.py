"""Statistics: pure functions, and a mergeable accumulator for each."""

from collections.abc import Callable, Iterable, Set
from typing import Any

from regard.errors import UserError
from regard.statistics.columns import StatisticRow
from regard.statistics.dependence import InputDependence
from regard.statistics.layers import LAYER_STATISTICS
from regard.statistics.modalities import ModalityMass
from regard.statistics.observation import Observation
from regard.statistics.perturbation import PerturbationSpread
from regard.statistics.sink_tokens import CommonSinkRatio, SinksByTokenClass, SinkTokens
from regard.statistics.sinks import ColumnMass, FirstMass, SecondarySinks, SinkDeviation, SinkRate
from regard.statistics.statistic import Average, PerLayer, SampleValues, Statistic, StatisticInfo, StatisticKey

STATISTICS: dict[str, Callable[[], Statistic]] = {
    **{kind.name: kind for kind in (SinkRate, SecondarySinks, ColumnMass, FirstMass, SinkDeviation)},
    **{kind.name: kind for kind in (SinkTokens, CommonSinkRatio, SinksByTokenClass)},
    **LAYER_STATISTICS,
    InputDependence.name: InputDependence,
    ModalityMass.name: ModalityMass,
    PerturbationSpread.name: PerturbationSpread,
}

DEFAULT = (
    *("sink_rate", "column_mass", "sink_deviation", "sink_tokens", "common_sink_ratio", "entropy", "distance"),
    *("over_smoothing", "hidden_norm", "key_norm", "value_norm"),
)
ALL = tuple(name for name in STATISTICS if name != PerturbationSpread.name)
"""What can be measured in one forward."""

GROUPS = {"default": DEFAULT, "all": ALL}
"""Names that stand for several statistics."""

SAME_PASS = frozenset(
    {"column_mass", "column_square", "entropy", "distance", "row_sum", "virtual_sink_mass", "value_weighted_sum"}
)
"""Reductions that are computed with the output of attention, in one pass over the scores."""


def cost_class(statistic: Statistic) -> str:
    """Return what kind of work a statistic is, from the reductions that it needs."""
    if isinstance(statistic, PerturbationSpread):
        return "one more forward"
    for reduction, kind in {
        "weights": "T×T result",
        "spectral_bound": "many passes",
        "modality_mass": "one more pass",
        "hidden": "hidden states",
    }.items():
        if reduction in statistic.needs:
            return kind
    if statistic.needs & SAME_PASS:
        return "same pass"
    return "first keys" if "first_mass" in statistic.needs else "linear"


def statistic_names(selection: str | Iterable[str]) -> tuple[str, ...]:
    """Return names, some of them "default" or "all" (in a string separated by commas), without duplicates."""
    parts = [part.strip() for part in (selection.split(",") if isinstance(selection, str) else selection)]
    names = tuple(dict.fromkeys(name for part in parts for name in GROUPS.get(part, (part,))))
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise UserError(
            f"unknown statistic {', '.join(map(repr, unknown)) or '(none given)'}; "
            f"expected default, all, or some of: {', '.join(STATISTICS)}"
        )
    return names


def expand_selection(selection: Iterable[Any]) -> list[Any]:
    """Return names and statistics as they are, and "default" and "all" as the names that do not stand beside them."""
    items = [item.strip() if isinstance(item, str) else item for item in selection]
    beside = {item for item in items if isinstance(item, str)}
    beside |= {getattr(item, "name", "") for item in items if isinstance(item, Statistic)}
    expanded: list[Any] = []
    for item in items:
        if isinstance(item, str) and item in GROUPS:
            expanded += [name for name in GROUPS[item] if name not in beside]
            beside.update(GROUPS[item])
        else:
            expanded.append(item)
    return expanded


def statistic_factories(selection: Any) -> dict[str, Callable[[], Statistic]]:
    """Return what makes each statistic, by name, of a selection as of `statistic_names`, or with `Statistic`s in it."""
    if isinstance(selection, str):
        selection = statistic_names(selection)
    if not isinstance(selection, Iterable):
        raise UserError(f"statistics: expected default, all, or names and statistics in a list; got {selection!r}")
    factories = [_find_factory(item) for item in expand_selection(selection)]
    names = [name for name, _ in factories]
    if len(set(names)) < len(names) or not names:
        raise UserError(f"expected at least one statistic and none twice, got: {names}")
    return dict(factories)


def _find_factory(item: Any) -> tuple[str, Callable[[], Statistic]]:
    if isinstance(item, Statistic):
        if missing := [name for name in ("name", "needs") if not hasattr(item, name)]:
            raise UserError(f"statistics: expected name and needs of each; {type(item).__name__} has no {missing[0]}")
        if not isinstance(item.needs, Set):
            raise UserError(
                f"statistic {item.name}: expected needs as a set of names of reductions, got {item.needs!r}"
            )
        return item.name, lambda: item
    if not isinstance(item, str):
        raise UserError(f"statistics: expected names, or statistics that are set up such as SinkRate(); got {item!r}")
    (name,) = statistic_names([item])
    return name, STATISTICS[name]


def select_statistics(selection: Any) -> list[Statistic]:
    """Return new statistics for names, and `Statistic`s as they are; see `statistic_factories`."""
    return [make() for make in statistic_factories(selection).values()]


__all__ = [
    "ALL",
    "DEFAULT",
    "STATISTICS",
    "Average",
    "ColumnMass",
    "CommonSinkRatio",
    "FirstMass",
    "InputDependence",
    "ModalityMass",
    "Observation",
    "PerLayer",
    "PerturbationSpread",
    "SampleValues",
    "SecondarySinks",
    "SinkDeviation",
    "SinkRate",
    "SinkTokens",
    "SinksByTokenClass",
    "Statistic",
    "StatisticInfo",
    "StatisticKey",
    "StatisticRow",
    "cost_class",
    "expand_selection",
    "select_statistics",
    "statistic_factories",
    "statistic_names",
]
