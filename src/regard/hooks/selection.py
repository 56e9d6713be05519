"""What a block is asked to measure: the reductions that its statistics need, and its layers."""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.attention.reduction import ReductionRequest
from regard.errors import UserError
from regard.hooks.numbering import BlockCounter
from regard.hooks.reductions import REDUCTIONS, AttentionIO
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


OF_KEYS = ("cosine_sum", "key_norm", "norm_sum")
"""Reductions of the entries of keys."""


class WantedReductions:
    """The reductions that statistics need.

    Attributes:
        request: Those of weights.
        vectors: Names of those of queries, keys and values.
        projection: Names of those of what output projections receive.
        hidden: Names of those of hidden states.
        join_calls: Whether calls of several layers may be reduced as one.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        by_source: dict[str, list[str]] = {"weights": [], "vectors": [], "projection": [], "hidden": []}
        for name in required_reductions(statistics):
            by_source[REDUCTIONS[name].source].append(name)
        weights, self.vectors, self.projection, self.hidden = by_source.values()
        num_first_keys = max((statistic.num_first_keys for statistic in statistics), default=1)
        self.request = ReductionRequest(names=frozenset(weights), num_first_keys=num_first_keys)
        of_call = (REDUCTIONS[name] for name in weights + self.vectors)
        self._of_keys = [statistic.name for statistic in statistics if needs_any(statistic, OF_KEYS)]
        self.join_calls = not self.projection and all(reduction.joins_calls for reduction in of_call)

    def of_call(self, io: AttentionIO, reductions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a call's weights, of which more may be known, and those of its vectors.

        Raise a UserError for those of keys where nothing tells which keys made the scores.
        """
        if self._of_keys and not io.call.keys_are_told:
            raise UserError(
                "cannot tell which keys made the scores: they are no plain sum of products of queries and keys, or "
                f"change places behind their product; leave out {', '.join(self._of_keys)}"
            )
        tensors = {name: reductions[name] for name in self.request.names}
        if "first_mass" in tensors:
            tensors["first_mass"] = tensors["first_mass"][..., : self.request.num_first_keys]
        vectors = {name: REDUCTIONS[name].compute(io) for name in self.vectors}
        return tensors | {name: tensor for name, tensor in vectors.items() if tensor is not None}


def check_layers(layers: Any, count: int | None) -> frozenset[int]:
    """Return the indices of layers. Raise a UserError for what is no index of a model with so many layers.

    `count` is None where only a forward shows how many there are.
    """
    values = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    try:
        indices = [operator.index(layer) for layer in values]
    except TypeError:
        raise UserError(f"layers: expected indices of layers, counted from 0, got {layers!r}") from None
    if not indices:
        raise UserError("layers: expected one layer at least, got none; pass None for all")
    if unknown := [layer for layer in indices if layer < EMBEDDING_LAYER or (count is not None and layer >= count)]:
        choices = "from 0 on" if count is None else f"from 0 to {count - 1}"
        raise UserError(
            f"layers: this model has no layer {unknown[0]}; choose {choices}, or {EMBEDDING_LAYER} for the embeddings"
        )
    return frozenset(indices)


def check_attending(layers: frozenset[int] | None, attending: Collection[int], names: Sequence[str]) -> None:
    """Check that some selected layer has the attention that these statistics need. Raises UserError.

    `layers` are those selected (None: all), and `attending` those that have attended so far.
    """
    if attending and names and layers is not None and layers.isdisjoint(attending):
        selected, others = (", ".join(map(str, sorted(indices))) for indices in (layers, attending))
        raise UserError(
            f"layers: there is no attention in {selected}, but {', '.join(names)} measure it; choose from {others}"
            ", or statistics of hidden states alone"
        )


def check_hidden(layers: frozenset[int] | None, counters: Sequence[BlockCounter], names: Sequence[str]) -> None:
    """Check that some selected layer of some stack has the hidden states that these statistics need.

    Args:
        layers: Those selected; None: all.
        counters: One of each stack.
        names: The statistics.

    Raises:
        UserError: None of them ends a block.
    """
    if not names or layers is None:
        return
    if not any(counter.has_hidden(layer) for counter in counters for layer in layers):
        selected = ", ".join(map(str, sorted(layers)))
        raise UserError(
            f"layers: no block ends with {selected}, but {', '.join(names)} measure{'s' * (len(names) == 1)} its "
            "output; choose the last layer of a block, or leave them out"
        )
