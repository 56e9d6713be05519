"""Steps of one token with a cache, kept until they are reduced together, as one call whose queries they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import AttentionCall, map_fields
from regard.errors import UserError

MAX_STEPS = 64
"""Most steps of a layer that are kept."""
KEY_ENTRIES = 4
"""Entries of a key that tell it from others."""


@dataclass
class KeptCalls:
    """Calls of one layer, of one query each, over keys that grow by one.

    Queries and masks are copies, for others may write to them. Keys and values are those of the latest step, which hold
    all earlier ones. A dynamic cache makes new tensors and does not write to them; that nobody does, or changes earlier
    keys, is checked.
    """

    queries: list[Tensor] = field(default_factory=list)
    query_masks: list[Tensor] = field(default_factory=list)
    latest: AttentionCall | None = None
    offset: int = 0
    versions: tuple[int, ...] = ()
    """How often keys and values of the latest step had been written to."""
    entries: Tensor | None = None
    """Some entries of each key of the latest step."""

    def goes_on(self, call: AttentionCall) -> bool:
        """Return whether a call is the next step: it has all keys of the latest one, in other memory, and one more.

        Raise a UserError if those have been written to.
        """
        self._check_unwritten()
        latest, entries = self.latest, self.entries
        if latest is None or entries is None or len(self.queries) == MAX_STEPS:
            return False
        keys = latest.key.shape[2]
        return (
            call.key.shape[2] == keys + 1
            and call.query.shape == latest.query.shape
            and call.starts == latest.starts
            and (call.query_mask is None) == (latest.query_mask is None)
            and call.key.data_ptr() != latest.key.data_ptr()
            and _continues(latest.key_mask, call.key_mask)
            and torch.equal(_entries(call.key, keys), entries)
        )

    def next_call(self, query: Tensor, key: Tensor, value: Tensor, scale: float, offset: int) -> AttentionCall | None:
        """Return the call of a token that sees all keys, if it is the next step of a layer with nothing special."""
        latest = self.latest
        if latest is None or scale != latest.scale or not latest.is_plain or latest.starts is not None:
            return None
        if latest.query_mask is not None or latest.key_mask is not None:
            return None
        call = latest.as_step(query, key, value, offset)
        return call if _has_all_keys(call) and self.goes_on(call) else None

    def _check_unwritten(self) -> None:
        if self.latest is not None and self.versions != _versions(self.latest):
            raise UserError(
                "cannot observe this cache: its keys or values were written to after the step that made them; leave "
                "the block before the cache is reset"
            )

    def add(self, call: AttentionCall) -> None:
        """Add the first call, or a step that goes on with the latest one."""
        if self.latest is None:
            self.offset = call.offset
        self.queries.append(call.query.detach().clone())
        if call.query_mask is not None:
            self.query_masks.append(call.query_mask.clone())
        self.versions = _versions(call)
        self.latest = call.detach()
        self.entries = _entries(self.latest.key, call.key.shape[2])
        if call.dropout or call.key_mask is not None:
            self.latest = map_fields(replace(self.latest, dropout=0.0), key_mask=torch.clone)

    def join(self) -> AttentionCall:
        """Return all steps as one call. Raise a UserError if their keys or values have been written to."""
        assert self.latest is not None
        self._check_unwritten()
        copies: dict[str, Any] = {"query": torch.cat(self.queries, dim=2)}
        if self.query_masks:
            copies["query_mask"] = torch.cat(self.query_masks, dim=1)
        is_causal = self.latest.causal or len(self.queries) > 1
        return replace(self.latest, **copies, causal=is_causal, offset=self.offset)


def can_keep(call: AttentionCall) -> bool:
    """Return whether a call is one query, at the last of its keys, from which nothing but padding hides one.

    The keys must be all of a tensor, no part of memory that is filled by and by. Nothing is read from a GPU,
    so that steps are kept on a CPU alone; nor in inference mode, where nobody can tell whether keys are written to.
    """
    queries = call.query.shape[2]
    options = (call.keep, call.bias, call.operation, call.constant, call.key_positions)
    if queries != 1 or any(option is not None for option in options):
        return False
    if call.sink is not None and call.sink.ndim > 1:  # a logit of each query
        return False
    return _has_all_keys(call)


def _has_all_keys(call: AttentionCall) -> bool:
    """Return whether the keys up to the query of a call are all of a tensor, on a CPU and outside of inference mode."""
    key = call.key
    is_whole = call.offset + 1 == key.shape[2] and key.untyped_storage().nbytes() == key.nbytes
    return is_whole and key.device.type == "cpu" and not (key.is_inference() or call.value.is_inference())


def _entries(key: Tensor, count: int) -> Tensor:
    """Return some entries of the first keys of the first head, (batch, key, entry), by the quickest way to a view."""
    batch, _, token, entry = key.stride()
    return key.as_strided((len(key), count, min(KEY_ENTRIES, key.shape[-1])), (batch, token, entry))


def _versions(call: AttentionCall) -> tuple[int, ...]:
    """Return how often keys and values have been written to."""
    return call.key._version, call.value._version


def _continues(mask: Tensor | None, longer: Tensor | None) -> bool:
    """Return whether a mask of keys begins as the one before it."""
    if mask is None or longer is None:
        return mask is longer
    return torch.equal(longer[:, : mask.shape[1]], mask)
