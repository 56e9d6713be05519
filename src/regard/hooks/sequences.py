"""The sequences that a stack is working on, over as many forwards as a cache strings together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.alignment import SampleAlignment
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.modules import Stack
from regard.statistics import Observation

MARKS = 4
"""How many numbers of a key tell it from others."""


@dataclass
class Sequences:
    """The open sequences of one stack, one to a row of the batch (or several, packed)."""

    stack: Stack
    role: str | None = None
    """`decoder` or `encoder`, once its first layer has been seen."""
    forward: ForwardContext | None = None
    """The pass under way."""
    last: ForwardContext | None = None
    """The latest pass over the open sequences."""
    encoder_tokens: Tensor | None = None
    """Token ids of the encoder's side, for cross-attention."""
    offered: Tensor | None = None
    """Token ids of the latest pass, until a decoder takes them for its cross-attention."""
    batches: int = 0
    """Batches finished so far."""
    _layers: dict[tuple[str, int], LayerAccumulator] = field(default_factory=dict)
    _tokens: list[Tensor | None] = field(default_factory=list)
    _batch: int = 0
    _length: int = 0
    _marks: tuple[Tensor, int] | None = None

    def begin(self, forward: ForwardContext) -> None:
        """A forward begins, which goes on with these sequences if it has a cache, and else starts new ones."""
        if forward.offset != self._length or self.forward is not None:
            raise UserError(
                f"cannot observe this cache: it holds {forward.offset} tokens but {self._length} were seen; "
                "start the sequence inside the block, and neither crop nor reorder its cache"
            )
        self.forward = self.last = forward
        self._tokens.append(forward.tokens)
        self.offered = forward.tokens

    def first_attention(self, call: AttentionCall) -> None:
        """Take in what the first self-attention of a forward tells of all: rows, length, and that the cache is ours."""
        assert self.forward is not None
        batch, _, queries, _ = call.query.shape
        if self._batch not in (0, batch):
            raise UserError(f"cannot observe a batch that changes from {self._batch} rows to {batch} over one cache")
        if self.forward.segments is not None and len(self.forward.segments) == 1:
            self.forward.segments = self.forward.segments.expand(batch, -1)
        if self.forward.segments is not None and not _packs(call, self.forward.segments):
            self.forward.segments = None
        self._batch = batch
        self._length = self.forward.offset + queries
        self._check_rows(call)

    def _check_rows(self, call: AttentionCall) -> None:
        """Nothing, if the keys of the pass before are still in their rows; `_marks` is a little of each key."""
        dropped = self.first_key(call)
        marks = call.key[:, 0, : self._length - dropped, :MARKS].detach()
        if self._marks is not None:
            before, since = self._marks
            first, last = max(since, dropped), since + before.shape[1]
            if not torch.equal(marks[:, first - dropped : last - dropped], before[:, first - since :]):
                raise UserError("cannot observe beam search: the rows of its cache are reordered between steps")
        self._marks = marks.clone(), dropped

    def first_key(self, call: AttentionCall) -> int:
        """Where in its row a call's first key stands: after 0 once a sliding cache has dropped keys."""
        return max(self._length - call.key.shape[2], 0)

    def written(self, call: AttentionCall) -> int:
        """How many keys of a call are those of tokens: a static cache has room for more behind them."""
        return min(call.key.shape[2], self._length)

    @property
    def tokens(self) -> Tensor | None:
        """Token ids of the open sequences so far, (batch, token); None if some pass was not given ids."""
        known = [tokens for tokens in self._tokens if tokens is not None]
        return torch.cat(known, dim=1) if known and len(known) == len(self._tokens) else None

    def layer(self, kind: str, number: int) -> LayerAccumulator:
        """The tensors of a layer so far."""
        return self._layers.setdefault((kind, number), LayerAccumulator())

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each sample's real tokens of this forward's (batch, token, width)."""
        assert self.forward is not None
        batch, tokens = values.shape[:2]
        if self.forward.segments is not None:
            return SampleAlignment.of(batch, tokens, None, self.forward.segments, values.device).sums(values)
        real = self.forward.query_mask(tokens)
        return values.sum(1) if real is None else (values * real[..., None]).sum(1)

    def finish(self, site: str) -> list[Observation]:
        """All layers of the sequences, now finished, by sample; the stack is then ready for new ones.

        Nothing of sequences whose last pass was broken off by an exception.
        """
        whole = self.forward is None and self._layers and self._length
        found = self._observations(site) if whole else []
        self._layers, self._tokens, self.last, self._marks = {}, [], None, None
        self._batch = self._length = 0
        self.forward = None
        self.batches += bool(found)
        return found

    def _observations(self, site: str) -> list[Observation]:
        assert self.last is not None
        last, device = self.last, next(iter(self._layers.values())).device
        queries = SampleAlignment.of(self._batch, self._length, last.token_mask, last.segments, device)
        tokens = self.tokens
        found = []
        for (kind, number), layer in self._layers.items():
            keys, ids = queries, tokens
            if kind == "cross":
                keys = SampleAlignment.of(self._batch, layer.keys, last.encoder_mask, None, device)
                ids = self.encoder_tokens
                if ids is not None and ids.shape != (self._batch, layer.keys):
                    ids = None
            tensors = layer.aligned(queries, keys, packed=last.segments is not None)
            found.append(
                Observation(
                    site="cross" + site.removeprefix("decoder") if kind == "cross" else site,
                    layer=number,
                    causal=kind == "self" and self.role == "decoder",
                    length=queries.length,
                    keys=keys.length,
                    token_ids=None if ids is None else keys.tokens(ids.to(device)),
                    virtual_key=layer.virtual_key,
                    tensors=tensors,
                )
            )
        for observation in found:
            self._check(observation)
        return found

    def _check(self, observation: Observation) -> None:
        for name, tensor in observation.tensors.items():
            if tensor.is_floating_point() and name != "lse" and not bool(tensor.isfinite().all()):
                raise UserError(
                    f"non-finite activations: {name} of layer {observation.layer} ({observation.site}) "
                    f"in batch {self.batches}; expected finite values"
                )


def _packs(call: AttentionCall, segments: Tensor) -> bool:
    """Whether the host keeps packed sequences apart: no first token of one sees the last of another."""
    if call.keep is None:
        return False
    first = segments.diff(dim=-1) != 0
    beside = call.keep.diagonal(offset=-1, dim1=-2, dim2=-1)
    return not bool((beside & first[:, None]).any())
