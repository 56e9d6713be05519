"""Statistics of the tokens at which attention sinks lie."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from regard.statistics.observation import Observation
from regard.statistics.sinks import BAI, PERCENT, topk_keys, topk_valid
from regard.statistics.statistic import (
    PerLayer,
    SampleValues,
    Statistic,
    StatisticInfo,
    StatisticRow,
)


class CommonSinkRatio(Statistic):
    """The share of a layer's sink tokens that are common tokens.

    Args:
        common: Ids of common tokens, such as special tokens and punctuation. None: the tokens in more than `frequent`
            of the samples, which gives no standard error.
        top: Number of sinks of a head.
        frequent: A share of samples.
    """

    name = "common_sink_ratio"
    info = StatisticInfo(
        title="Common-sink ratio",
        unit="%",
        description="Share of the strongest columns (one per head and sample) that are common tokens.",
        source=f"{BAI}, common-sink ratio",
    )
    needs = frozenset({"column_mass"})

    def __init__(self, common: Iterable[int] | None = None, *, top: int = 1, frequent: float = 0.5) -> None:
        self.common = None if common is None else frozenset(common)
        self.top, self.frequent = top, frequent
        self._known = KnownCommonSinkRatio(self.common, top) if self.common is not None else None
        self._sinks: dict[tuple[str, int], Counter[int]] = {}
        self._documents: dict[str, Counter[int]] = {}
        self._samples: Counter[str] = Counter()

    def update(self, layers: Sequence[Observation]) -> None:
        if self._known is not None:
            self._known.update(layers)
            return
        sites = set()
        for layer in layers:
            if layer.token_ids is None or "column_mass" not in layer.tensors:
                continue
            mass = layer.tensors["column_mass"]
            real = layer.attended_keys(mass.shape[-1])
            index = topk_keys(mass, real, self.top)
            tokens = _tokens_at(layer, index)[topk_valid(index, real)]
            self._sinks.setdefault((layer.site, layer.layer), Counter()).update(tokens.tolist())
            if layer.site not in sites:
                sites.add(layer.site)
                self._samples[layer.site] += int(real.any(-1).sum())
                for ids, mask in zip(layer.token_ids, real, strict=True):
                    self._documents.setdefault(layer.site, Counter()).update(set(ids[: len(mask)][mask].tolist()))

    def merge(self, other: CommonSinkRatio) -> None:
        if self._known is not None and other._known is not None:
            self._known.merge(other._known)
            return
        for key, counts in other._sinks.items():
            self._sinks.setdefault(key, Counter()).update(counts)
        for site, documents in other._documents.items():
            self._documents.setdefault(site, Counter()).update(documents)
        self._samples.update(other._samples)

    def common_tokens(self, site: str) -> frozenset[int]:
        """Return the common tokens of a site: `common`, or those that are frequent so far."""
        if self.common is not None:
            return self.common
        threshold = self.frequent * self._samples[site]
        return frozenset(token for token, count in self._documents.get(site, Counter()).items() if count > threshold)

    def result(self) -> list[StatisticRow]:
        if self._known is not None:
            return self._known.result()
        rows = []
        for (site, layer), sinks in sorted(self._sinks.items()):
            if not sinks:
                continue
            common = self.common_tokens(site)
            share = PERCENT * sum(n for token, n in sinks.items() if token in common) / sinks.total()
            rows.append(StatisticRow(self.name, layer, None, None, None, share, None, self._samples[site], site))
        return rows

    def state(self) -> dict[str, Tensor]:
        if self._known is not None:
            return self._known.state()
        state = {f"sinks|{site}|{layer}": _count_table(counts) for (site, layer), counts in self._sinks.items()}
        state |= {f"documents|{site}|": _count_table(counts) for site, counts in self._documents.items()}
        return state | {f"samples|{site}|": torch.tensor([[0, n]]) for site, n in self._samples.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        if self.common is not None:
            self._known = KnownCommonSinkRatio(self.common, self.top)
            self._known.load(state)
            return
        self._sinks, self._documents, self._samples = {}, {}, Counter()
        for name, tensor in state.items():
            kind, site, layer = name.split("|")
            counts = Counter(dict(tensor.tolist()))
            if kind == "sinks":
                self._sinks[site, int(layer)] = counts
            elif kind == "documents":
                self._documents[site] = counts
            else:
                self._samples[site] = counts[0]


class KnownCommonSinkRatio(PerLayer):
    """The common-sink ratio of a fixed set of common tokens."""

    name = CommonSinkRatio.name
    info = CommonSinkRatio.info
    needs = CommonSinkRatio.needs

    def __init__(self, common: frozenset[int], top: int) -> None:
        super().__init__()
        self.common, self.top = torch.tensor(sorted(common), dtype=torch.long), top

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        if layer.token_ids is None:
            return
        mass = layer.tensors["column_mass"]
        real = layer.attended_keys(mass.shape[-1])
        index = topk_keys(mass, real, self.top)
        valid = topk_valid(index, real)
        common = torch.isin(_tokens_at(layer, index), self.common.to(index.device)) & valid
        share = common.sum((1, 2)) / valid.sum((1, 2)).clamp(min=1) * PERCENT
        yield SampleValues(self.key(layer), share, real.any(-1))


class SinkTokens(Statistic):
    """Positions and tokens of the strongest column of each head.

    Attributes:
        counts: Samples by head, position and token id (−1: unknown), for each site and layer.
        samples: Samples by site and layer.
        shape: Heads, and keys of the longest sample, by site and layer.
    """

    name = "sink_tokens"
    info = StatisticInfo(
        title="Sink tokens",
        unit="%",
        description="Share of samples in which the head's strongest column stands at the position; with its tokens.",
        source=f"{BAI}, sink tokens",
    )
    needs = frozenset({"column_mass"})

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], Counter[tuple[int, int, int]]] = {}
        self.samples: Counter[tuple[str, int]] = Counter()
        self.shape: dict[tuple[str, int], tuple[int, int]] = {}

    def update(self, layers: Sequence[Observation]) -> None:
        for layer in layers:
            if "column_mass" not in layer.tensors:
                continue
            mass = layer.tensors["column_mass"]
            real = layer.attended_keys(mass.shape[-1])
            index = topk_keys(mass, real, 1)
            token = _tokens_at(layer, index) if layer.token_ids is not None else torch.full_like(index, -1)
            heads = torch.arange(index.shape[1], device=index.device)[None, :, None].expand_as(index)
            triples = torch.stack([heads, index, token], -1)[real.any(-1)].flatten(0, -2)
            key = (layer.site, layer.layer)
            self.counts.setdefault(key, Counter()).update(map(tuple, triples.tolist()))
            self.samples[key] += int(real.any(-1).sum())
            self._grow(key, mass.shape[1], int(layer.keys.max()))

    def _grow(self, key: tuple[str, int], heads: int, keys: int) -> None:
        self.shape[key] = (heads, max(keys, self.shape.get(key, (0, 0))[1]))

    def merge(self, other: SinkTokens) -> None:
        for key, counts in other.counts.items():
            self.counts.setdefault(key, Counter()).update(counts)
        self.samples.update(other.samples)
        for key, shape in other.shape.items():
            self._grow(key, *shape)

    def result(self) -> list[StatisticRow]:
        """Return a row for each head and position, 0 at positions without a sink, so that means over them are right."""
        rows = []
        for (site, layer), counts in sorted(self.counts.items()):
            n = self.samples[site, layer]
            heads, keys = self.shape[site, layer]
            positions: Counter[tuple[int, int]] = Counter()
            for (head, position, _), count in counts.items():
                positions[head, position] += count
            for head, position in itertools.product(range(heads), range(keys) if n else ()):
                share = positions[head, position] / n
                error = (share * (1 - share) / (n - 1)) ** 0.5 * PERCENT if n > 1 else None
                rows.append(StatisticRow(self.name, layer, head, position, None, share * PERCENT, error, n, site))
        return rows

    def tokens(self) -> list[tuple[str, int, int, int, int, int, float]]:
        """Return rows of site, layer, head, position, token id or −1, count, and share of the samples."""
        return [
            (site, layer, head, position, token, count, count / self.samples[site, layer])
            for (site, layer), counts in sorted(self.counts.items())
            for (head, position, token), count in sorted(counts.items())
        ]

    def state(self) -> dict[str, Tensor]:
        return {
            "|".join(map(str, (site, layer, self.samples[site, layer], *self.shape[site, layer]))): _to_tensor(
                [[*triple, n] for triple, n in counts.items()], 4
            )
            for (site, layer), counts in self.counts.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.counts, self.samples, self.shape = {}, Counter(), {}
        for name, tensor in state.items():
            site, layer, samples, heads, keys = name.split("|")
            key = (site, int(layer))
            self.shape[key] = (int(heads), int(keys))
            self.counts[key] = Counter({(h, p, t): n for h, p, t, n in tensor.tolist()})
            self.samples[key] = int(samples)


def _tokens_at(layer: Observation, index: Tensor) -> Tensor:
    """Return the token ids at key positions (sample, head, top)."""
    assert layer.token_ids is not None
    return layer.token_ids[:, None].expand(-1, index.shape[1], -1).gather(-1, index)


def _count_table(counts: Counter[int]) -> Tensor:
    return _to_tensor([[token, n] for token, n in counts.items()], 2)


def _to_tensor(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.long).reshape(-1, width)
