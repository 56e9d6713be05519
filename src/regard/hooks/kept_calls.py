"""Small attention calls that are kept until they are reduced together: all layers at once, and steps with a cache.

A step is one token that goes on with a cache. The steps of a layer are one call, whose queries they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import AttentionCall, map_fields
from regard.attention.operator import reduce
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError

MAX_STEPS = 64
"""Most steps of a layer that are kept."""
MAX_PAIRS = 1 << 17
"""Most pairs of queries and keys of a call that is kept: larger ones are reduced faster beside their output."""
MAX_ENTRIES = 1 << 22
"""Most entries of queries, keys and values of the calls of one forward that are kept, steps not counted."""
KEY_ENTRIES = 4
"""Entries of a key that tell it from others."""


@dataclass
class KeptCalls:
    """Calls of one layer: one of several queries, or steps over keys that grow by one.

    Tensors are copies, for others may write to them. Of steps only the queries are: keys and values are those of the
    latest step, which hold all earlier ones. A dynamic cache makes new tensors and does not write to them; that nobody
    does, or changes earlier keys, is checked.
    """

    queries: list[Tensor] = field(default_factory=list)
    query_masks: list[Tensor] = field(default_factory=list)
    latest: AttentionCall | None = None
    offset: int = 0
    versions: tuple[int, ...] = ()
    """How often keys and values of the latest step had been written to."""

    @property
    def entries(self) -> int:
        """Entries of the tensors that are copies."""
        call = self.latest
        if call is None or call.query.shape[2] == 1:
            return 0
        return call.query.numel() + call.key.numel() + call.value.numel()

    def goes_on(self, call: AttentionCall) -> bool:
        """Return whether a call is the next step: it has all keys of the latest one, in other memory, and one more.

        Raise a UserError if those have been written to.
        """
        self._check_unwritten()
        latest = self.latest
        if latest is None or len(self.queries) == MAX_STEPS or call.query.shape[2] != 1:
            return False
        keys = latest.key.shape[2]
        return (
            call.key.shape[2] == keys + 1
            and call.query.shape == latest.query.shape
            and call.starts == latest.starts
            and (call.query_mask is None) == (latest.query_mask is None)
            and call.key.data_ptr() != latest.key.data_ptr()
            and _continues(latest.key_mask, call.key_mask)
            and torch.equal(call.key[:, 0, :keys, :KEY_ENTRIES], latest.key[:, 0, :, :KEY_ENTRIES])
        )

    def _check_unwritten(self) -> None:
        if self.latest is not None and self.versions and self.versions != _versions(self.latest):
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
        if call.query.shape[2] > 1:
            call = map_fields(call, key=torch.clone, value=torch.clone)
        else:
            self.versions = _versions(call)
        masks = dict.fromkeys(("query_mask", "key_mask"), torch.clone)
        self.latest = replace(map_fields(call.detach(), **masks), query=self.queries[-1], dropout=0.0)

    def join(self) -> AttentionCall:
        """Return all steps as one call. Raise a UserError if their keys or values have been written to."""
        assert self.latest is not None
        self._check_unwritten()
        if len(self.queries) == 1:
            return self.latest
        masks = self.query_masks
        query_mask = torch.cat(masks, dim=1) if masks else None
        query = torch.cat(self.queries, dim=2)
        return replace(self.latest, query=query, query_mask=query_mask, causal=True, offset=self.offset)


def can_keep(call: AttentionCall) -> bool:
    """Return whether a call is small, and nothing but causality and padding hides a key.

    The keys of a step must be all of a tensor, no part of memory that is filled by and by. Nothing is read from a GPU,
    so that steps are kept on a CPU alone; nor in inference mode, where nobody can tell whether keys are written to.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if any(option is not None for option in (call.keep, call.bias, call.operation, call.constant)):
        return False
    if call.sink is not None and call.sink.ndim > 1:  # a logit of each query
        return False
    if queries > 1:  # of few queries over many keys the copies would cost more than they save
        return call.query.shape[:3].numel() * keys <= MAX_PAIRS and 2 * queries >= keys
    is_whole = call.offset + 1 == keys and call.key.untyped_storage().nbytes() == call.key.nbytes
    return is_whole and call.key.device.type == "cpu" and not (call.key.is_inference() or call.value.is_inference())


def reduce_together(calls: Sequence[AttentionCall], request: ReductionRequest) -> list[dict[str, Tensor]]:
    """Return the reductions of each call, computed for all calls of one shape at once."""
    groups: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        tensors = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (call.query, call.key, call.value)]
        alone = None if call.sink is None else index  # its heads are its own
        options = (call.scale, call.causal, call.offset, call.softcap, call.starts, alone)
        masks = (call.query_mask is None, call.key_mask is None)
        groups.setdefault((*tensors, *options, *masks), []).append(index)
    reductions: list[dict[str, Tensor]] = [{} for _ in calls]
    for group in groups.values():
        for name, tensor in reduce(join_calls([calls[index] for index in group]), request).items():
            for index, part in zip(group, tensor.chunk(len(group)), strict=True):
                reductions[index][name] = part
    return reductions


def join_calls(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Return calls of one shape as one call of more samples."""
    first = calls[0]
    if len(calls) == 1:
        return first

    def join_vectors(name: str) -> Tensor:  # as hosts have them in memory: (batch, token, head, width)
        return torch.cat([getattr(call, name).transpose(1, 2) for call in calls]).transpose(1, 2)

    def join_masks(name: str) -> Tensor | None:
        masks = [getattr(call, name) for call in calls]
        return None if masks[0] is None else torch.cat(masks)

    return replace(
        first,
        query=join_vectors("query"),
        key=join_vectors("key"),
        value=join_vectors("value"),
        query_mask=join_masks("query_mask"),
        key_mask=join_masks("key_mask"),
        starts=None if first.starts is None else first.starts * len(calls),
    )


def _versions(call: AttentionCall) -> tuple[int, ...]:
    """Return how often keys and values have been written to."""
    return call.key._version, call.value._version


def _continues(mask: Tensor | None, longer: Tensor | None) -> bool:
    """Return whether a mask of keys begins as the one before it."""
    if mask is None or longer is None:
        return mask is longer
    return torch.equal(longer[:, : mask.shape[1]], mask)
