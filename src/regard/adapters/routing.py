"""Where a model reads an example, how its blocks are weighed there, and how long the weights hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from regard.adapters.attention import SharedAttention, query_vectors
from regard.adapters.lora import Mixture
from regard.errors import UserError

_MARK = "_regard_weights"


@dataclass(frozen=True, eq=False)
class _Kept:
    """The weights that something was computed with, and the state of the blocks that they are for."""

    weights: Tensor | None
    state: object


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module that is under way, with what it was given by name."""

    module: nn.Module
    given: Mapping[str, Any]


class _Carried:
    """A part of a model that is computed again in the backward pass, with the weights of its first time."""

    def __init__(self, function: Callable[..., Any], mixture: Mixture) -> None:
        self.function, self.mixture, self.weights = function, mixture, mixture.weights

    def __call__(self, *args: Any) -> Any:
        before, self.mixture.weights = self.mixture.weights, self.weights
        try:
            return self.function(*args)
        finally:
            self.mixture.weights = before


class Routing:
    """Hooks on a model that set the weights of a `Mixture` once for each example.

    They are set at the module that reads the tokens: the encoder of an encoder–decoder, else the base model. They hold
    until the call that they were set in ends, and go along with what was computed with them: the encoder's output, to
    the decoder, and the cache of keys and values, to the next tokens. Where neither says what the weights are, the
    model refuses to go on.

    `attention` makes the weights (row, block) of query vectors (row, width). While it has no key, there are none.
    """

    def __init__(self, model: PreTrainedModel, mixture: Mixture, attention: SharedAttention) -> None:
        self.model, self.mixture, self.attention = model, mixture, attention
        self.state = object()
        self.prompt: Tensor | None = None
        self._forced: tuple[Tensor | None] | None = None
        self._calls: list[_Call] = []
        self._again: list[tuple[Any, Any]] = []
        self._repeated: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.two_parts = bool(model.config.is_encoder_decoder) and model.get_encoder() is not model
        self.reader: nn.Module = model.get_encoder() if self.two_parts else model.base_model
        self._handles = list(self._hooked())

    def _hooked(self) -> Iterator[RemovableHandle]:
        """The hooks. A call begins before it is weighed, and what was read is marked before the call ends.

        Both come before hooks that others have put there by now, since these may use the weights.
        """
        decoder = self.model.get_decoder() if self.two_parts else None
        yield self.reader.register_forward_hook(self._after_reading)
        yield self.reader.register_forward_pre_hook(self._before_reading, with_kwargs=True, prepend=True)
        parts = (self.model, self.model.base_model, self.reader, decoder)
        for module in {id(part): part for part in parts if part is not None}.values():
            yield module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
            yield module.register_forward_hook(self._end, always_call=True)
        if decoder is not None and decoder not in (self.model, self.model.base_model):
            yield decoder.register_forward_pre_hook(self._before_decoding)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def changed(self) -> None:
        """Say that there are other blocks than before: weights that were kept hold no longer."""
        self.state = object()

    @contextmanager
    def forcing(self, weights: Tensor | None) -> Iterator[None]:
        """While it lasts all that is read is mixed with these weights; None: with no block at all."""
        before, self._forced = self._forced, (weights,)
        self.mixture.weights = weights
        try:
            yield
        finally:
            self._forced = before
            self.mixture.weights = None if before is None else before[0]

    @contextmanager
    def prompting(self, mask: Tensor | None) -> Iterator[None]:
        """While it lasts the prompt of each row is where the mask (row, token) is true."""
        before, self.prompt = self.prompt, mask
        try:
            yield
        finally:
            self.prompt = before

    def vectors(self, given: Mapping[str, Any], prompt: Tensor | None = None) -> Tensor:
        """The query vectors e (row, width) of a batch: of its real tokens, and of these of the prompt alone."""
        if given.get("inputs_embeds") is not None:
            embedded = given["inputs_embeds"]
        elif given.get("input_ids") is not None:
            embedded = self.embedding(given["input_ids"]).detach()
        else:
            raise UserError("input_ids: expected the tokens that the weights are made of, got none")
        return query_vectors(embedded, self._real(embedded, given, prompt))

    @property
    def embedding(self) -> nn.Module:
        """The input embeddings of what reads."""
        return self.reader.get_input_embeddings()  # type: ignore[operator]  # a part of a Transformers model

    def _real(self, embedded: Tensor, given: Mapping[str, Any], prompt: Tensor | None) -> Tensor:
        """(row, token): the tokens that count."""
        shape = embedded.shape[:2]
        real = torch.ones(shape, dtype=torch.bool, device=embedded.device)
        labels = given.get("labels")
        masks = {"attention_mask": given.get("attention_mask"), "prompt_mask": prompt}
        if prompt is None and self._has_prompt and isinstance(labels, Tensor) and labels.shape == shape:
            masks["labels"] = labels == -100
        for name, mask in masks.items():
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.shape != shape:
                got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise UserError(f"{name}: expected a mask (row, token) of {tuple(shape)}, got {got}")
            real = real & mask.to(real.device).bool()
        if not bool(real.any(1).all()):
            named = ", ".join(name for name, mask in masks.items() if mask is not None)
            raise UserError(f"{named}: expected at least one token of the prompt in each row, got a row with none")
        return real

    @property
    def _weighs(self) -> bool:
        """Whether what is read is to be weighed: there are blocks, and no weights are forced."""
        return self._forced is None and len(self.attention.keys) > 0

    @property
    def _has_prompt(self) -> bool:
        """Whether labels say where the answer is among the tokens that are read."""
        return not self.two_parts and self.model.can_generate()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins. The outermost one begins without weights, unless some are forced."""
        if module is self.model or any(call.module is module for call in self._calls):
            self._finish()  # of a call that was broken off
        named = kwargs
        if args:
            named = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        self._calls.append(_Call(module, named))
        if len(self._calls) == 1:
            self.mixture.weights = None if self._forced is None else self._forced[0]
            self._carry()
        before = named.get("encoder_outputs")
        if self.two_parts and before is not None and self._weighs:
            self.mixture.weights = self._recalled(before, "encoder_outputs")

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A call ends; with the outermost one its weights are gone."""
        if not self._calls or self._calls[-1].module is not module:
            return
        self._calls.pop()
        if not self._calls:
            self._finish()

    def _finish(self) -> None:
        """Leave nothing of the calls that there were."""
        self._calls = []
        self.mixture.weights = None if self._forced is None else self._forced[0]
        for module, function in self._again:
            module._gradient_checkpointing_func = function
        self._again = []

    def _before_reading(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Weigh the blocks for what is about to be read."""
        if not self._weighs:
            return
        given = self._calls[-1].given
        cache = None if self.two_parts else given.get("past_key_values")
        if cache is not None and _holds_tokens(cache):
            self.mixture.weights = self._recalled(cache, "past_key_values")
        else:
            labels = self._calls[0].given.get("labels")
            self.mixture.weights = self.weights({**given, "labels": labels}, self.prompt)

    def weights(self, given: Mapping[str, Any], prompt: Tensor | None = None) -> Tensor:
        """The weights (row, block) of a batch, the same whatever precision autocast asks for."""
        found: Tensor = self.attention(self.vectors(given, prompt))
        return found

    def _after_reading(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Send the weights along with what was computed with them."""
        kept = _Kept(self.mixture.weights, self.state)
        values = list(output.values()) if isinstance(output, Mapping) else list(output)
        marked = [output, *values[:1]] if self.two_parts else [one for one in values if isinstance(one, Cache)]
        for one in marked:
            if not isinstance(one, tuple):
                setattr(one, _MARK, kept)

    def _before_decoding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse to decode what nobody knows the weights of."""
        if self._weighs and self.mixture.weights is None:
            self._recalled(None, "encoder_hidden_states")

    def _recalled(self, thing: Any, name: str) -> Tensor | None:
        """The weights that something was computed with. Raises UserError if it does not say, or for other blocks."""
        parts = (thing, thing[0]) if isinstance(thing, (tuple, Mapping)) and thing else (thing,)
        kept = next((found for part in parts if (found := getattr(part, _MARK, None)) is not None), None)
        if isinstance(kept, _Kept) and kept.state is self.state:
            return kept.weights
        got = "those of other blocks" if kept is not None else "some that no weights are known for"
        raise UserError(
            f"{name}: expected what this model computed with the blocks that it has, got {got}; use `given`"
        )

    def _carry(self) -> None:
        """Let what the backward pass computes again be computed with the weights of now."""
        for module in self._repeated:
            if not (module.gradient_checkpointing and module.training):
                continue
            function = module._gradient_checkpointing_func
            if getattr(function, "keywords", {}).get("use_reentrant"):
                raise UserError("gradient checkpointing: expected use_reentrant=False, got True")
            self._again.append((module, function))
            module._gradient_checkpointing_func = _carrying(function, self.mixture)


def _carrying(function: Callable[..., Any], mixture: Mixture) -> Callable[..., Any]:
    """A checkpointing function under which the mixture is the same both times."""
    return lambda part, *args, **options: function(_Carried(part, mixture), *args, **options)


def _holds_tokens(cache: Any) -> bool:
    """Whether keys and values of earlier tokens are in a cache."""
    return int(cache.get_seq_length()) > 0 if isinstance(cache, Cache) else bool(cache)
