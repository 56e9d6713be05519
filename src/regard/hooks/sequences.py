"""The sequences that a stack works on, over as many forwards as a cache strings together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.accumulate import REDUCTIONS, LayerAccumulator
from regard.hooks.alignment import SampleAlignment
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.modules import Stack
from regard.statistics import Observation

KEY_ENTRIES = 4
"""Entries of a key that tell it from others."""


@dataclass
class Sequences:
    """The open sequences of one stack, one to a row of the batch, or several that are packed.

    Attributes:
        role: `decoder` or `encoder`, once its first layer has been called.
        forward: The forward under way.
        last: The latest forward over the open sequences.
        encoder_tokens: Token ids of the encoder, for cross-attention.
        offered: Token ids of the latest forward, until a decoder takes them for its cross-attention.
        batches: Batches finished so far.
        unavailable: Reductions that this stack does not allow.
    """

    stack: Stack
    role: str | None = None
    forward: ForwardContext | None = None
    last: ForwardContext | None = None
    encoder_tokens: Tensor | None = None
    offered: Tensor | None = None
    batches: int = 0
    unavailable: frozenset[str] = frozenset()
    _layers: dict[tuple[str, int], LayerAccumulator] = field(default_factory=dict)
    _tokens: list[Tensor | None] = field(default_factory=list)
    _batch: int = 0
    _length: int = 0
    _key_entries: tuple[Tensor, int] | None = None
    """Some entries of every key of the latest forward, and the position of the first of these keys."""

    def begin(self, forward: ForwardContext) -> None:
        """Begin a forward, which goes on with these sequences if it has a cache, and else starts new ones.

        Raise a UserError if the cache does not hold what was observed.
        """
        if forward.offset != self._length or self.forward is not None:
            raise UserError(
                f"cannot observe this cache: it holds {forward.offset} tokens, of which {self._length} were observed; "
                "start the sequence inside the block, and neither crop nor reorder its cache"
            )
        self.forward = self.last = forward
        self._tokens.append(forward.tokens)
        self.offered = forward.tokens

    def read_first_attention(self, call: AttentionCall) -> None:
        """Take rows, length and packing from a forward's first self-attention. UserError for rows of another batch."""
        assert self.forward is not None
        batch, _, queries, _ = call.query.shape
        encoder_tokens = self.forward.encoder_tokens
        if encoder_tokens and call.key.shape[2] - self.forward.offset == queries + encoder_tokens:
            raise UserError(
                f"cannot observe {type(self.stack.module).__name__}: its self-attention and cross-attention are one "
                "softmax over the tokens of both"
            )
        if self._batch not in (0, batch):
            raise UserError(f"cannot observe a batch that changes from {self._batch} rows to {batch} over one cache")
        if self.forward.segments is not None and len(self.forward.segments) == 1:
            self.forward.segments = self.forward.segments.expand(batch, -1)
        if self.forward.segments is not None and not _separates(call, self.forward.segments):
            self.forward.segments = None
        self._batch = batch
        self._length = self.forward.offset + queries
        self._check_rows(call)

    def check_batch(self, call: AttentionCall) -> None:
        """Raise a UserError if a later layer has other rows than the first, as windows folded into the batch."""
        rows = call.query.shape[0]
        if rows != self._batch:
            raise UserError(
                f"cannot observe {type(self.stack.module).__name__}: its layers attend in batches of {self._batch} and "
                f"of {rows} rows, as models do that fold windows or groups of tokens into the batch"
            )

    def _check_rows(self, call: AttentionCall) -> None:
        """Raise a UserError if the keys of the forward before are no longer in their rows."""
        dropped = self.first_key(call)
        entries = call.key[:, 0, : self._length - dropped, :KEY_ENTRIES].detach()
        if self._key_entries is not None:
            before, since = self._key_entries
            first, last = max(since, dropped), since + before.shape[1]
            if not torch.equal(entries[:, first - dropped : last - dropped], before[:, first - since :]):
                raise UserError("cannot observe beam search: the rows of its cache are reordered between steps")
        self._key_entries = entries.clone(), dropped

    def first_key(self, call: AttentionCall) -> int:
        """Return the position of a call's first key in its row: after 0 if a sliding cache has dropped keys."""
        return max(self._length - call.key.shape[2], 0)

    def num_keys(self, call: AttentionCall) -> int:
        """Return how many keys of a call hold tokens: a static cache has room for more behind them."""
        return min(call.key.shape[2], self._length)

    @property
    def tokens(self) -> Tensor | None:
        """Token ids of the open sequences so far, (batch, token); None if some forward was not given ids."""
        tokens = [step for step in self._tokens if step is not None]
        return torch.cat(tokens, dim=1) if tokens and len(tokens) == len(self._tokens) else None

    def layer(self, kind: str, index: int) -> LayerAccumulator:
        """Return the reductions of a layer so far."""
        return self._layers.setdefault((kind, index), LayerAccumulator())

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Sum this forward's (batch, token, width) over the real tokens of each sample."""
        assert self.forward is not None
        batch, tokens = values.shape[:2]
        if self.forward.segments is not None:
            alignment = SampleAlignment.from_masks(batch, tokens, None, self.forward.segments, values.device)
            return alignment.sum_tokens(values)
        mask = self.forward.query_mask(tokens)
        return values.sum(1) if mask is None else (values * mask[..., None]).sum(1)

    def finish(self, site: str) -> list[Observation]:
        """Return all layers by sample, nothing if the last forward failed, and get ready for new sequences."""
        is_complete = self.forward is None and self._layers and self._length
        observations = list(self._observations(site)) if is_complete else []
        for observation in observations:
            self._check_finite(observation)
        self._layers, self._tokens, self.last, self._key_entries = {}, [], None, None
        self._batch = self._length = 0
        self.forward = None
        self.batches += bool(observations)
        return observations

    def _observations(self, site: str) -> Iterable[Observation]:
        assert self.last is not None
        last, device = self.last, next(iter(self._layers.values())).device
        queries = SampleAlignment.from_masks(self._batch, self._length, last.token_mask, last.segments, device)
        for (kind, index), layer in self._layers.items():
            keys, tokens = queries, self.tokens
            if kind == "cross":
                keys = SampleAlignment.from_masks(self._batch, layer.keys, last.encoder_mask, None, device)
                tokens = self.encoder_tokens
                if tokens is not None and tokens.shape != (self._batch, layer.keys):
                    tokens = None
            yield Observation(
                site="cross" + site.removeprefix("decoder") if kind == "cross" else site,
                layer=index,
                causal=kind == "self" and self.role == "decoder",
                length=queries.length,
                keys=keys.length,
                token_ids=None if tokens is None else keys.align_tokens(tokens.to(device)),
                virtual_key=layer.virtual_key,
                tensors=layer.align(queries, keys, packed=last.segments is not None),
            )

    def _check_finite(self, observation: Observation) -> None:
        for name, tensor in observation.tensors.items():
            if tensor.is_floating_point() and REDUCTIONS[name].finite and not bool(tensor.isfinite().all()):
                raise UserError(
                    f"non-finite activations: {name} of layer {observation.layer} ({observation.site}) in batch "
                    f"{self.batches}; check the model and its precision"
                )


def _separates(call: AttentionCall, segments: Tensor) -> bool:
    """Return whether the host separates packed sequences: no first token of one sees the last of another."""
    if call.keep is None:
        return False
    is_first = segments.diff(dim=-1) != 0
    sees_previous = call.keep.diagonal(offset=-1, dim1=-2, dim2=-1)
    return not bool((sees_previous & is_first[:, None]).any())
