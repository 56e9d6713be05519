"""How the adapters of a pool are mixed: the weights of a forward, and what a layer of some rank makes of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import num_writes
from regard.errors import UserError

GATHERED = 50
"""Cost of gathering an adapter for a row, in products of a token with it on a CPU (`benchmarks.gathering`)."""


@dataclass(frozen=True)
class AdapterWeights:
    """Scaled weights of a layer's adapters, for groups of consecutive rows.

    Args:
        trained: Indices of the adapters that are trained and in use.
        trained_weights: Their weights, (group, 1, adapter · rank).
        frozen: Number of frozen adapters in use.
        frozen_weights: Weights of these, or of the gathered ones, (group, 1, adapter · rank).
        gathered: Indices among frozen adapters of those that each group gathers, (group, adapter); None for all.
    """

    trained: tuple[int, ...]
    trained_weights: Tensor | None
    frozen: int
    frozen_weights: Tensor | None
    gathered: Tensor | None


@contextmanager
def hold(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object for a while."""
    previous = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(owner, name, value)


def one_each() -> bool:
    """Return that rows have one image each, as where none are read."""
    return True


class Mixture:
    """How the layers of a pool mix their adapters at the moment.

    Args:
        weights: Weights (row, adapter), or (adapter,) for all rows. None leaves the adapters out.
        top_k: Number of adapters that each row uses, those with the highest weights; None for all. In training they are
            those of the frozen adapters, besides the trained ones. In evaluation they are those of all adapters.

    Attributes:
        in_call: The model is in a forward, or computes a part of one again.
        rows: How many rows that forward reads, where it is known: of beams several have the weights of one row.
        trained: Which adapters in layers are trained; something else after each that is deleted.
        has_one_each: Whether each of these rows has an image (or sound, or video), or none has; None if nothing says.
    """

    def __init__(self, weights: Tensor | None = None, top_k: int | None = None) -> None:
        self.weights, self.top_k = weights, top_k
        self.in_call = False
        self.rows: int | None = None
        self.trained: object = ()
        self.has_one_each: Callable[[], bool | None] = one_each

    @property
    def weights(self) -> Tensor | None:
        return self._weights

    @weights.setter
    def weights(self, weights: Tensor | None) -> None:
        self._weights = weights
        self._cache: dict[Any, AdapterWeights] = {}

    def use(self, weights: Tensor | None) -> AbstractContextManager[None]:
        return hold(self, weights=weights)

    def layer_weights(
        self,
        rows: int,
        tokens: int,
        rank: int,
        scale: float,
        trained: tuple[int, ...],
        *,
        training: bool = True,
        device: torch.device | None = None,
    ) -> AdapterWeights:
        """Return the weights as a layer of that rank, scale and device uses them, cached unless they need gradients."""
        assert self._weights is not None
        weights = self._weights if self._weights.dim() > 1 else self._weights[None]
        groups, count = weights.shape
        if rows % groups:
            raise UserError(f"weights: expected a row for each of {rows} rows, or one for several, got {groups}")
        frozen = count - sum(index < count for index in trained)
        sparse = self.top_k is not None and self.top_k < frozen
        gather = sparse and (self.top_k or 0) * (tokens + GATHERED * groups) < frozen * (tokens + GATHERED // 2)
        top_k_all = None if training or self.top_k is None or self.top_k >= count else self.top_k
        arguments = (rank, scale, trained, self.top_k if sparse else None, gather, top_k_all)
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and weights.requires_grad):
            return _layer_weights(weights.to(device), *arguments)
        key = (
            *arguments,
            device,
            num_writes(weights),
            torch.is_inference_mode_enabled(),
        )
        if key not in self._cache:
            self._cache[key] = _layer_weights(weights.to(device), *arguments)
        return self._cache[key]


def _layer_weights(
    weights: Tensor,
    rank: int,
    scale: float,
    trained: tuple[int, ...],
    top_k: int | None,
    gather: bool,
    top_k_all: int | None,
) -> AdapterWeights:
    """Return weights (group, adapter) as a layer uses them: of `top_k_all` adapters, and of `top_k` frozen ones."""
    count, ranking = weights.shape[1], weights
    if top_k_all is not None:
        selected = torch.zeros_like(weights, dtype=torch.bool).scatter(1, weights.topk(top_k_all, dim=-1).indices, True)
        weights, ranking = weights.masked_fill(~selected, 0), weights.masked_fill(~selected, -torch.inf)
    trained_in_use = tuple(index for index in trained if index < count)
    frozen = [index for index in range(count) if index not in trained_in_use]
    scaled = weights * scale
    frozen_weights, gathered = _columns(scaled, frozen) if frozen else None, None
    if frozen_weights is not None and top_k is not None:
        indices = _columns(ranking, frozen).topk(top_k, dim=-1, sorted=False).indices
        gathered = indices if gather else None
        top_weights = frozen_weights.gather(1, indices)
        frozen_weights = top_weights if gather else torch.zeros_like(frozen_weights).scatter(1, indices, top_weights)
    trained_weights = _spread(_columns(scaled, trained_in_use), rank) if trained_in_use else None
    frozen_weights = None if frozen_weights is None else _spread(frozen_weights, rank)
    return AdapterWeights(trained_in_use, trained_weights, len(frozen), frozen_weights, gathered)


def _spread(weights: Tensor, rank: int) -> Tensor:
    """Repeat each adapter's weight for its hidden features: (group, 1, adapter · rank)."""
    return weights[..., None].expand(-1, -1, rank).reshape(len(weights), 1, -1)


def _columns(weights: Tensor, blocks: Sequence[int]) -> Tensor:
    """Select the columns of these adapters, as a view if they are consecutive."""
    first, last = blocks[0], blocks[-1]
    if last - first == len(blocks) - 1:
        return weights[:, first : last + 1]
    return torch.cat([weights[:, index : index + 1] for index in blocks], 1)
