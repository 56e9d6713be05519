"""What statistics are computed from: one layer of some finished samples, aligned and without padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor


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
