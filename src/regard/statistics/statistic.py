"""The interface of all statistics: `update`, `merge`, `result`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.statistics.moments import RunningMoments
from regard.statistics.observation import Observation


@dataclass(frozen=True, kw_only=True)
class StatisticInfo:
    """What a reader needs to know of a statistic."""

    title: str
    unit: str
    description: str
    source: str


class StatisticRow(NamedTuple):
    """One number of a result, as it stands in the table."""

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
    """What a group of numbers is about. `axes` names the axes of its tensor, among head and position."""

    statistic: str
    site: str
    layer: int | None
    epsilon: float | None
    axes: tuple[str, ...]


class SampleValues(NamedTuple):
    """A value per sample: (sample, *axes), counted where `present`."""

    key: StatisticKey
    values: Tensor
    present: Tensor | None = None


Self = TypeVar("Self", bound="Statistic")


class Statistic(ABC):
    """Something measured over samples: stepwise = at once = merged in any order.

    `needs` names the reductions that the slot must supply. `update` is given all observed layers of the same samples.
    """

    name: str
    info: StatisticInfo
    needs: frozenset[str]
    num_first_keys: int = 1
    """How many keys `first_mass` covers, if it is needed."""

    @abstractmethod
    def update(self, layers: Sequence[Observation]) -> None:
        """Count in some samples, by all their observed layers."""

    @abstractmethod
    def merge(self: Self, other: Self) -> None:
        """Count in all that another of the same kind has seen."""

    @abstractmethod
    def result(self) -> list[StatisticRow]:
        """The rows of the table."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that has been seen, as named tensors: what another process needs to merge it."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state."""


class Average(Statistic):
    """A statistic that is the mean over samples of something known of each sample."""

    def __init__(self) -> None:
        self.moments: dict[StatisticKey, RunningMoments] = {}

    @abstractmethod
    def sample_values(self, layers: Sequence[Observation]) -> Iterable[SampleValues]:
        """What is known of each sample."""

    def update(self, layers: Sequence[Observation]) -> None:
        for key, values, present in self.sample_values(layers):
            self.moments.setdefault(key, RunningMoments()).add(values, present)

    def merge(self, other: Average) -> None:
        for key, moments in other.moments.items():
            self.moments.setdefault(key, RunningMoments()).merge(moments)

    def result(self) -> list[StatisticRow]:
        return [row for key in sorted(self.moments, key=_order) for row in _rows(key, self.moments[key])]

    def state(self) -> dict[str, Tensor]:
        return {_encode(key): moments.state() for key, moments in self.moments.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.moments = {_decode(name): RunningMoments.from_state(tensor) for name, tensor in state.items()}


class PerLayer(Average):
    """An average to which every layer contributes on its own."""

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            if self.needs <= layer.tensors.keys():
                yield from self.layer_values(layer)

    @abstractmethod
    def layer_values(self, layer: Observation) -> Iterable[SampleValues]:
        """What one layer says of each sample."""

    def key(self, layer: Observation, *axes: str, epsilon: float | None = None, suffix: str = "") -> StatisticKey:
        """The key of a group of numbers of this layer."""
        return StatisticKey(self.name + suffix, layer.site, layer.layer, epsilon, axes)


def _rows(key: StatisticKey, moments: RunningMoments) -> Iterator[StatisticRow]:
    """One row per entry that has been seen."""
    seen = moments.count > 0
    index = dict(zip(key.axes, torch.nonzero(seen).T.tolist(), strict=True))
    numbers = (moments.mean[seen].tolist(), moments.standard_error()[seen].tolist(), moments.count[seen].tolist())
    absent = [None] * len(numbers[0])
    places = (index.get("head", absent), index.get("position", absent))
    for head, position, mean, error, count in zip(*places, *numbers, strict=True):
        known = error if error == error else None
        yield StatisticRow(key.statistic, key.layer, head, position, key.epsilon, mean, known, int(count), key.site)


def _order(key: StatisticKey) -> tuple[Any, ...]:
    layer = -2 if key.layer is None else key.layer
    return key.statistic, key.site, key.epsilon or 0.0, layer, key.axes


def _encode(key: StatisticKey) -> str:
    layer = "" if key.layer is None else str(key.layer)
    epsilon = "" if key.epsilon is None else repr(key.epsilon)
    return "|".join([key.statistic, key.site, layer, epsilon, ",".join(key.axes)])


def _decode(text: str) -> StatisticKey:
    statistic, site, layer, epsilon, axes = text.split("|")
    return StatisticKey(
        statistic,
        site,
        int(layer) if layer else None,
        float(epsilon) if epsilon else None,
        tuple(axes.split(",")) if axes else (),
    )
