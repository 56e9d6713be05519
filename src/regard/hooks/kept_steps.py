"""Steps of one token with a cache, kept until they are reduced together, as one call whose queries they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.attention.call import AttentionCall

MAX_STEPS = 64
"""Most steps that are kept."""


@dataclass
class KeptCalls:
    """Attention calls of one query each, over keys that grow by one.

    Queries are copies. Keys and values are those of the latest call alone, which hold all earlier ones: a dynamic cache
    makes new tensors in each step, and nobody writes to those that it made.
    """

    queries: list[Tensor] = field(default_factory=list)
    query_masks: list[Tensor] = field(default_factory=list)
    latest: AttentionCall | None = None
    offset: int = 0

    def goes_on(self, call: AttentionCall) -> bool:
        """Return whether a call is the next step: it has all keys of the latest one, in other memory, and one more."""
        latest = self.latest
        if latest is None or len(self.queries) == MAX_STEPS:
            return False
        keys = latest.key.shape[2]
        return (
            call.key.shape[2] == keys + 1
            and call.query.shape == latest.query.shape
            and call.starts == latest.starts
            and (call.query_mask is None) == (latest.query_mask is None)
            and call.key.data_ptr() != latest.key.data_ptr()
            and _continues(latest.key_mask, call.key_mask)
        )

    def add(self, call: AttentionCall) -> None:
        """Add a step that goes on with the latest one, or the first."""
        if self.latest is None:
            self.offset = call.offset
        self.latest = call
        self.queries.append(call.query.detach().clone())
        if call.query_mask is not None:
            self.query_masks.append(call.query_mask)

    def join(self) -> AttentionCall:
        """Return all steps as one call."""
        assert self.latest is not None
        return replace(
            self.latest.detach(),
            query=torch.cat(self.queries, dim=2),
            query_mask=torch.cat(self.query_masks, dim=1) if self.query_masks else None,
            causal=True,
            offset=self.offset,
            dropout=0.0,
        )


def _continues(mask: Tensor | None, longer: Tensor | None) -> bool:
    """Return whether a mask of keys begins as the one before it."""
    if mask is None or longer is None:
        return mask is longer
    return torch.equal(longer[:, : mask.shape[1]], mask)


def can_keep(call: AttentionCall) -> bool:
    """Return whether a call is one query, at the last of its keys, that sees all keys but padding.

    Its keys must be all of a tensor, no part of memory that is filled by and by, and nothing is read from a GPU.
    """
    if call.query.shape[2] != 1 or call.offset + 1 != call.key.shape[2]:
        return False
    is_plain = all(option is None for option in (call.keep, call.bias, call.operation, call.constant))
    is_plain = is_plain and (call.sink is None or call.sink.ndim == 1)  # no logit of each query
    is_whole = call.key.untyped_storage().nbytes() == call.key.nbytes
    return is_plain and is_whole and (call.key_mask is None or call.key_mask.device.type == "cpu")
