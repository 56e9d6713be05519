"""Statistics of the tokens at which attention sinks lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.statistics.columns import Columns, StatisticRow, make_columns
from regard.statistics.observation import Observation
from regard.statistics.sinks import PERCENT, SinkRate, at_keys, sink_rate, strongest_keys
from regard.statistics.statistic import BAI, GU, PerLayer, SampleValues, Statistic, StatisticInfo

Key = TypeVar("Key", bound=Hashable)


class CommonSinkRatio(PerLayer):
    """The share of a layer's sink tokens, `top` of each head, that are common tokens.

    Args:
        common: Ids of common tokens, such as special tokens and punctuation. None: the tokens in more than `frequent`
            of the samples, which are counted, so that there is no standard error.
    """

    name = "common_sink_ratio"
    info = StatisticInfo(
        title="Common-sink ratio",
        unit="%",
        description="Share of the strongest columns (one per head and sample) that are common tokens.",
        source=f"{BAI}, common-sink ratio",
    )
    needs = frozenset({"column_mass"})
    joins_layers = joins_batches = True

    def __init__(self, common: Iterable[int] | None = None, *, top: int = 1, frequent: float = 0.5) -> None:
        super().__init__()
        self.common = None if common is None else frozenset(common)
        self.top, self.frequent = top, frequent
        self._sinks: dict[tuple[str, int], Counter[int]] = {}
        self._documents: dict[str, Counter[int]] = {}
        self._samples: Counter[str] = Counter()

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        if layer.token_ids is None or self.common is None:
            return
        real, index, valid = strongest_keys(layer, self.top)
        common = torch.tensor(sorted(self.common), dtype=torch.long, device=index.device)
        is_common = torch.isin(_tokens_at(layer, index), common) & valid
        share = is_common.sum((1, 2)) / valid.sum((1, 2)).clamp(min=1) * PERCENT
        yield SampleValues(self.key(layer), share, real.any(-1))

    def update(self, layers: Sequence[Observation]) -> None:
        if self.common is not None:
            super().update(layers)
            return
        tensors: dict[Any, tuple[Tensor, ...]] = {}
        for layer in layers:
            if layer.token_ids is None or "column_mass" not in layer.tensors:
                continue
            real, index, valid = strongest_keys(layer, self.top)
            tensors[layer.site, layer.layers] = _tokens_at(layer, index), valid
            samples = len(real) // len(layer.layers)
            tensors.setdefault(layer.site, (layer.token_ids[:samples, : real.shape[1]], real[:samples]))
        for key, (tokens, mask) in _read(tensors).items():
            if isinstance(key, tuple):
                site, numbers = key
                parts = (np.split(array, len(numbers)) for array in (tokens, mask > 0))
                for number, found, is_valid in zip(numbers, *parts, strict=True):
                    self._sinks.setdefault((site, number), Counter()).update(found[is_valid].tolist())
                continue
            self._samples[key] += int(mask.any(-1).sum())
            for ids, is_real in zip(tokens, mask > 0, strict=True):
                self._documents.setdefault(key, Counter()).update(set(ids[is_real].tolist()))

    def merge(self, other: CommonSinkRatio) -> None:
        super().merge(other)
        for key, counts in other._sinks.items():
            self._sinks.setdefault(key, Counter()).update(counts)
        for site, documents in other._documents.items():
            self._documents.setdefault(site, Counter()).update(documents)
        self._samples.update(other._samples)

    def common_tokens(self, site: str) -> frozenset[int]:
        """Return the common tokens of a site: `common`, or those that are frequent so far."""
        if self.common is not None:
            return self.common
        self._settle_samples()
        threshold = self.frequent * self._samples[site]
        return frozenset(token for token, count in self._documents.get(site, Counter()).items() if count > threshold)

    def columns(self) -> Iterator[Columns]:
        yield from super().columns()
        yield from make_columns(self._pooled_rows())

    def _pooled_rows(self) -> Iterator[StatisticRow]:
        for (site, layer), sinks in sorted(self._sinks.items()):
            if sinks:
                common = self.common_tokens(site)
                share = PERCENT * sum(n for token, n in sinks.items() if token in common) / sinks.total()
                yield StatisticRow(self.name, layer, None, None, None, share, None, self._samples[site], site)

    def state(self) -> dict[str, Tensor]:
        state = super().state()
        state |= {f"sinks|{site}|{layer}": _to_tensor(counts.items()) for (site, layer), counts in self._sinks.items()}
        state |= {f"documents|{site}|": _to_tensor(counts.items()) for site, counts in self._documents.items()}
        return state | {f"samples|{site}|": torch.tensor([[0, n]]) for site, n in self._samples.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._sinks, self._documents, self._samples = {}, {}, Counter()
        super().load(state if self.common is not None else {})
        for name, tensor in state.items() if self.common is None else ():
            kind, site, layer = name.split("|")
            counts = Counter(dict(tensor.tolist()))
            if kind == "sinks":
                self._sinks[site, int(layer)] = counts
            elif kind == "documents":
                self._documents[site] = counts
            else:
                self._samples[site] = counts[0]


class SinksByTokenClass(SinkRate):
    """Attention to the first token, to special tokens, to delimiters and to others, and the sinks that are of a class.

    A token belongs to the first class that fits. A class without ids is left out, and its tokens are of the last.

    Args:
        special: Ids of special tokens.
        delimiters: Ids of punctuation and line breaks.
        epsilons: Thresholds ε of a sink, α_k > ε.
        minimum_queries: Keys that fewer queries see do not count.
    """

    name = "sinks_by_token_class"
    info = StatisticInfo(
        title="Sinks by token class",
        description="Mean α_k of the keys of a class: first token, special tokens, delimiters, others; share: those of "
        "a layer's sinks (α_k > ε, any head) that are of the class (%).",
        source=f"{GU}, α_k; classes after {BAI}, common tokens",
    )

    def __init__(
        self,
        special: Iterable[int] = (),
        delimiters: Iterable[int] = (),
        epsilons: Sequence[float] = (0.3,),
        minimum_queries: int = 8,
    ) -> None:
        super().__init__(epsilons, minimum_queries)
        self.classes = {"special": sorted(set(special)), "delimiter": sorted(set(delimiters))}

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            if "column_mass" not in layer.tensors or (layer.token_ids is None and any(self.classes.values())):
                continue
            alpha, eligible = self.eligible_alpha(layer)
            sinks = {epsilon: sink_rate(alpha, epsilon).bool() & eligible[:, None] for epsilon in self.epsilons}
            for name, members in self._members(layer, eligible):
                count = members.sum(-1)
                mean = alpha.double().masked_fill(~members[:, None], 0.0).sum(-1) / count[:, None].clamp(min=1)
                key = self.key(layer, "head", suffix=f"_{name}")
                yield SampleValues(key, mean, count > 0, alpha if name == "first" else None)
                for epsilon, is_sink in sinks.items():
                    total = is_sink.sum((1, 2))
                    share = (is_sink & members[:, None]).sum((1, 2)).double() / total.clamp(min=1) * PERCENT
                    key = self.key(layer, epsilon=epsilon, suffix=f"_{name}_share")
                    yield SampleValues(key, share, total > 0)

    def _members(self, layer: Observation, eligible: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the classes with the eligible keys (sample, key) that belong to each."""
        rest = eligible.clone()
        rest[:, :1] = False
        yield "first", eligible & ~rest
        for name, ids in self.classes.items():
            if ids:
                assert layer.token_ids is not None
                tokens = layer.token_ids[:, : rest.shape[1]]
                members = rest & torch.isin(tokens, torch.tensor(ids, device=tokens.device))
                yield name, members
                rest = rest & ~members
        yield "other", rest


class SinkTokens(Statistic):
    """Positions and tokens of the strongest column of each head."""

    name = "sink_tokens"
    info = StatisticInfo(
        title="Sink tokens",
        unit="%",
        description="Share of samples in which the head's strongest column stands at the position; with its tokens.",
        source=f"{BAI}, sink tokens",
    )
    needs = frozenset({"column_mass"})
    joins_layers = joins_batches = True

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], Counter[tuple[int, int, int]]] = {}
        self._samples: Counter[tuple[str, int]] = Counter()
        self._shape: dict[tuple[str, int], tuple[int, int]] = {}
        """Heads, and keys of the longest sample, by site and layer."""

    @property
    def counts(self) -> dict[tuple[str, int], Counter[tuple[int, int, int]]]:
        """Samples by head, position and token id (−1: unknown), for each site and layer."""
        self._settle_samples()
        return self._counts

    def update(self, layers: Sequence[Observation]) -> None:
        tensors: dict[tuple[str, tuple[int, ...]], tuple[Tensor, ...]] = {}
        for layer in layers:
            if "column_mass" not in layer.tensors:
                continue
            real, index, _ = strongest_keys(layer, 1)
            token = _tokens_at(layer, index) if layer.token_ids is not None else torch.full_like(index, -1)
            heads = torch.arange(index.shape[1], device=index.device)[None, :, None].expand_as(index)
            triples = torch.stack([heads, index, token], -1)
            tensors[layer.site, layer.layers] = triples, real.any(-1), layer.keys
        for (site, numbers), arrays in _read(tensors).items():
            parts = (np.split(array, len(numbers)) for array in arrays)
            for number, sinks, is_real, keys in zip(numbers, *parts, strict=True):
                self._counts.setdefault((site, number), Counter()).update(
                    map(tuple, sinks[is_real > 0].reshape(-1, 3).tolist())
                )
                self._samples[site, number] += int(is_real.sum())
                self._grow((site, number), sinks.shape[1], int(keys.max()))

    def _grow(self, key: tuple[str, int], heads: int, keys: int) -> None:
        self._shape[key] = (heads, max(keys, self._shape.get(key, (0, 0))[1]))

    def merge(self, other: SinkTokens) -> None:
        for key, counts in other.counts.items():
            self._counts.setdefault(key, Counter()).update(counts)
        self._samples.update(other._samples)
        for key, shape in other._shape.items():
            self._grow(key, *shape)

    def result(self) -> list[StatisticRow]:
        return [row for part in self.columns() for row in part.rows()]

    def columns(self) -> Iterator[Columns]:
        """Yield a row for each head and position, 0 at positions without a sink, so that means over them are right."""
        for (site, layer), counts in sorted(self.counts.items()):
            n, shape = self._samples[site, layer], self._shape[site, layer]
            if not n:
                continue
            positions = np.zeros(shape, dtype=np.int64)
            for (head, position, _), count in counts.items():
                positions[head, position] += count
            unique, inverse = np.unique(positions, return_inverse=True)
            shares = (unique / n).tolist()
            errors = [(p * (1 - p) / (n - 1)) ** 0.5 * PERCENT if n > 1 else math.nan for p in shares]
            value = np.array([share * PERCENT for share in shares])[inverse.ravel()]
            heads, keys = np.indices(shape, dtype=np.int32).reshape(2, -1)
            error, n_column = np.array(errors)[inverse.ravel()], np.full(len(value), n, dtype=np.int64)
            yield Columns(self.name, site, layer, None, heads, keys, value, error, n_column)

    def tokens(self) -> list[tuple[str, int, int, int, int, int, float]]:
        """Return rows of site, layer, head, position, token id or −1, count, and share of the samples."""
        return [
            (site, layer, head, position, token, count, count / self._samples[site, layer])
            for (site, layer), counts in sorted(self.counts.items())
            for (head, position, token), count in sorted(counts.items())
        ]

    def state(self) -> dict[str, Tensor]:
        state = {}
        for key, counts in self.counts.items():
            name = "|".join(map(str, (*key, self._samples[key], *self._shape[key])))
            state[name] = _to_tensor(((*triple, n) for triple, n in counts.items()), 4)
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._counts, self._samples, self._shape, self._waiting_samples = {}, Counter(), {}, None
        for name, tensor in state.items():
            site, layer, samples, heads, keys = name.split("|")
            key = (site, int(layer))
            self._shape[key], self._samples[key] = (int(heads), int(keys)), int(samples)
            self._counts[key] = Counter({(h, p, t): n for h, p, t, n in tensor.tolist()})


def _read(tensors: Mapping[Key, Sequence[Tensor]]) -> dict[Key, list[np.ndarray]]:
    """Return integers and masks as arrays of integers, read from a GPU in one copy."""
    parts = [tensor for group in tensors.values() for tensor in group]
    if not parts:
        return {}
    flat = torch.cat([part.flatten().long().to(parts[0].device) for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])
    arrays = iter(zip(np.split(flat, ends[:-1]), parts, strict=True))
    return {
        key: [array.reshape(part.shape) for array, part in islice(arrays, len(group))] for key, group in tensors.items()
    }


def _tokens_at(layer: Observation, index: Tensor) -> Tensor:
    """Return the token ids at key positions (sample, head, top)."""
    assert layer.token_ids is not None
    return at_keys(layer.token_ids, index)


def _to_tensor(rows: Iterable[tuple[int, ...]], width: int = 2) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.long).reshape(-1, width)
