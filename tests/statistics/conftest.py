"""Samples with all that the slot tells of them, from whole matrices in float64, and batches padded with garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.statistics import Observation, StatisticRow

BY_KEY = {"column_mass", "column_sum", "column_square", "key_norm", "value_norm"}
BY_KEY |= {"cosine_sum", "norm_sum", "pair_count", "value_output_norm", "value_weighted_sum"}
BY_QUERY = {"modality_mass", "entropy", "distance", "row_sum", "virtual_sink_mass", "output_norm"}
BY_TOKEN = {"hidden_norm", "hidden", "relative_change", "replaced"}
PER_SAMPLE = {"direction", "spectral_bound"}
FIRST = 4
HEADS, GROUPS, WIDTH = 2, 1, 3


@dataclass
class Sample:
    """One layer of one sample: `matrix` (head, query, key), and what is known beside it, without padding."""

    matrix: Tensor
    site: str = "decoder"
    layer: int = 0
    tokens: Tensor | None = None
    hidden: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.matrix.shape[1]

    @property
    def keys(self) -> int:
        return self.matrix.shape[2]

    def everything(self) -> dict[str, Tensor]:
        """The reductions of the matrix, by name, and the other tensors."""
        a = self.matrix
        away = (torch.arange(self.length)[:, None] - torch.arange(self.keys)).abs().double()
        centred = a - a.mean(-2, keepdim=True) if self.length else a
        found = {
            "column_mass": a.sum(-2),
            "column_sum": a.sum(-2),
            "column_square": a.square().sum(-2),
            "entropy": -torch.special.xlogy(a, a).sum(-1),
            "distance": (a * away).sum(-1),
            "row_sum": a.sum(-1),
            "virtual_sink_mass": 1 - a.sum(-1),
            "first_mass": a[..., :FIRST],
            "spectral_bound": torch.linalg.matrix_norm(centred, ord=2).square() if centred.numel() else a.sum((1, 2)),
        }
        if self.hidden is not None:
            found |= {
                "hidden": self.hidden,
                "hidden_norm": self.hidden.norm(dim=-1),
                "direction": torch.nn.functional.normalize(self.hidden, dim=-1).sum(0),
                "relative_change": self.hidden.norm(dim=-1) / (1 + self.hidden[:, 0].abs()),
                "replaced": (torch.arange(self.length) == (self.length - 1) // 2).double(),
            }
        if self.tokens is not None and not self.site.startswith("cross"):
            classes = torch.nn.functional.one_hot(self.tokens % 5, 5).double()
            others = classes[:, 1:4]  # image, video, audio
            found["modality_mass"] = a @ torch.cat([classes, others * (others.cumsum(0) == 1)], dim=-1)
        return found | self.tensors


def _garbage(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What may stand beyond a sample's length: nothing may be concluded from it."""
    if not dtype.is_floating_point:
        return torch.full(tuple(shape), 10**6, dtype=dtype)
    waste = torch.tensor([torch.nan, 1e30, torch.inf, -1e30], dtype=dtype)
    return waste[torch.arange(int(torch.tensor(shape).prod())) % len(waste)].reshape(tuple(shape))


def _padded(parts: list[Tensor], axes: Sequence[int], widths: Sequence[int]) -> Tensor:
    """The samples' tensors side by side, garbage behind each along `axes`."""
    shape = list(parts[0].shape)
    for axis, width in zip(axes, widths, strict=True):
        shape[axis] = width
    rows = []
    for part in parts:
        row = _garbage(shape, part.dtype)
        row[tuple(slice(0, size) for size in part.shape)] = part
        rows.append(row)
    return torch.stack(rows)


def _observe(samples: Sequence[Sample], width: int = 0, dtype: torch.dtype = torch.float64) -> Observation:
    first = samples[0]
    length = torch.tensor([s.length for s in samples])
    keys = torch.tensor([s.keys for s in samples])
    last_query, last_key = max(1, width, int(length.max())), max(1, width, int(keys.max()))
    every = [sample.everything() for sample in samples]
    tensors = {}
    for name in every[0] if first.layer >= 0 else every[0].keys() & (BY_TOKEN | {"direction"}):
        parts = [one[name] for one in every]
        if name in BY_KEY:
            tensors[name] = _padded(parts, [1], [last_key])
        elif name in BY_QUERY:
            tensors[name] = _padded(parts, [1], [last_query])
        elif name in BY_TOKEN:
            tensors[name] = _padded(parts, [0], [last_query])
        elif name == "first_mass":
            tensors[name] = _padded(parts, [1, 2], [last_query, min(FIRST, last_key)])
        else:
            assert name in PER_SAMPLE
            tensors[name] = torch.stack(parts)
    if first.layer >= 0 and last_query == last_key:
        whole = [s.matrix for s in samples if s.length == s.keys == last_key]
        empty = torch.zeros(first.matrix.shape[0], last_query, last_key, dtype=torch.float64)
        tensors["weights"] = torch.stack(whole).sum(0) if whole else empty
    tokens = None
    if first.tokens is not None:
        tokens = _padded([s.tokens for s in samples], [0], [last_key])
    return Observation(
        site=first.site,
        layer=first.layer,
        causal=first.site.startswith("decoder"),
        length=length,
        keys=keys,
        token_ids=tokens,
        modality=None if tokens is None else tokens % 5,
        tensors={name: tensor.to(dtype) for name, tensor in tensors.items()},
    )


def _attention(generator: torch.Generator, queries: int, keys: int, *, causal: bool, heads: int = HEADS) -> Tensor:
    """Random softmax matrices (head, query, key), peaked enough for sinks."""
    scores = torch.randn(heads, queries, keys, generator=generator, dtype=torch.float64)
    scores += 2 * torch.randn(heads, 1, keys, generator=generator, dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1)


def _sample(seed: int, length: int, keys: int | None = None, site: str = "decoder", layer: int = 0) -> Sample:
    """A random sample of a layer."""
    generator = torch.Generator().manual_seed(seed * 1009 + layer * 31 + len(site))
    keys = length if keys is None else keys

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Sample(
        matrix=_attention(generator, length, keys, causal=site.startswith("decoder")),
        site=site,
        layer=layer,
        tokens=torch.randint(0, 6, (keys,), generator=torch.Generator().manual_seed(seed)),
        hidden=None if site.startswith("cross") else normal(length, WIDTH) + 1,
        tensors={
            "key_norm": normal(GROUPS, keys).abs(),
            "value_norm": normal(GROUPS, keys).abs(),
            "value_output_norm": normal(HEADS, keys).abs(),
            "value_weighted_sum": normal(HEADS, keys).abs(),
            "cosine_sum": normal(HEADS, keys),
            "norm_sum": normal(HEADS, keys).abs(),
            "output_norm": normal(HEADS, length).abs(),
            "pair_count": normal(HEADS, keys).abs() + 1,
        },
    )


def _by_place(rows: Sequence[StatisticRow]) -> dict[tuple[Any, ...], StatisticRow]:
    """The rows of a result by what they are about."""
    found = {(r.statistic, r.site, r.layer, r.head, r.position, r.epsilon): r for r in rows}
    assert len(found) == len(rows), "two rows about the same"
    return found


@pytest.fixture(scope="session")
def make() -> type[Sample]:
    return Sample


@pytest.fixture(scope="session")
def observe() -> Callable[..., Observation]:
    return _observe


@pytest.fixture(scope="session")
def attention() -> Callable[..., Tensor]:
    return _attention


@pytest.fixture(scope="session")
def random_sample() -> Callable[..., Sample]:
    return _sample


@pytest.fixture(scope="session")
def by_place() -> Callable[..., dict[tuple[Any, ...], StatisticRow]]:
    return _by_place


@pytest.fixture(scope="session")
def value_of() -> Callable[..., float]:
    """Finds the value of the one row that has what is asked for, say head=0 and position=None."""

    def find(rows: Sequence[StatisticRow], **wanted: Any) -> float:
        found = [r.value for r in rows if all(getattr(r, name) == value for name, value in wanted.items())]
        assert len(found) == 1, f"{len(found)} rows have {wanted}"
        return found[0]

    return find
