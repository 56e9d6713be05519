"""What a statistic is told of samples: the reductions of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

OF_SAMPLES = ("length", "keys", "token_ids", "modality", "query_token_ids", "query_modality")
"""Fields with a row for each sample, as the tensors have."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One attention layer over some samples, whose real tokens begin at position 0; or several of the same shape.

    Attributes:
        site: "decoder" (causal), "encoder" (bidirectional) or "cross".
        layer: Index of the layer; −1 for the embeddings.
        causal: A query sees no key after its own position, or some of them within a prefix or a chunk.
        length: Real queries of each sample.
        keys: Real keys of each sample; other than `length` only in cross-attention.
        token_ids: Token ids of the keys.
        modality: Modality of the keys, as an index of `MODALITIES`; None of a model that reads text alone.
        query_token_ids: Token ids of the queries, in cross-attention; else they are those of the keys.
        query_modality: Modality of the queries, where it is not that of the keys.
        more_layers: Further layers, for statistics with `joins_layers`. All tensors then hold the samples of `layer`,
            then the same samples in each of these, one behind the other.
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
    modality: Int[Tensor, "sample key"] | None = None
    query_token_ids: Int[Tensor, "sample query"] | None = None
    query_modality: Int[Tensor, "sample query"] | None = None
    more_layers: tuple[int, ...] = ()
    virtual_key: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.layer, *self.more_layers

    @property
    def signature(self) -> tuple[Any, ...]:
        """What observations must have in common to be joined, whatever their layers are."""
        parts = [*((name, getattr(self, name)) for name in OF_SAMPLES), *sorted(self.tensors.items())]
        shapes = [(name, None if part is None else (part.shape, part.dtype, part.device)) for name, part in parts]
        return self.site, self.causal, self.virtual_key, *shapes

    def select(self, names: Callable[[str], bool]) -> Observation:
        tensors = {name: tensor for name, tensor in self.tensors.items() if names(name)}
        return self if len(tensors) == len(self.tensors) else replace(self, tensors=tensors)

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
        """Return the number n_k of queries that may see each of the first `width` keys k, counted from 0.

        In a causal layer these are the T − k queries from k on and the earlier ones that a prefix or the mask lets see
        the key, such as the tokens of one image. In other layers all queries count. A window does not lower n_k.
        """
        if not self.causal:
            return self.length[:, None].expand(-1, width)
        later = (self.length[:, None] - torch.arange(width, device=self.length.device)).clamp(min=0)
        early = self.tensors.get("early_query_count")
        if early is None:
            return later
        early = early[:, 0, :width].to(later.dtype)
        return later + torch.nn.functional.pad(early, (0, width - early.shape[-1]))


def join_observations(
    parts: Sequence[Observation], join: Callable[[list[Tensor]], Tensor], more_layers: tuple[int, ...]
) -> Observation:
    """Return observations of one signature as one of the first's layer and more, whose samples `join` puts together."""
    first = parts[0]
    if len(parts) == 1:
        return first
    known = [name for name in OF_SAMPLES if getattr(first, name) is not None]
    of_samples: dict[str, Any] = {name: join([getattr(part, name) for part in parts]) for name in known}
    tensors = {name: join([part.tensors[name] for part in parts]) for name in first.tensors}
    return replace(first, **of_samples, tensors=tensors, more_layers=more_layers)
