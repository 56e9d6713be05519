"""Hooks that compute the weights of adapters where a model reads its tokens, and keep them as long as they hold."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from regard.adapters.answers import KEPT, MARKS, answer_labels, are_told
from regard.adapters.known_vectors import KnownVectors
from regard.adapters.lora import MixedLayer
from regard.adapters.mixture import Mixture, hold, one_each
from regard.adapters.queries import QueryReader, StateReader, find_reader
from regard.adapters.recomputed import find_checkpointed, keep_weights, patch_checkpointing, restore_checkpointing
from regard.adapters.routers import Router
from regard.adapters.rows import WHOLE_GRAPH, are_packed, count_rows, has_one_each, refuse_packed, special_tokens
from regard.attention.tracing import break_graph, is_traced
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError, warn_user
from regard.hooks.caches import CACHE_NAMES, cache_name, is_filled
from regard.hooks.direct_calls import restore_forwards, set_forwards
from regard.hooks.modalities import TokenModalities
from regard.hooks.one_at_a_time import OneAtATime
from regard.hooks.split_weights import is_sharded

_MARK = "_regard_weights"


class _WeightRecord(NamedTuple):
    """Weights that an output was computed with, and the state of the adapters that they belong to."""

    weights: Tensor | None
    state: object


class _Call(NamedTuple):
    """A running call of a module, with its inputs by name."""

    module: nn.Module
    inputs: Mapping[str, Any]


class Routing:
    """Hooks on a model that set the weights of a `Mixture` once for each example.

    Weights are set at the module that reads the tokens: the encoder of an encoder–decoder, else the base model. They
    hold until the outermost call ends. They are also attached to what was computed with them: to the encoder's output
    for the decoder, and to the cache of keys and values for the next tokens. If the weights are unknown there, the call
    raises UserError. Without adapters there are no weights.

    `unmerged` are weights of layers as they were before adapters were merged into them: query vectors are read with
    these, as those that the router knows were.

    With `reads_along`, where the layers that are read have no adapters, the forward pass gives the query vectors. Else,
    and where it has dropout or is checkpointed, these layers are run before it. `prepare` is called before a call.

    Calls of several threads wait for each other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mixture: Mixture,
        router: Router,
        query_reader: QueryReader,
        *,
        reads_along: bool = False,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.mixture, self.router, self.query_reader = model, mixture, router, query_reader
        self.reads_along, self.prepare = reads_along, prepare
        self._stop_reading: Callable[[], None] | None = None
        self.unmerged: list[tuple[MixedLayer, Tensor]] = []
        self._is_reading = False
        self.state = object()
        self.num_adapters = 0  # a number that `torch.compile` knows without reading a tensor
        self.expects_prompt = False  # while an adapter trains whose rows the router knows by their prompts
        self.prompted: dict[str, bool] = {}  # whether rows of adapters have answers, by name, as far as it is known
        self._is_told = False
        self.prompt: Tensor | None = None  # mask (row, token) of the prompt, while a caller sets one
        self.labels: Tensor | None = None  # those that the adapters were called with, while the call lasts
        self._forced: tuple[Tensor | None] | None = None
        self._forcing: threading.Thread | None = None
        self._calls: list[_Call] = []
        self._patched: list[tuple[Any, Any]] = []
        self._checkpointed = find_checkpointed(model)
        self._special = special_tokens(model)
        self._modalities = TokenModalities.of(model, ())
        self.reader, self.two_parts = find_reader(model)
        self._turns = OneAtATime([*self._parts()])
        with self._turns:
            self._forwards = set_forwards(self._parts())
            self._handles = list(self._register_hooks())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_turns": None, "_forcing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._turns = OneAtATime([*self._parts()])

    def _parts(self) -> Iterator[nn.Module]:
        """Yield the modules that may be called, each once."""
        decoder = self.model.get_decoder() if self.two_parts else None
        parts = (self.model, self.model.base_model, self.reader, decoder)
        yield from {id(part): part for part in parts if part is not None}.values()

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        """Register hooks that run before those of others, `_wait` and `_begin` first, `_end` and `_let_go` last."""
        decoder = self.model.get_decoder() if self.two_parts else None
        yield self.reader.register_forward_hook(self._after_reading)
        yield self.reader.register_forward_pre_hook(self._before_reading, with_kwargs=True, prepend=True)
        for module in self._parts():
            yield module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
            yield module.register_forward_pre_hook(self._wait, prepend=True)
            yield module.register_forward_hook(self._end, always_call=True)
            yield module.register_forward_hook(self._let_go, always_call=True)
        if decoder is not None and decoder not in (self.model, self.model.base_model):
            yield decoder.register_forward_pre_hook(self._before_decoding)

    def remove(self) -> None:
        self._turns.end_block()
        for handle in self._handles:
            handle.remove()
        restore_forwards(self._forwards)
        self._turns.let_go()

    def changed(self, num_adapters: int) -> None:
        """Invalidate attached weights after adapters were added or removed, and take note of their number."""
        self.state, self.num_adapters = object(), num_adapters

    @contextmanager
    def use_weights(self, weights: Tensor | None) -> Iterator[None]:
        """Use these weights for all inputs, in all threads, for a while; None leaves the adapters out."""
        thread = threading.current_thread()
        with self.alone():
            previous = self._forced, self._forcing
            if previous[1] not in (None, thread) and previous[1].is_alive():
                raise UserError(
                    "use_weights: expected one thread at a time to choose weights, which hold for all; got one while "
                    "another is inside such a block; give each thread a copy, or wait"
                )
            self._force((weights,), thread)
        try:
            yield
        finally:
            with self.alone():
                self._force(*previous)

    def _force(self, forced: tuple[Tensor | None] | None, thread: threading.Thread | None) -> None:
        self._forced, self._forcing = forced, thread
        self.mixture.weights = None if forced is None else forced[0]

    def alone(self) -> AbstractContextManager[None]:
        """Wait for the calls of other threads; theirs wait until the block ends."""
        return nullcontext() if is_traced() else self._turns

    def _wait(self, module: nn.Module, args: Any) -> None:
        if is_traced():
            return
        if not self._is_reading:
            self._turns.end(module, args, None)  # of a call that was interrupted
        self._turns.begin(module, args)

    def _let_go(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_traced():
            self._turns.end(module, args, output)

    def vectors(self, inputs: Mapping[str, Any], prompt: Tensor | None = None) -> Tensor:
        """Return the query vectors (row, width) of a batch, from its tokens that are prompt and not padding.

        Raises UserError where FSDP has sharded what reads the tokens, and gathers it in a forward pass alone.
        """
        reader: Any = self.reader
        if is_sharded(reader.get_input_embeddings()):
            expected = "router: expected to read texts before fully_shard, or in a forward pass of the whole model"
            raise UserError(f"{expected}; got sharded embeddings. Call fit_router before fully_shard")
        with self.alone():
            return self._read(inputs, self._valid_mask(inputs, prompt, are_packed(inputs)))

    def _read(self, inputs: Mapping[str, Any], valid: Tensor) -> Tensor:
        self.prepare()
        with self.mixture.use(None), hold(self, _is_reading=True), ExitStack() as stack:
            for layer, weight in self.unmerged:
                stack.enter_context(hold(layer.weight, data=weight.to(layer.weight)))
            return self.query_reader(inputs, valid)

    def _valid_mask(self, inputs: Mapping[str, Any], prompt: Tensor | None, packed: Tensor | None = None) -> Tensor:
        """Return the mask (row, token) of the tokens that count.

        Whether `packed` is true is asked together with whether every row has such a token, for an answer waits for the
        device, and ends a graph of `torch.compile`. Nothing is asked where neither masks nor positions are given.
        """
        given = [inputs[name] for name in ("inputs_embeds", "input_ids") if inputs.get(name) is not None]
        if not given:
            raise UserError("input_ids: expected the tokens that the weights are made of, got none")
        tokens: Tensor = given[0]
        shape = tokens.shape[:2]
        valid = torch.ones(shape, dtype=torch.bool, device=tokens.device)
        masks = {"attention_mask": inputs.get("attention_mask"), "prompt_mask": prompt}
        for name, mask in masks.items():
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.shape != shape:
                description = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise UserError(f"{name}: expected a mask (row, token) of {tuple(shape)}, got {description}")
            valid = valid & mask.to(valid.device).bool()
        is_told = not shape[1] or any(mask is not None for mask in masks.values())
        asked = [valid.any(1).all()] * is_told + ([] if packed is None else [~packed.to(valid.device)])
        if asked and not bool(torch.stack(asked).all()):
            refuse_packed(packed)
            names = ", ".join(name for name, mask in masks.items() if mask is not None) or "input_ids"
            raise UserError(f"{names}: expected at least one token of the prompt in each row, got a row with none")
        labels = answer_labels(inputs, tokens)
        marks_answer = not self.two_parts and self.model.can_generate() and prompt is None
        if marks_answer and isinstance(labels, Tensor) and labels.shape == shape:
            return self._without_answer(tokens, valid, labels)
        return valid

    def _without_answer(self, tokens: Tensor, valid: Tensor, labels: Tensor) -> Tensor:
        """Keep the tokens without labels of a row, or all if those are but special ones, as in `labels = input_ids`.

        A collator takes the labels of padding away, and thereby those of the tokens that pad, such as end of text.
        """
        in_prompt = valid & (labels.to(valid.device) == IGNORE_INDEX)
        words = in_prompt
        if tokens.dim() == 2:
            words = in_prompt & ~torch.isin(tokens, torch.tensor(self._special, device=tokens.device))
        return torch.where(words.any(1, keepdim=True), in_prompt, valid)

    def marks_answer(self, inputs: Mapping[str, Any], prompt: Tensor | None = None) -> bool:
        """Return whether labels, or a mask of the prompt, take tokens of a batch out of what is routed by."""
        known = self._valid_mask(inputs, prompt)
        return not torch.equal(known, self._valid_mask({**inputs, **dict.fromkeys(MARKS)}, None))

    def _check_prompt(self, inputs: Mapping[str, Any]) -> None:
        """Refuse to train or evaluate by the weights of prompt and answer where the router knows prompts.

        A Trainer that takes labels away still says how many there are, in evaluation too; a call without that is one to
        answer a prompt. It is warned of where nothing is known of the rows of some adapters, as after loading.
        """
        if self.num_adapters < 2 or self.prompt is not None or are_told(inputs):
            return
        trains = self.model.training and torch.is_grad_enabled()
        is_taken = self._calls[0].inputs.get("num_items_in_batch") is not None
        is_taken = is_taken and not self.two_parts and self.model.can_generate()
        if self.expects_prompt if trains else is_taken and any(self.prompted.values()):
            raise UserError(
                f"labels: expected them or a prompt_mask in {'training' if trains else 'evaluation'}, since the router "
                "knows rows by their prompts, got neither (with compute_loss_func the Trainer takes labels away: give "
                "rows a prompt_mask)"
            )
        if is_taken and len(self.prompted) < self.num_adapters and not self._is_told:
            self._is_told = True
            reason = "the Trainer takes them away (compute_loss_func), so rows are weighed by all their tokens"
            warn_user(f"labels: {reason}; if these have answers, give rows a prompt_mask")

    def refuse_joined_rows(self) -> None:
        """Raise UserError if rows have weights of their own, for a call that joins several texts to one row."""
        weights = self.mixture.weights
        if self.is_active or (weights is not None and weights.dim() > 1 and len(weights) > 1):
            raise UserError(
                "generate_batch: expected the same weights for all texts, which become one row, got those of each; set "
                "some by `use_only`, or `use_weights` of a shape (adapter,), or use `generate`"
            )

    @property
    def is_active(self) -> bool:
        """Whether weights are computed: there are adapters, and no weights are forced."""
        return self._forced is None and self.num_adapters > 0

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call; the outermost one begins without weights, unless some are forced."""
        if self._is_reading:
            return
        if module is self.model or any(call.module is module for call in self._calls):
            self._finish()  # an interrupted call
        inputs = kwargs
        if args:
            inputs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        self._calls.append(_Call(module, inputs))
        if len(self._calls) == 1:
            self.prepare()
            self.mixture.in_call = True
            self.mixture.rows = None if is_traced() else count_rows(module, inputs)
            self.mixture.has_one_each = partial(has_one_each, self._modalities, inputs.get("input_ids"))
            self.mixture.weights = None if self._forced is None else self._forced[0]
            self._patched = patch_checkpointing(self._checkpointed, partial(keep_weights, self.mixture, self.alone))
        encoder_outputs = inputs.get("encoder_outputs")
        if self.two_parts and encoder_outputs is not None and self.is_active:
            self.mixture.weights = self._recall_weights(encoder_outputs, "encoder_outputs")

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_reading or not self._calls or self._calls[-1].module is not module:
            return
        self._calls.pop()
        if not self._calls:
            is_mixed = self.mixture.weights is not None
            self._finish()
            if output is not None and self.is_active and not is_mixed:
                name, reader = type(self.model).__name__, type(self.reader).__name__
                raise UserError(
                    f"model: expected one that reads its tokens in its {reader}, got a {name}, which does not"
                )

    def _finish(self) -> None:
        self._calls = []
        if self._stop_reading is not None:
            self._stop_reading()
            self._stop_reading = None
        self.mixture.in_call, self.mixture.rows, self.mixture.has_one_each = False, None, one_each
        self.mixture.weights = None if self._forced is None else self._forced[0]
        restore_checkpointing(self._patched)
        self._patched = []

    def _before_reading(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_reading or not self.is_active:
            return
        inputs = self._calls[-1].inputs
        name = None if self.two_parts else cache_name(inputs)
        if name is not None and is_filled(inputs[name]):
            self.mixture.weights = self._recall_weights(inputs[name], name)
        else:
            break_graph(WHOLE_GRAPH)
            has_several = self.num_adapters > 1  # one has weight 1 in all rows
            packed = are_packed(inputs) if has_several else None
            labels, kept = (self._calls[0].inputs.get(name) for name in ("labels", KEPT))
            inputs = {**inputs, "labels": self.labels if labels is None else labels, KEPT: kept}
            self._check_prompt(inputs)
            if has_several and inputs.get("cu_seq_lens_q") is not None:
                refuse_packed(packed)
                self.refuse_joined_rows()
            valid = self._valid_mask(inputs, self.prompt, packed)
            if not self._read_along(inputs, valid):
                self.mixture.weights = self.router(self._read(inputs, valid))

    def _read_along(self, inputs: Mapping[str, Any], valid: Tensor) -> bool:
        """Let the pass that begins set the weights, if it can."""
        if not self.reads_along or self._patched:
            return False
        assert isinstance(self.query_reader, (StateReader, KnownVectors))

        def use(vectors: Tensor) -> None:
            self.mixture.weights = self.router(vectors)

        self._stop_reading = self.query_reader.read_along(inputs, valid, use)
        return self._stop_reading is not None

    def weights(self, inputs: Mapping[str, Any], prompt: Tensor | None = None) -> Tensor:
        """Return the weights (row, adapter) of a batch, whatever autocast's precision."""
        return self.router(self.vectors(inputs, prompt))

    def _after_reading(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Attach the weights to the outputs computed with them, and to a cache that was filled but is not returned."""
        if self._is_reading:
            return
        record = _WeightRecord(self.mixture.weights, self.state)
        values = list(output.values()) if isinstance(output, Mapping) else list(output)
        given = [self._calls[-1].inputs.get(name) for name in CACHE_NAMES] if self._calls else []
        caches = [value for value in (*values, *given) if isinstance(value, Cache)]
        carriers = [output, *values[:1]] if self.two_parts else caches
        for carrier in carriers:
            if not isinstance(carrier, tuple):
                setattr(carrier, _MARK, record)

    def _before_decoding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Raise UserError if the decoder reads states whose weights are unknown."""
        if self.is_active and self.mixture.weights is None:
            self._recall_weights(None, "encoder_hidden_states")

    def _recall_weights(self, source: Any, name: str) -> Tensor | None:
        """Return the weights attached to an output; raise UserError if there are none, or those of other adapters."""
        parts = (source, source[0]) if isinstance(source, (tuple, Mapping)) and source else (source,)
        record = next((mark for part in parts if (mark := getattr(part, _MARK, None)) is not None), None)
        if isinstance(record, _WeightRecord) and record.state is self.state:
            return record.weights
        got = "states of other adapters" if record is not None else "states without known weights"
        raise UserError(
            f"{name}: expected what this model computed with its current adapters, got {got}; set weights with "
            "`use_weights`"
        )
