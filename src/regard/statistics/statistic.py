"""The interface of all statistics: `update`, `merge`, `result`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.statistics.moments import RunningMoments

GU = "Gu et al. 2025 (arXiv 2410.10781)"


@dataclass(frozen=True, kw_only=True)
class StatisticInfo:
    """The description of a statistic, as reports and documentation show it."""

    title: str
    unit: str = ""
    description: str
    source: str


class StatisticRow(NamedTuple):
    """One row of the table of results."""

    statistic: str
    layer: int | None
    head: int | None
    position: int | None
    epsilon: float | None
    value: float
    standard_error: float | None
    n: int
    site: str


class StatisticKey(NamedTuple):
    """The key of a group of numbers, whose tensor has the axes `axes`: some of "head" and "position"."""

    statistic: str
    site: str
    layer: int | None
    epsilon: float | None
    axes: tuple[str, ...]


class SampleValues(NamedTuple):
    """Values (sample, *axes), which count where `present`."""

    key: StatisticKey
    values: Tensor
    present: Tensor | None = None


Self = TypeVar("Self", bound="Statistic")
SelfAverage = TypeVar("SelfAverage", bound="Average")


class Statistic(ABC):
    """A quantity over samples. Updates and merges give the same result in any order.

    Attributes:
        needs: Names of the reductions that observations must hold.
        num_first_keys: Number of keys that `first_mass` covers, if it is needed.
    """

    name: str
    info: StatisticInfo
    needs: frozenset[str]
    num_first_keys: int = 1

    @abstractmethod
    def update(self, layers: Sequence[Observation]) -> None:
        """Add some samples, by all their observed layers."""

    @abstractmethod
    def merge(self: Self, other: Self) -> None:
        """Add the samples of another statistic of the same kind."""

    @abstractmethod
    def result(self) -> list[StatisticRow]:
        """Return the rows of the table."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return named tensors from which another process can merge it."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was added by a state."""


class Average(Statistic):
    """The mean over samples of a value of each sample."""

    def __init__(self) -> None:
        self.moments: dict[StatisticKey, RunningMoments] = {}

    @abstractmethod
    def sample_values(self, layers: Sequence[Observation]) -> Iterable[SampleValues]:
        """Return the values of each sample, from all its layers."""

    def update(self, layers: Sequence[Observation]) -> None:
        for key, values, present in self.sample_values(layers):
            self.moments.setdefault(key, RunningMoments()).add(values, present)

    def merge(self: SelfAverage, other: SelfAverage) -> None:
        for key, moments in other.moments.items():
            self.moments.setdefault(key, RunningMoments()).merge(moments)

    def result(self) -> list[StatisticRow]:
        return [row for key in sorted(self.moments, key=_order) for row in _rows(key, self.moments[key])]

    def state(self) -> dict[str, Tensor]:
        return {_encode(key): moments.state() for key, moments in self.moments.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.moments = {_decode(name): RunningMoments.from_state(tensor) for name, tensor in state.items()}


class PerLayer(Average):
    """An average of which each group of numbers comes from one layer."""

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            if self.needs <= layer.tensors.keys():
                yield from self.layer_values(layer)

    @abstractmethod
    def layer_values(self, layer: Observation) -> Iterable[SampleValues]:
        """Return the values of each sample, from one layer."""

    def key(self, layer: Observation, *axes: str, epsilon: float | None = None, suffix: str = "") -> StatisticKey:
        """Return the key of a group of numbers of a layer."""
        return StatisticKey(self.name + suffix, layer.site, layer.layer, epsilon, axes)


def _rows(key: StatisticKey, moments: RunningMoments) -> Iterator[StatisticRow]:
    """Return one row for each entry that has samples."""
    mask = moments.count > 0
    index = dict(zip(key.axes, torch.nonzero(mask).T.tolist(), strict=True))
    numbers = (moments.mean[mask].tolist(), moments.standard_error()[mask].tolist(), moments.count[mask].tolist())
    absent = [None] * len(numbers[0])
    axes = (index.get("head", absent), index.get("position", absent))
    for head, position, mean, error, count in zip(*axes, *numbers, strict=True):
        standard_error = None if math.isnan(error) else error
        yield StatisticRow(
            key.statistic, key.layer, head, position, key.epsilon, mean, standard_error, int(count), key.site
        )


def _order(key: StatisticKey) -> tuple[Any, ...]:
    layer = -2 if key.layer is None else key.layer
    return key.statistic, key.site, key.epsilon or 0.0, layer, key.axes


def _encode(key: StatisticKey) -> str:
    layer = "" if key.layer is None else str(key.layer)
    epsilon = "" if key.epsilon is None else repr(key.epsilon)
    return "|".join([key.statistic, key.site, layer, epsilon, ",".join(key.axes)])


def _decode(text: str) -> StatisticKey:
    statistic, site, layer, epsilon, axes = text.split("|")
    numbers = (int(layer) if layer else None, float(epsilon) if epsilon else None)
    return StatisticKey(statistic, site, *numbers, tuple(axes.split(",")) if axes else ())


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One attention layer over some samples, whose real tokens begin at position 0.

    Attributes:
        site: "decoder" (causal), "encoder" (bidirectional) or "cross".
        layer: Index of the layer; −1 for the embeddings.
        causal: A query sees no key after its own position.
        length: Real queries of each sample.
        keys: Real keys of each sample; other than `length` only in cross-attention.
        token_ids: Token ids of the keys.
        virtual_key: A learned key, with a query of its own in the matrix, gets the attention that no token gets.
        tensors: Reductions by name, shaped as `regard.attention.reduction.Reduction.axis` says, with samples in the
            place of the batch. Entries beyond the length of a sample are arbitrary.
    """

    site: str
    layer: int
    causal: bool
    length: Int[Tensor, " sample"]
    keys: Int[Tensor, " sample"]
    token_ids: Int[Tensor, "sample key"] | None = None
    virtual_key: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def key_mask(self, width: int) -> Bool[Tensor, "sample key"]:
        """Return which of the first `width` positions are keys of a sample."""
        return torch.arange(width, device=self.keys.device) < self.keys[:, None]

    def attended_keys(self, width: int) -> Bool[Tensor, "sample key"]:
        """Return which of the first `width` positions are keys of a sample with queries."""
        return self.key_mask(width) & (self.length > 0)[:, None]

    def query_mask(self, width: int) -> Bool[Tensor, "sample query"]:
        """Return which of the first `width` positions are queries of a sample."""
        return torch.arange(width, device=self.length.device) < self.length[:, None]

    def num_visible_queries(self, width: int) -> Int[Tensor, "sample key"]:
        """Return how many queries may see each of the first `width` keys: T − k in a causal site (k from 0), else all.

        Earlier queries that see a key through a prefix count as well.
        """
        if not self.causal:
            return self.length[:, None].expand(-1, width)
        later = (self.length[:, None] - torch.arange(width, device=self.length.device)).clamp(min=0)
        early = self.tensors.get("prefix_query_count")
        return later if early is None else later + early[:, 0, :width].to(later.dtype)
