"""The sequences that a stack works on, over as many forwards as a cache strings together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from regard.attention import float64
from regard.attention.call import AttentionCall
from regard.attention.gradients import no_grad
from regard.errors import UserError
from regard.hooks.accumulate import LayerAccumulator
from regard.hooks.alignment import SampleAlignment
from regard.hooks.cached_keys import check_same_keys, lent_cache, unknown_cache
from regard.hooks.direction import is_causal_layer, is_one_sided
from regard.hooks.forward_pass import ForwardContext, find_tokens, hides_room, keeps_apart, packed_blocks, seen_keys
from regard.hooks.hidden_keys import check_padding, unknown_padding
from regard.hooks.hidden_states import WaitingHidden, reduce_hidden
from regard.hooks.kept_calls import KEY_ENTRIES, MAX_STEPS
from regard.hooks.modules import Stack, cross_site, masks_padding, num_blocks
from regard.hooks.numbering import BlockCounter, CallPosition, check_lengths
from regard.hooks.own_modules import check_direction, check_keys
from regard.hooks.reductions import REDUCTIONS
from regard.hooks.waiting_calls import WaitingCalls
from regard.statistics import Observation


class Sequences:
    """The open sequences of one stack, one to a row of the batch, or several that are packed.

    Attributes:
        role: `decoder` or `encoder`, once its first layer has been called.
        sites: The site of what is finished, by role.
        forward: The forward under way.
        last: The latest forward over the open sequences.
        encoder_tokens: Token ids of the encoder, for cross-attention.
        needs_whole: Names of statistics that cannot be told of packed rows.
        embeddings: Input of the first layer, until the first attention call has said how tokens belong together.
        counter: Which block the forward is in.
        num_blocks: How many blocks the stack has at most.
        latest: The latest call of each kind, its output and reductions, and the tensors of its layer before it.
        lengths: The queries of each call of self-attention in the latest forward, by layer.
        waiting: Calls of the forward under way that are not reduced yet.
        lacks_hidden: Its hidden states are not (batch, token, width).
    """

    def __init__(self, stack: Stack, needs_whole: Sequence[str] = ()) -> None:
        self.stack, self.name, self.needs_whole = stack, type(stack.module).__name__, needs_whole
        self.counter, self.num_blocks = BlockCounter(stack), num_blocks(stack)
        self.role: str | None = None
        self.sites: dict[str, str] = {}
        self._is_role_known = self.lacks_hidden = False
        self.encoder_tokens: Tensor | None = None
        self.num_batches, self.lengths = 0, dict[int, list[int]]()
        self._reset()

    def _reset(self) -> None:
        self.forward: ForwardContext | None = None
        self.last: ForwardContext | None = None
        self.embeddings: Tensor | None = None
        self.waiting, self._waiting_hidden = WaitingCalls(), WaitingHidden()
        self.latest: dict[str, tuple[AttentionCall, Tensor, dict[str, Tensor], dict[str, Tensor]]] = {}
        self._layers: dict[tuple[str, int], list[LayerAccumulator]] = {}
        """The parts of each layer, by kind and number: one unless the layer is called for several samples."""
        self._has_rows = False
        """Whether hidden states are (token, width), of one sample or of several."""
        self._tokens: list[Tensor | None] = []
        self._batch = self._length = 0
        self._hidden_names: tuple[str, ...] = ()
        self._cache: ReferenceType[Cache] | None = None
        self._key_entries: tuple[Tensor, int] | None = None
        """Some entries of every key of the latest forward, and the position of the first of these keys."""
        self._sees_ahead: bool | None = None
        self._is_one_sided = False
        """Whether some token of an encoder sees an earlier one that does not see it, as in chunks."""
        self._seen_keys: dict[str, Tensor | None] = {}
        """The keys that queries see, by kind of attention, where they say what padding is; None if all are seen."""

    def begin(self, forward: ForwardContext, lender: Sequences | None = None) -> None:
        """Begin a forward, which goes on with these sequences if it has a cache, and else starts new ones.

        Raise a UserError if the cache does not hold what was observed, as where another stack, the `lender`, filled it.
        """
        if not self.goes_on(forward) or self.forward is not None:
            self.refuse_cache(forward.offset, lender)
        self.counter.begin()
        self.lengths, self.embeddings, self._seen_keys, self._sees_ahead = {}, None, {}, None
        self.forward = self.last = forward
        self._tokens.append(forward.tokens)

    def goes_on(self, forward: ForwardContext) -> bool:
        """Return whether a forward has as many tokens in its cache as were observed."""
        return forward.offset == self._length

    def refuse_cache(self, tokens: int, lender: Sequences | None) -> NoReturn:
        """Raise the UserError of so many tokens in a cache that are not those that were observed."""
        if lender is not None and not self._length:
            raise lent_cache(f"{self.name} ({self.stack.path})", tokens, f"{lender.name} ({lender.stack.path})")
        raise unknown_cache(tokens, self._length)

    def fills(self, cache: Cache | None) -> bool:
        """Return whether a cache is the one that the latest forward here has returned."""
        return cache is not None and self._cache is not None and self._cache() is cache

    @torch.no_grad()
    def end(self, cache: Any = None) -> None:
        """End the forward under way, which returns a cache or none. UserError if its layers read other tokens."""
        if self.forward is not None:
            check_lengths(self.name, self.lengths, is_reached=any(kind == "cross" for kind, _ in self._layers))
        self._cache = ref(cache) if isinstance(cache, Cache) else None
        for hidden, layers in self._waiting_hidden.take():
            self._reduce_hidden(layers, hidden, self.start, is_row=False)
        self.forward, self.latest = None, {}
        self.counter.end()

    def locate(self, module: nn.Module, kind: str, call: AttentionCall) -> CallPosition:
        """Return the position of an attention call, and learn from the first one of self-attention.

        Raise a UserError for samples that are not whole sequences, and for other rows than those of the first call.
        """
        assert self.forward is not None
        position = self.counter.locate(module, kind, call)
        is_encoder = kind == "self" and self.role == "encoder"
        if position.part and (not is_encoder or self.forward.offset or self.forward.token_mask is not None):
            raise UserError(
                f"cannot observe {self.name}: {type(module).__name__} attends several times in one execution, which is "
                "known of encoders without padding alone"
            )
        if kind == "self":
            if not self.lengths:
                self.counter.check_ids(self.forward.tokens)
                self._read_first_attention(module, call)
            elif call.query.shape[0] != self._batch:
                self._refuse_rows(self._batch, call.query.shape[0])
            if not position.is_repeat:
                self.lengths.setdefault(position.layer, []).append(call.query.shape[2])
            if self.stack.is_own:
                self._sees_ahead = check_direction(self.name, module, call, self._sees_ahead)
        if self._hides_padding_by_itself and (kind == "cross" or call.key.shape[2] == call.query.shape[2]):
            self._read_padding(kind, call)
        return position

    def _read_first_attention(self, module: nn.Module, call: AttentionCall) -> None:
        """Take role, rows, length and packing from a forward's first self-attention. UserError for another batch."""
        forward = self.forward
        assert forward is not None
        batch, _, queries, _ = call.query.shape
        forward.widen(batch)
        if forward.offset:  # what goes on behind a cache does not see ahead, whatever its prompt does
            self.role, self._is_role_known = "decoder", True
        elif not self._is_role_known:  # one token does not say it
            is_causal = is_causal_layer(module, call, forward.token_mask, embeds_tokens=self.stack.embeds_tokens)
            self.role, self._is_role_known = "decoder" if is_causal else "encoder", queries > 1
        tokens, states = forward.offset + queries, forward.read_encoder()
        others = 0 if states is None else states.shape[1]
        if others and call.key.shape[2] == tokens + others and not hides_room(call, tokens):
            raise UserError(
                f"cannot observe {self.name}: its self-attention and cross-attention are one softmax over the tokens "
                "of both"
            )
        for rows in (forward.images, self.counter.find_rows(call)):
            if rows is not None and batch > rows:
                self._refuse_rows(rows, batch)
        if self._batch not in (0, batch):
            raise UserError(f"cannot observe a batch that changes from {self._batch} rows to {batch} over one cache")
        if forward.segments is not None:
            segments = forward.segments.expand(batch, -1) if len(forward.segments) == 1 else forward.segments
            forward.segments = segments if keeps_apart(call, segments) else None
        elif forward.images is not None and batch < forward.images:
            forward.segments = packed_blocks(call)
            if forward.segments is not None and self.needs_whole:
                raise UserError(
                    f"cannot measure {', '.join(self.needs_whole)} of several images that {self.name} reads as one "
                    "sequence; pass one image a forward (--batch-size 1), or leave them out"
                )
        self._batch, self._length = batch, forward.offset + queries
        if forward.token_mask is not None and not forward.has_room and forward.token_mask.shape[-1] > self._length:
            forward.token_mask = seen_keys(call)  # the mask is of what became tokens, as of the samples of a sound
        elif not forward.offset and not (forward.token_mask is None and self._hides_padding_by_itself):
            forward.token_mask = find_tokens(call, forward.token_mask, sees_ahead=self.role == "encoder")
        if self.role == "encoder" and call.keep is not None and call.key.shape[2] == queries:
            self._is_one_sided = is_one_sided(call, forward.token_mask)
        self._check_rows(call)

    def _read_padding(self, kind: str, call: AttentionCall) -> None:
        """Take keys that no query sees for padding, if no argument says so. UserError if layers differ in them."""
        name = "encoder_mask" if kind == "cross" else "token_mask"
        forward, is_own = self.forward, self.stack.is_own and kind == "self"
        assert forward is not None
        if kind not in self._seen_keys:
            if getattr(forward, name) is None and not (is_own and forward.is_told):
                seen = self._seen_keys[kind] = seen_keys(call)
                if is_own and seen is not None:
                    check_padding(self.name, call, seen)
                setattr(forward, name, seen)  # whatever argument says so
            return
        first, seen = self._seen_keys[kind], seen_keys(call)
        if first is not seen and (first is None or seen is None or not torch.equal(first, seen)):
            raise unknown_padding(self.name, "its layers hide different keys from all queries")

    @property
    def _hides_padding_by_itself(self) -> bool:
        """Whether arguments may say what is padding by any name: of modules of one's own, and masks of images."""
        reads_images = self.forward is not None and self.forward.reads_images
        return self.stack.is_own or masks_padding(self.stack.module) or reads_images

    def _refuse_rows(self, rows: int, others: int) -> NoReturn:
        raise UserError(
            f"cannot observe {self.name}: its layers work on {rows} and on {others} rows, as models do that fold "
            "windows or groups of tokens into the batch"
        )

    def _check_rows(self, call: AttentionCall) -> None:
        """Raise a UserError if the keys of the forward before are no longer there, or in other rows."""
        dropped, _ = self.find_keys("self", call)
        entries = call.key[:, 0, : self._length - dropped, :KEY_ENTRIES].detach()
        if self._key_entries is not None:
            before, since = self._key_entries
            first, last = max(since, dropped), since + before.shape[1]
            check_same_keys(entries[:, first - dropped : last - dropped], before[:, first - since :])
        self._key_entries = entries.clone(), dropped

    def find_keys(self, kind: str, call: AttentionCall) -> tuple[int, int]:
        """Return the position of a call's first key in its row, and how many keys hold tokens.

        A sliding cache has dropped the keys before the first; a static cache has room for more behind the tokens. Raise
        a UserError if keys without a cache are not the tokens.
        """
        assert self.forward is not None
        queries, keys = call.query.shape[2], call.key.shape[2]
        if kind == "cross":
            return 0, keys
        tokens = self.forward.offset + queries
        has_room = self.forward.has_room or not isinstance(self.stack.module, PreTrainedModel)
        is_encoder = self.role == "encoder" and not self.forward.offset
        if self.stack.is_own and not self.forward.offset:
            check_keys(self.name, call, may_have_room=not is_encoder)
        elif keys != tokens and ((keys > tokens and not has_room) or (is_encoder and not hides_room(call, tokens))):
            raise UserError(
                f"cannot observe {self.name}: {tokens} tokens attend to {keys} keys that are not these tokens"
            )
        tokens = tokens if self.role == "encoder" else max(tokens, self._length)
        return max(tokens - keys, 0), min(keys, tokens)

    @property
    def start(self) -> int:
        """Position of the first token of the forward under way."""
        return 0 if self.forward is None else self.forward.offset

    def layer(self, kind: str, index: int, part: int = 0) -> LayerAccumulator:
        """Return the reductions of a layer so far, of its calls of index `part`."""
        parts = self._layers.setdefault((kind, index), [])
        if part == len(parts):
            parts.append(LayerAccumulator())
        return parts[part]

    @no_grad
    def add_hidden(self, index: int, hidden: Tensor | None, names: Iterable[str]) -> bool:
        """Add reductions of a layer's hidden states; return whether they are those of the batch, or of one row."""
        if hidden is None:
            return False
        is_row = hidden.ndim == 2
        hidden = hidden.transpose(0, 1) if self.stack.is_time_first and not is_row else hidden
        if is_row:
            self._has_rows = self._batch == 1 and self.forward is not None and not self.forward.offset
            hidden = hidden[None]
        elif len(hidden) < self._batch:
            self._refuse_rows(len(hidden), self._batch)
        if not self._has_rows if is_row else self._batch not in (0, len(hidden)):
            return False
        assert self.forward is not None
        layer, first = self.layer("self", index), self.forward.offset
        self._hidden_names = tuple(names)
        if first and hidden.shape[1] == 1 and not is_row:
            layer.kept_hidden.append(hidden.detach().clone())  # the next block may write to what it is passed
            if len(layer.kept_hidden) == MAX_STEPS:
                self._reduce_kept_hidden(layer, first + 1)
        else:
            self._reduce_kept_hidden(layer, first)
            most = 0 if is_row or self.forward.segments is not None else self.num_blocks + 1  # with the embeddings
            for states, layers in self._waiting_hidden.add(hidden, layer, self._hidden_names, most=most):
                self._reduce_hidden(layers, states, first, is_row=is_row)
        return True

    def _reduce_kept_hidden(self, layer: LayerAccumulator, end: int) -> None:
        """Add the reductions of the kept steps of a layer, of which the last is the token before `end`."""
        if layer.kept_hidden:
            hidden = torch.cat(layer.kept_hidden, dim=1)
            layer.kept_hidden = []
            self._reduce_hidden([layer], hidden, end - hidden.shape[1], is_row=False)

    def _reduce_hidden(self, layers: list[LayerAccumulator], hidden: Tensor, first: int, *, is_row: bool) -> None:
        """Add the reductions of hidden states of tokens from `first` on, whose rows are those of each layer in turn."""
        assert self.last is not None
        reduce_hidden(hidden, layers, self._hidden_names, self.last, first, sums_tokens=not is_row)

    @torch.no_grad()
    def finish(self, site: str, num_first_keys: int) -> list[list[Observation]]:
        """Return all layers by sample, in batches, and get ready for new sequences.

        There is nothing if the last forward failed, and a batch a sample if layers were called for one after another.
        """
        batches: list[list[Observation]] = []
        if self.forward is None and self._layers and self._length and self._batch:
            for layer in (layer for parts in self._layers.values() for layer in parts):
                self._reduce_kept_hidden(layer, self._length)
            for length, layers in self._batches(num_first_keys):
                observations = list(self._observations(site, length, layers))
                tensors = (tensor for layer in observations for tensor in layer.tensors.values())
                is_exact = all(map(float64.has_float64, tensors))
                batches.append(observations if is_exact else list(map(float64.to_cpu, observations)))
                self.sites[str(self.role)] = site
        self._reset()
        self.num_batches += bool(batches)
        return batches

    def _batches(self, num_first_keys: int) -> Iterator[tuple[int, dict[tuple[str, int], LayerAccumulator]]]:
        """Yield the length and the layers of each batch.

        Where layers are called for one sample after another, a sample ends where calls of all layers end: a layer with
        windows is called for each window of a sample.
        """
        if not self._has_rows and all(len(lengths) == 1 for lengths in self.lengths.values()):
            yield self._length, {key: parts[0] for key, parts in self._layers.items()}
            return
        tokens = sum(next(iter(self.lengths.values())))
        for part in (part for parts in self._layers.values() for part in parts):
            hidden = [tensor for name, tensor in part.tensors.items() if REDUCTIONS[name].source == "hidden"]
            if hidden and not (self._has_rows and all(tensor.shape[1] == tokens for tensor in hidden)):
                raise UserError(
                    f"cannot observe the hidden states of {self.name}, whose rows are several samples; leave out "
                    "statistics of hidden states"
                )
        ends = {layer: list(accumulate(lengths)) for layer, lengths in self.lengths.items()}
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

    @property
    def token_ids(self) -> Tensor | None:
        """Token ids of all forwards over the open sequences, by row; None if some are unknown."""
        known = [step for step in self._tokens if step is not None]
        return torch.cat(known, dim=1) if known and len(known) == len(self._tokens) else None

    def _observations(
        self, site: str, length: int, layers: dict[tuple[str, int], LayerAccumulator]
    ) -> Iterator[Observation]:
        assert self.last is not None
        last, device = self.last, next(iter(layers.values())).device
        queries = SampleAlignment.from_masks(self._batch, length, last.token_mask, last.segments, device)
        token_ids = self.token_ids
        if token_ids is not None and token_ids.shape != (self._batch, length):
            token_ids = None  # attention is among others as well, as patches of an image, or in a loop over rows
        for (kind, index), layer in layers.items():
            own_queries = keys = queries
            tokens, query_tokens = token_ids, token_ids if kind == "cross" else None
            if kind == "cross":
                if layer.queries != length and last.segments is None:  # some tokens alone, as in a Q-Former
                    part = slice(layer.first_query, layer.first_query + layer.queries)
                    mask = None if last.token_mask is None else last.token_mask[:, part]
                    own_queries = SampleAlignment.from_masks(self._batch, layer.queries, mask, None, device)
                    query_tokens = None if token_ids is None else token_ids[:, part]
                keys = SampleAlignment.from_masks(self._batch, layer.keys, last.encoder_mask, None, device)
                tokens = self.encoder_tokens
                if tokens is not None and tokens.shape != (self._batch, layer.keys):
                    tokens = None
            yield Observation(
                site=cross_site(site) if kind == "cross" else site,
                layer=index,
                causal=kind == "self" and (self.role == "decoder" or self._is_one_sided),
                length=own_queries.length,
                keys=keys.length,
                token_ids=None if tokens is None else keys.align_tokens(tokens.to(device)),
                query_token_ids=None if query_tokens is None else own_queries.align_tokens(query_tokens.to(device)),
                virtual_key=layer.virtual_key,
                tensors=layer.align(own_queries, keys, packed=last.segments is not None),
            )
