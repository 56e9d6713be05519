"""The sequences that a stack works on, over as many forwards as a cache strings together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.alignment import SampleAlignment
from regard.hooks.forward_pass import ForwardContext
from regard.hooks.modules import Stack, cross_site
from regard.hooks.numbering import BlockCounter, CallPosition
from regard.hooks.reductions import REDUCTIONS
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
        counter: Which block the forward is in.
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
    counter: BlockCounter = field(init=False)
    _layers: dict[tuple[str, int], list[LayerAccumulator]] = field(default_factory=dict)
    """The parts of each layer, by kind and number: one unless the layer is called for several samples."""
    _lengths: dict[int, list[int]] = field(default_factory=dict)
    """The queries of each call of self-attention in the latest forward, by layer."""
    _latest: LayerAccumulator | None = None
    _has_rows: bool = False
    """Whether hidden states are (token, width), of one sample or of several."""
    _tokens: list[Tensor | None] = field(default_factory=list)
    _batch: int = 0
    _length: int = 0
    _key_entries: tuple[Tensor, int] | None = None
    """Some entries of every key of the latest forward, and the position of the first of these keys."""

    def __post_init__(self) -> None:
        self.counter = BlockCounter(self.stack)

    def begin(self, forward: ForwardContext) -> None:
        """Begin a forward, which goes on with these sequences if it has a cache, and else starts new ones.

        Raise a UserError if the cache does not hold what was observed.
        """
        if forward.offset != self._length or self.forward is not None:
            raise UserError(
                f"cannot observe this cache: it holds {forward.offset} tokens, of which {self._length} were observed; "
                "start the sequence inside the block, and neither crop nor reorder its cache"
            )
        self.counter.begin()
        self._lengths = {}
        self.forward = self.last = forward
        self._tokens.append(forward.tokens)
        self.offered = forward.tokens

    def end(self) -> None:
        """End the forward under way."""
        self.counter.end()
        if self._latest is not None:
            self._latest.close_step()
        self.forward = self._latest = None

    def take_row(self) -> bool:
        """Say that hidden states are (token, width), and return whether a forward has one row."""
        self._has_rows = self._batch == 1 and self.forward is not None and not self.forward.offset
        return self._has_rows

    def locate(self, module: nn.Module, kind: str, call: AttentionCall) -> CallPosition:
        """Return the position of an attention call. Raise a UserError for samples that are not whole sequences."""
        assert self.forward is not None
        position = self.counter.locate(module, kind, call)
        is_encoder = kind == "self" and self.role == "encoder"
        if position.part and (not is_encoder or self.forward.offset or self.forward.token_mask is not None):
            raise UserError(
                f"cannot observe {self._name}: {type(module).__name__} attends several times in "
                "one execution, which is known of encoders without padding alone"
            )
        if kind == "self" and not position.is_repeat:
            self._lengths.setdefault(position.layer, []).append(call.query.shape[2])
        return position

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

    def has_rows(self, count: int) -> bool:
        """Return whether hidden states of so many rows may be those of the batch. UserError if attention has more."""
        if count < self._batch:
            self._refuse_rows(count, self._batch)
        return self._batch in (0, count)

    def check_batch(self, call: AttentionCall) -> None:
        """Raise a UserError if a later layer has other rows than the first, as windows folded into the batch."""
        rows = call.query.shape[0]
        if rows != self._batch:
            self._refuse_rows(self._batch, rows)

    def _refuse_rows(self, rows: int, others: int) -> NoReturn:
        raise UserError(
            f"cannot observe {self._name}: its layers work on {rows} and on {others} rows, as models do that fold "
            "windows or groups of tokens into the batch"
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
        """Return the position of a call's first key in its row: after 0 if a sliding cache has dropped keys.

        Raise a UserError if keys without a cache are not the tokens.
        """
        assert self.forward is not None
        queries, keys = call.query.shape[2], call.key.shape[2]
        if self.role == "encoder" and not self.forward.offset and queries != keys:
            raise UserError(f"cannot observe {self._name}: {queries} tokens attend to {keys} keys, which are others")
        return max(self._num_tokens(call) - call.key.shape[2], 0)

    def num_keys(self, call: AttentionCall) -> int:
        """Return how many keys of a call hold tokens: a static cache has room for more behind them."""
        return min(call.key.shape[2], self._num_tokens(call))

    def _num_tokens(self, call: AttentionCall) -> int:
        """Return how many tokens there are up to the last query of a call."""
        assert self.forward is not None
        tokens = self.forward.offset + call.query.shape[2]
        return tokens if self.role == "encoder" else max(tokens, self._length)

    @property
    def tokens(self) -> Tensor | None:
        """Token ids of the open sequences so far, (batch, token); None if some forward was not given ids."""
        tokens = [step for step in self._tokens if step is not None]
        return torch.cat(tokens, dim=1) if tokens and len(tokens) == len(self._tokens) else None

    def layer(self, kind: str, index: int, part: int = 0) -> LayerAccumulator:
        """Return the reductions of a layer so far, of its calls of index `part`."""
        parts = self._layers.setdefault((kind, index), [])
        if part == len(parts):
            parts.append(LayerAccumulator())
        layer = parts[part]
        if self._latest is not layer and self._latest is not None:
            self._latest.close_step()
        self._latest = layer
        return layer

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Sum this forward's (batch, token, width) over the real tokens of each sample."""
        assert self.forward is not None
        batch, tokens = values.shape[:2]
        if self.forward.segments is not None:
            alignment = SampleAlignment.from_masks(batch, tokens, None, self.forward.segments, values.device)
            return alignment.sum_tokens(values)
        mask = self.forward.query_mask(tokens)
        return values.sum(1) if mask is None else (values * mask[..., None]).sum(1)

    def finish(self, site: str, num_first_keys: int = 1) -> list[list[Observation]]:
        """Return all layers by sample, in batches, and get ready for new sequences.

        There is nothing if the last forward failed, and a batch a sample if layers were called for one after another.
        """
        batches: list[list[Observation]] = []
        if self.forward is None and self._layers and self._length:
            for length, layers in self._batches(num_first_keys):
                batches.append(list(self._observations(site, length, layers)))
        for observations in batches:
            for observation in observations:
                self._check_finite(observation)
        self._layers, self._tokens, self.last, self._key_entries = {}, [], None, None
        self._batch = self._length = 0
        self.forward = self._latest = None
        self._has_rows = False
        self.batches += bool(batches)
        return batches

    def _batches(self, num_first_keys: int) -> Iterator[tuple[int, dict[tuple[str, int], LayerAccumulator]]]:
        """Yield the length and the layers of each batch.

        Where layers are called for one sample after another, a sample ends where calls of all layers end: a layer with
        windows is called for each window of a sample.
        """
        sums = sorted({sum(lengths) for lengths in self._lengths.values()})
        if len(sums) > 1:
            raise UserError(f"cannot observe {self._name}: some layers have {sums[0]} tokens, others {sums[-1]}")
        if not self._has_rows and all(len(lengths) == 1 for lengths in self._lengths.values()):
            yield self._length, {key: parts[0] for key, parts in self._layers.items()}
            return
        for part in (part for parts in self._layers.values() for part in parts):
            hidden = [tensor for name, tensor in part.tensors.items() if REDUCTIONS[name].source == "hidden"]
            if hidden and not (self._has_rows and all(tensor.shape[1] == sums[0] for tensor in hidden)):
                raise UserError(
                    f"cannot observe the hidden states of {self._name}, whose rows are several samples; leave out "
                    "statistics of hidden states"
                )
        ends = {layer: list(accumulate(lengths)) for layer, lengths in self._lengths.items()}
        start = 0
        for end in sorted(set.intersection(*map(set, ends.values()))):
            yield end - start, self._select_sample(start, end, ends, num_first_keys)
            start = end

    def _select_sample(
        self, start: int, end: int, ends: dict[int, list[int]], num_first_keys: int
    ) -> dict[tuple[str, int], LayerAccumulator]:
        """Return the layers of one sample, whose tokens are those from `start` to `end`."""
        layers: dict[tuple[str, int], LayerAccumulator] = {}
        for (kind, index), parts in self._layers.items():
            layer = layers[kind, index] = LayerAccumulator()
            firsts = [0, *ends[index][:-1]] if index in ends else []
            for part, first in zip(parts, firsts, strict=False):
                if start <= first < end:
                    layer.append(part, first - start, num_first_keys)
            layer.add_hidden_rows(parts[0], slice(start, end))
        return layers

    def _observations(
        self, site: str, length: int, layers: dict[tuple[str, int], LayerAccumulator]
    ) -> Iterable[Observation]:
        assert self.last is not None
        last, device = self.last, next(iter(layers.values())).device
        queries = SampleAlignment.from_masks(self._batch, length, last.token_mask, last.segments, device)
        for (kind, index), layer in layers.items():
            keys, tokens = queries, self.tokens
            if kind == "cross":
                keys = SampleAlignment.from_masks(self._batch, layer.keys, last.encoder_mask, None, device)
                tokens = self.encoder_tokens
                if tokens is not None and tokens.shape != (self._batch, layer.keys):
                    tokens = None
            yield Observation(
                site=cross_site(site) if kind == "cross" else site,
                layer=index,
                causal=kind == "self" and self.role == "decoder",
                length=queries.length,
                keys=keys.length,
                token_ids=None if tokens is None else keys.align_tokens(tokens.to(device)),
                virtual_key=layer.virtual_key,
                tensors=layer.align(queries, keys, packed=last.segments is not None),
            )

    @property
    def _name(self) -> str:
        return type(self.stack.module).__name__

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
