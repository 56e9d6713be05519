"""The interface of all statistics: `update`, `merge`, `result`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from regard.errors import UserError
from regard.statistics.columns import Columns, StatisticRow, make_columns
from regard.statistics.moments import RunningMoments, expand_mask
from regard.statistics.observation import Observation
from regard.statistics.waiting_samples import WaitingSamples

MAX_ALPHA = 1.001
"""α_k is an average of weights: it is above 1 by rounding only."""
GU, BAI = "Gu et al. 2025 (arXiv 2410.10781)", "Bai et al. 2024 (arXiv 2410.05648)"


@dataclass(frozen=True, kw_only=True)
class StatisticInfo:
    """The description of a statistic, as reports and documentation show it."""

    title: str
    unit: str = ""
    description: str
    source: str


class StatisticKey(NamedTuple):
    """The key of a group of numbers, whose tensor has the axes `axes`: some of "head" and "position".

    With `axes` ("mode",) the tensor is an indicator of an index of each sample, and the row is the most frequent index.
    With `more_layers` it is that of several layers, whose samples stand one behind the other.
    """

    statistic: str
    site: str
    layer: int | None
    epsilon: float | None
    axes: tuple[str, ...]
    more_layers: tuple[int, ...] = ()


MAX_JOINED = 1 << 14
"""Most entries of the values of a layer that are joined with those of others."""


OF_BATCHES = ("update", "merge", "result", "columns", "state", "load", "settle")
"""Methods of a statistic that add samples or read them, so that they must know of those that wait."""


class SampleValues(NamedTuple):
    """Values (sample, *axes), which count where `present`; and the α_k that they come from, none of which is over 1."""

    key: StatisticKey
    values: Tensor
    present: Tensor | None = None
    alpha: Tensor | None = None


Self = TypeVar("Self", bound="Statistic")
SelfAverage = TypeVar("SelfAverage", bound="Average")


class Statistic(ABC):
    """A quantity over samples. Updates and merges give the same result in any order.

    Attributes:
        needs: Names of the reductions that observations must hold.
        num_first_keys: Number of keys that `first_mass` covers, if it is needed.
        special_ids: Token ids whose modality is "special", if it needs modalities.
        joins_layers: It takes several layers as one observation, which costs less; see `Observation.more_layers`.
        joins_batches: It takes samples of several batches as of one, which costs less, and settles before it is read. A
            class with an `update`, `result`, … of its own does so only if it says so again.
        is_used: A block has added its samples, so that those of another would be counted together with them.
    """

    name: str
    info: StatisticInfo
    needs: frozenset[str]
    num_first_keys: int = 1
    special_ids: frozenset[int] = frozenset()
    joins_layers: bool = False
    joins_batches: bool = False
    is_used: bool = False
    _waiting_samples: WaitingSamples | None = None

    def __init_subclass__(cls) -> None:
        """Give batches as they come to a class that adds or reads them in its own way, unless it takes them joined."""
        super().__init_subclass__()
        if "joins_batches" not in vars(cls) and not vars(cls).keys().isdisjoint(OF_BATCHES):
            cls.joins_batches = False

    def add_later(self, layers: Sequence[Observation]) -> None:
        """Add some samples, with later ones of the same shape if it takes several batches, else by `update` at once."""
        if not self.joins_batches:
            self.update(layers)
            return
        if self._waiting_samples is None:
            self._waiting_samples = WaitingSamples()
        if not self._waiting_samples.add(layers, self.needs):
            self._settle_samples()
            if not self._waiting_samples.add(layers, self.needs):
                self.update(layers)

    def _settle_samples(self) -> None:
        layers = [] if self._waiting_samples is None else self._waiting_samples.take()
        if layers:
            self.update(layers)

    @abstractmethod
    def update(self, layers: Sequence[Observation]) -> None:
        """Add some samples, by all their observed layers."""

    @abstractmethod
    def merge(self: Self, other: Self) -> None:
        """Add the samples of another statistic of the same kind."""

    @abstractmethod
    def result(self) -> list[StatisticRow]:
        """Return the rows of the table."""

    def columns(self) -> Iterator[Columns]:
        """Yield the rows of the table as columns, which take less time and memory than `result`."""
        return make_columns(self.result())

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return named tensors from which another process can merge it."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was added by a state."""

    def settle(self) -> None:
        """Compute what is left to compute of the samples so far; reading the statistic does so, too."""
        self._settle_samples()


class Average(Statistic):
    """The mean over samples of a value of each sample. Numbers stay on their device until they are read."""

    def __init__(self) -> None:
        self._moments: dict[StatisticKey, RunningMoments] = {}
        self._max_alpha: dict[StatisticKey, Tensor] = {}

    @abstractmethod
    def sample_values(self, layers: Sequence[Observation]) -> Iterable[SampleValues]:
        """Return the values of each sample, from all its layers."""

    def key(self, layer: Observation, *axes: str, epsilon: float | None = None, suffix: str = "") -> StatisticKey:
        """Return the key of a group of numbers of a layer."""
        return StatisticKey(self.name + suffix, layer.site, layer.layer, epsilon, axes, layer.more_layers)

    def update(self, layers: Sequence[Observation]) -> None:
        samples = max((len(layer.length) // len(layer.layers) for layer in layers), default=0)
        for key, values, present, alpha in _join_values(self.sample_values(layers)):
            if len(values) > samples * (1 + len(key.more_layers)):
                raise UserError(
                    f"statistic {self.name}: expected values of at most {samples} samples for layer {key.layer}, got "
                    f"{len(values)}; joined layers need the keys of self.key(layer, …), or joins_layers = False"
                )
            if present is not None:
                present = _to_layers(key, expand_mask(present, values))
            values = _to_layers(key, values)
            self._moments.setdefault(key, RunningMoments()).add(values, present)
            if alpha is not None and alpha.numel():
                self._add_max_alpha(key, alpha.detach().unflatten(0, (1 + len(key.more_layers), -1)).flatten(1).amax(1))

    def merge(self: SelfAverage, other: SelfAverage) -> None:
        self._settle_samples()
        other._settle_samples()
        for key, moments in other._moments.items():
            self._moments.setdefault(key, RunningMoments()).merge(moments)
        for key, alpha in other._max_alpha.items():
            self._add_max_alpha(key, alpha)

    def settle(self) -> None:
        self._settle_samples()
        for moments in self._moments.values():
            moments.settle()

    def _add_max_alpha(self, key: StatisticKey, alpha: Float[Tensor, " layer"]) -> None:
        before = self._max_alpha.get(key)
        self._max_alpha[key] = alpha if before is None else torch.maximum(before, alpha.to(before.device))

    def _check_alpha(self) -> None:
        """Raise a UserError if an α_k is above 1."""
        self._settle_samples()
        for key, maxima in self._max_alpha.items():
            for layer, alpha in zip((key.layer, *key.more_layers), maxima.tolist(), strict=True):
                if alpha > MAX_ALPHA:
                    raise UserError(
                        f"impossible attention in layer {layer} ({key.site}): a key receives {alpha:.3g} of the "
                        "queries that may see it, more than all; the mask of this model is not understood, please "
                        "report it"
                    )

    def moments(self) -> Iterator[tuple[StatisticKey, RunningMoments]]:
        """Yield the moments of each group of numbers of a layer, in the order of the table."""
        self._settle_samples()
        parts: dict[StatisticKey, list[RunningMoments]] = {}
        for key, joined in self._moments.items():
            by_layer = joined.split() if key.more_layers else [joined]
            for layer, part in zip((key.layer, *key.more_layers), by_layer, strict=True):
                parts.setdefault(key._replace(layer=layer, more_layers=()), []).append(part)
        for key in sorted(parts, key=_order):
            merged, *others = parts[key]
            for other in others:
                merged = merged.merged(other)
            yield key, merged

    def result(self) -> list[StatisticRow]:
        return [row for part in self.columns() for row in part.rows()]

    def columns(self) -> Iterator[Columns]:
        self._check_alpha()
        for key, moments in self.moments():
            yield from _columns(key, moments)

    def state(self) -> dict[str, Tensor]:
        self._settle_samples()
        state = {json.dumps(("alpha", key)): alpha.double().cpu() for key, alpha in self._max_alpha.items()}
        return state | {json.dumps(("moments", key)): moments.state().cpu() for key, moments in self._moments.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._moments, self._max_alpha, self._waiting_samples = {}, {}, None
        for name, tensor in state.items():
            kind, (statistic, site, layer, epsilon, axes, more_layers) = json.loads(name)
            key = StatisticKey(statistic, site, layer, epsilon, tuple(axes), tuple(more_layers))
            if kind == "alpha":
                self._max_alpha[key] = tensor.clone()
            else:
                self._moments[key] = RunningMoments(*(part.clone() for part in tensor))


class PerLayer(Average):
    """An average of which each group of numbers comes from one layer."""

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            if self.needs <= layer.tensors.keys():
                yield from self.layer_values(layer)

    @abstractmethod
    def layer_values(self, layer: Observation) -> Iterable[SampleValues]:
        """Return the values of each sample, from one layer."""


def _join_values(parts: Iterable[SampleValues]) -> Iterator[SampleValues]:
    """Yield the values of layers that have small ones of one shape as those of joined layers, and others as they are.

    What it takes to add some values is the same for one layer as for all of them.
    """
    groups: dict[Any, list[SampleValues]] = {}
    for part in parts:
        key, values, present, alpha = part
        if key.layer is None or key.more_layers or alpha is not None or values.numel() > MAX_JOINED:
            yield part
            continue
        tensors = [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in part[1:3]]
        groups.setdefault((key._replace(layer=None), *tensors), []).append(part)
    for group in groups.values():
        if len(group) == 1:
            yield group[0]
            continue
        key, _, present, _ = group[0]
        more_layers = tuple(part.key.layer for part in group[1:] if part.key.layer is not None)
        masks = None if present is None else torch.cat([part.present for part in group if part.present is not None])
        values = torch.cat([part.values for part in group])
        yield SampleValues(key._replace(more_layers=more_layers), values, masks)


def _columns(key: StatisticKey, moments: RunningMoments) -> Iterator[Columns]:
    """Yield the entries that have samples."""
    if moments.count.device.type != "cpu":
        moments = RunningMoments(*moments.state().cpu())
    count = moments.count.expand_as(moments.mean)
    mask = count > 0
    if not mask.any():
        return
    if key.axes == ("mode",):
        mode, samples = int((moments.mean * count).round().argmax()), int(count.max())
        yield from make_columns(
            [StatisticRow(key.statistic, key.layer, None, None, key.epsilon, float(mode), None, samples, key.site)]
        )
        return
    index = dict(zip(key.axes, torch.nonzero(mask).T.int().numpy(), strict=True))
    value, error = moments.mean[mask].numpy(), moments.standard_error()[mask].numpy()
    n = count[mask].numpy().astype(np.int64)
    yield Columns(*key[:4], index.get("head"), index.get("position"), value, error, n)


def _to_layers(key: StatisticKey, values: Shaped[Tensor, "layer_and_sample ..."]) -> Shaped[Tensor, "sample ..."]:
    """Return values by sample; those of joined layers with an axis of layers behind."""
    return values if not key.more_layers else values.unflatten(0, (1 + len(key.more_layers), -1)).transpose(0, 1)


def _order(key: StatisticKey) -> tuple[Any, ...]:
    return key.statistic, key.site, key.epsilon or 0.0, -2 if key.layer is None else key.layer, key.axes
