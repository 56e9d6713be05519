"""What a block is asked to measure: the reductions that its statistics need, and its layers."""

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from regard.errors import UserError
from regard.hooks.reductions import REDUCTIONS
from regard.statistics import PerturbationSpread, Statistic

EMBEDDING_LAYER = -1
"""Index of the layer whose output is the input of layer 0."""


def needs_any(statistic: Statistic, reductions: Collection[str]) -> bool:
    """Return whether a statistic needs one of some reductions, itself or for another that it needs."""
    return not set(reductions).isdisjoint(required_reductions([statistic]))


def needing_whole_rows(statistics: Sequence[Statistic]) -> list[str]:
    """Return the names of statistics that cannot be told of several samples packed into a row."""
    unpacked = [name for name, reduction in REDUCTIONS.items() if not reduction.packed]
    return [statistic.name for statistic in statistics if needs_any(statistic, unpacked)]


def required_reductions(statistics: Sequence[Statistic]) -> list[str]:
    """Return the reductions that statistics need, and those that these require, in order of their names."""
    for statistic in statistics:
        if statistic.needs >= PerturbationSpread.needs:
            raise UserError(
                f"statistic {statistic.name} compares two forwards of a text, of which a block sees one; expected "
                f'it in regard.measure(model, tokenizer, texts, statistics="{statistic.name}")'
            )
        if unknown := sorted(statistic.needs - REDUCTIONS.keys()):
            raise UserError(
                f"statistic {statistic.name} needs unknown {unknown[0]!r}; choose from {', '.join(REDUCTIONS)}"
            )
    needs = frozenset[str]().union(*(statistic.needs for statistic in statistics))
    return sorted(needs.union(*(REDUCTIONS[name].requires for name in needs)))


def check_layers(layers: Any, count: int) -> frozenset[int]:
    """Return the indices of layers. Raise a UserError for what is no index of a model with so many layers."""
    values = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    try:
        indices = [operator.index(layer) for layer in values]
    except TypeError:
        raise UserError(f"layers: expected indices of layers, counted from 0, got {layers!r}") from None
    if not indices:
        raise UserError("layers: expected one layer at least, got none; pass None for all")
    if unknown := [layer for layer in indices if not EMBEDDING_LAYER <= layer < count]:
        raise UserError(
            f"layers: this model has no layer {unknown[0]}; choose from 0 to {count - 1}, or {EMBEDDING_LAYER} for the "
            "embeddings"
        )
    return frozenset(indices)
