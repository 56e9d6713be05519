"""What the slot hands to statistics: one layer of some finished samples, aligned and free of padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One attention layer (or the embeddings, layer −1) over S samples, whose real tokens begin at position 0.

    `tensors` holds reductions by name: per key (sample, head, key), per query (sample, head, query), per sample; see
    `regard.attention.call` and `regard.hooks.hidden_reductions`. Entries beyond a sample's length mean nothing.
    """

    site: str
    """`decoder` (causal), `encoder` (bidirectional) or `cross`."""
    layer: int
    causal: bool
    """Whether a query sees only keys at or before its own position."""
    length: Int[Tensor, " sample"]
    """Real queries of each sample."""
    keys: Int[Tensor, " sample"]
    """Real keys of each sample; equal to `length` but in cross-attention."""
    token_ids: Int[Tensor, "sample key"] | None = None
    """Token ids of the keys."""
    virtual_key: bool = False
    """Whether what goes to no token goes to a learned key, which has a query of its own in the matrix."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def key_mask(self, width: int) -> Bool[Tensor, "sample key"]:
        """Which of the first `width` positions are keys of a sample."""
        return torch.arange(width, device=self.keys.device) < self.keys[:, None]

    def attended_keys(self, width: int) -> Bool[Tensor, "sample key"]:
        """Which of the first `width` positions are keys of a sample that has any queries at all."""
        return self.key_mask(width) & (self.length > 0)[:, None]

    def query_mask(self, width: int) -> Bool[Tensor, "sample query"]:
        """Which of the first `width` positions are queries of a sample."""
        return torch.arange(width, device=self.length.device) < self.length[:, None]

    def num_visible_queries(self, width: int) -> Int[Tensor, "sample key"]:
        """How many queries may see each of the first `width` keys: T − k in a causal site (k from 0), else all.

        Earlier queries that see a key, which a prefix lets them, are counted as well: `tensors["prefix_query_count"]`.
        """
        if not self.causal:
            return self.length[:, None].expand(-1, width)
        later = (self.length[:, None] - torch.arange(width, device=self.length.device)).clamp(min=0)
        early = self.tensors.get("prefix_query_count")
        return later if early is None else later + early[:, 0, :width].to(later.dtype)
