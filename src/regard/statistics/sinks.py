"""Statistics of attention sinks: keys that receive attention whatever they mean."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.errors import UserError
from regard.statistics.layers import per_key
from regard.statistics.observation import Observation
from regard.statistics.statistic import BAI, GU, Average, PerLayer, SampleValues, StatisticInfo

PERCENT = 100.0
PerKey = Float[Tensor, "sample head key"]
RealKeys = Bool[Tensor, "sample key"]
TopKeys = Int[Tensor, "sample head top"]


def alpha_of_keys(layer: Observation, column_mass: PerKey) -> PerKey:
    """Return α_k = Σ_i A_ik / n_k of the first keys of a layer (Gu et al. 2025), from their `column_mass` Σ_i A_ik.

    n_k counts the queries that may see the key (`Observation.num_visible_queries`). Keys of no sample have an α_k of 0.
    """
    width = column_mass.shape[-1]
    alpha = column_mass / layer.num_visible_queries(width)[:, None].clamp(min=1)
    return alpha.masked_fill(~layer.attended_keys(width)[:, None], 0.0)


def sink_rate(alpha: PerKey, epsilon: float) -> PerKey:
    """Return 100 if α_k > ε, else 0."""
    return (alpha > epsilon).to(alpha.dtype) * PERCENT


def sink_deviation(mass: PerKey, square: PerKey, queries: Int[Tensor, " sample"]) -> PerKey:
    """Return Δ_i = √(Σ_k (a_ki − d_i)²) / (n d_i), d_i = Σ_k a_ki / n, from Σ a_ki and Σ a_ki² (Bai et al. 2024).

    Both sums must be of float64: in a column of nearly equal weights they differ in their last digits only.
    """
    mass, square = mass.double(), square.double()
    n = queries[:, None, None].clamp(min=1)
    scatter = (square - mass.square() / n).clamp(min=0)
    return scatter.sqrt() / mass.clamp(min=torch.finfo(torch.float64).tiny)


def topk_keys(column_mass: PerKey, real: RealKeys, top: int) -> TopKeys:
    """Return the `top` keys of greatest mass, the greatest first, of equal ones the earlier; padding is at the end."""
    mass = column_mass.masked_fill(~real[:, None], -torch.inf)
    if top == 1:
        return mass.argmax(-1, keepdim=True)
    return mass.sort(dim=-1, descending=True, stable=True).indices[..., :top]


def at_keys(values: Shaped[Tensor, "sample key"], index: TopKeys) -> Shaped[Tensor, "sample head top"]:
    """Return what keys have, at those of an index such as `topk_keys`."""
    return values[:, None].expand(-1, index.shape[1], -1).gather(-1, index)


def strongest_keys(layer: Observation, top: int) -> tuple[RealKeys, TopKeys, Bool[Tensor, "sample head top"]]:
    """Return which keys of a layer are real, its `topk_keys`, and which of those are real."""
    mass = layer.tensors["column_mass"]
    real = layer.attended_keys(mass.shape[-1])
    index = topk_keys(mass, real, top)
    return real, index, at_keys(real, index)


class SinkRate(Average):
    """Sink_k^ε of each position k: by head, and over all layers and heads of a sample.

    `epsilons` are the thresholds ε. Positions that fewer than `minimum_queries` queries see do not count.
    """

    name = "sink_rate"
    info = StatisticInfo(
        title="Sink rate",
        unit="%",
        description="Share of samples in which the position receives more than ε of the attention of the queries "
        "that may see it; without layer and head: mean over all heads (Sink_k^ε).",
        source=f"{GU}, Sink_k^ε",
    )
    needs = frozenset({"column_mass"})
    joins_layers = joins_batches = True

    def __init__(self, epsilons: Sequence[float] = (0.3,), minimum_queries: int = 8) -> None:
        super().__init__()
        if not epsilons or not all(0 < e < 1 for e in epsilons):
            raise UserError(f"epsilon must lie between 0 and 1, got {list(epsilons)}")
        if minimum_queries < 1:
            raise UserError(f"minimum_queries must be at least 1, got {minimum_queries}")
        self.epsilons = tuple(dict.fromkeys(map(float, epsilons)))
        self.minimum_queries = minimum_queries

    def eligible_alpha(self, layer: Observation) -> tuple[PerKey, RealKeys]:
        """Return α_k of the keys of a layer, and which keys enough queries see."""
        mass = layer.tensors["column_mass"]
        queries = layer.num_visible_queries(mass.shape[-1])
        present = layer.key_mask(mass.shape[-1]) & (queries >= self.minimum_queries)
        return alpha_of_keys(layer, mass), present

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        by_head: dict[Any, list[Tensor]] = {}
        presence: dict[str, list[Tensor]] = {}
        for layer in layers:
            if "column_mass" not in layer.tensors:
                continue
            alpha, present = self.eligible_alpha(layer)
            presence.setdefault(layer.site, []).extend(_by_layer(layer, present))
            for epsilon in self.epsilons:
                rates = sink_rate(alpha, epsilon)
                key = self.key(layer, "head", "position", epsilon=epsilon)
                yield SampleValues(key, rates, present, alpha if epsilon == self.epsilons[0] else None)
                pooled = key._replace(layer=None, axes=("position",), more_layers=())
                by_head.setdefault(pooled, []).extend(_by_layer(layer, rates.double()))
        for key, parts in by_head.items():
            yield SampleValues(key, torch.cat(parts, dim=1).mean(1), torch.stack(presence[key.site]).all(0))


def _by_layer(layer: Observation, values: Tensor) -> Tensor:
    return values.unflatten(0, (len(layer.layers), -1))


class SecondarySinks(SinkRate):
    """The number of sinks beyond the first key, of each head."""

    name = "secondary_sinks"
    info = StatisticInfo(
        title="Secondary sinks",
        unit="keys",
        description="Number of keys beyond the first that receive more than ε of the attention of the queries that may "
        "see them (α_k > ε, k > 0).",
        source=f"{GU}, α_k; sinks at later positions: Yu et al. 2024 (arXiv 2406.15765), Cancedda 2024 "
        "(arXiv 2402.09221)",
    )

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            if "column_mass" in layer.tensors:
                alpha, eligible = self.eligible_alpha(layer)
                eligible = eligible & (torch.arange(eligible.shape[-1], device=eligible.device) > 0)
                for epsilon in self.epsilons:
                    key = self.key(layer, "head", epsilon=epsilon)
                    count = (sink_rate(alpha, epsilon).bool() & eligible[:, None]).sum(-1).double()
                    yield SampleValues(key, count, eligible.any(-1), alpha if epsilon == self.epsilons[0] else None)


class ColumnMass(PerLayer):
    """d_i, the average outer degree of each key."""

    name = "column_mass"
    info = StatisticInfo(
        title="Column mass",
        description="Average outer degree d_i: attention that a position receives, averaged over all queries.",
        source=f"{BAI}, average outer degree",
    )
    needs = frozenset({"column_mass"})
    joins_layers = joins_batches = True

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        return per_key(self, layer, layer.tensors["column_mass"])


class FirstMass(PerLayer):
    """α_k of the first `num_first_keys` keys alone, at the cost of one product a query and key."""

    name = "first_mass"
    info = StatisticInfo(
        title="First-token mass",
        description="Attention to the first tokens, averaged over the queries that may see them.",
        source=f"{GU}, α_1",
    )
    needs = frozenset({"first_mass"})
    joins_layers = joins_batches = True

    def __init__(self, num_first_keys: int = 4) -> None:
        super().__init__()
        self.num_first_keys = num_first_keys

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        mass = layer.tensors["first_mass"]
        real = layer.query_mask(mass.shape[2])
        sums = mass.masked_fill(~real[:, None, :, None], 0.0).sum(2)
        alpha = alpha_of_keys(layer, sums)
        yield SampleValues(self.key(layer, "head", "position"), alpha, layer.attended_keys(sums.shape[-1]), alpha)


class SinkDeviation(PerLayer):
    """The deviation of attention to the `top` strongest keys of a head over queries."""

    name = "sink_deviation"
    info = StatisticInfo(
        title="Sink deviation",
        description="Δ of the strongest column(s): 0 if all queries attend to it alike.",
        source=f"{BAI}, sink deviation",
    )
    needs = frozenset({"column_mass", "column_sum", "column_square"})
    joins_layers = joins_batches = True

    def __init__(self, top: int = 1) -> None:
        super().__init__()
        self.top = top

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        total, square = layer.tensors["column_sum"], layer.tensors["column_square"]
        real, index, valid = strongest_keys(layer, self.top)
        deviation = sink_deviation(total, square, layer.length).gather(-1, index).masked_fill(~valid, 0.0)
        yield SampleValues(self.key(layer, "head"), deviation.sum(-1) / valid.sum(-1).clamp(min=1), real.any(-1))
