"""A model that writes its answers: any language model, from text to text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from regard.errors import UserError
from regard.models.architectures import is_bidirectional, select_language_model_class
from regard.models.classifier import add_lora, merge_lora
from regard.models.loaded import Loaded
from regard.models.pretrained import load
from regard.runs.quiet import suppress_logging

IGNORE_INDEX = -100
NEW_TOKENS = 50
"""Of an answer at most, as SAPT has it (arXiv 2401.08295)."""


@dataclass(eq=False)
class GeneratorConfig:
    """What a `Generator` is made of.

    `lora`: rank, alpha and targets of low-rank adapters beside frozen weights, or None. `lineage`: the model that this
    one began as, and the tasks that it has learnt since, in order. `part_of`: the method whose network this is a part
    of, which does not answer by itself; None where it does.
    """

    head: ClassVar[Literal["text"]] = "text"
    common: ClassVar[tuple[int, ...]] = ()
    lora: dict[str, Any] | None = None
    lineage: dict[str, Any] = field(default_factory=dict)
    part_of: str | None = None


@dataclass(frozen=True, eq=False)
class AnswerLogits:
    """What a generator gives for answers that are known: `logits` (row, token, word), those at t predict answer t."""

    logits: Tensor


@dataclass(frozen=True, eq=False)
class DecoderInputs:
    """Prompts and answers as a decoder-only model reads them, all answers beginning in the same column.

    All (row, token): `input_ids`, with padding before the prompt and behind the answer; `attention_mask`, which of them
    are real; `prompt_mask`, which are the prompt's; `position_ids`, counted from each row's first real token.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_mask: Tensor

    @property
    def position_ids(self) -> Tensor:
        """The place of each token in its row without padding."""
        return (self.attention_mask.long().cumsum(1) - 1).clamp(min=0)


def load_generator(name: str, **options: Any) -> Loaded:
    """Return a language model with its head and its tokenizer: an encoder–decoder (T5, BART), or a decoder alone.

    `options` are those of `regard.models.pretrained.load`, whose checks these are. Raises UserError.
    """
    return load(name, language_model=True, **options)


def is_language_model(model: nn.Module) -> bool:
    """Return whether a model has a language model's head and writes text from left to right."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not is_bidirectional(model.config)


class Generator(nn.Module):
    """A language model that reads prompts and writes answers.

    `encoder` is the Transformers model itself, head included, so that adapters, measuring and replacing work on it as
    ever. Prompts come padded on the right, whatever the model: a decoder-only one gets them padded on the left.
    """

    def __init__(self, encoder: PreTrainedModel, config: GeneratorConfig) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config

    @classmethod
    def from_loaded(cls, loaded: Loaded, *, lora: Mapping[str, Any] | None = None, seed: int = 0) -> Generator:
        """Return a generator over a copy of a pretrained language model.

        `lora`: `rank`, and `alpha` and `targets` (names of layers, None for the choice of `add_lora`), which freezes
        the model below; its weights are drawn from the seed. Raises UserError where the model has no head, where
        nothing says how an answer begins or ends, or where peft is not there.
        """
        if not is_language_model(loaded.model):
            raise UserError(
                f"model: expected a language model with its head, got {type(loaded.model).__name__}; "
                f"regard.models.generator.load_generator({loaded.name!r}) loads one"
            )
        lineage: dict[str, Any] = {"base": loaded.name, "sha256": loaded.sha256, "tasks": []}
        encoder = deepcopy(loaded.model)
        encoder.generation_config = _greedy(loaded)
        if lora:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                add_lora(encoder, **lora)
        return cls(encoder, GeneratorConfig(lora=dict(lora) if lora else None, lineage=lineage))

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts are read by an encoder of their own, and not by what writes the answers."""
        return bool(self.encoder.config.is_encoder_decoder)

    @property
    def pad_token_id(self) -> int:
        """The id that stands in padding."""
        found: int = self.encoder.generation_config.pad_token_id
        return found

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return tuple(self.encoder.generation_config.eos_token_id)

    @cached_property
    def _takes(self) -> frozenset[str]:
        """What the model's forward has parameters for."""
        return frozenset(inspect.signature(type(self.encoder).forward).parameters)

    # -- answers that are known ---------------------------------------------------------------------------

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> AnswerLogits:
        """Return the logits of answers, `labels` (row, token), of which −100 is padding, given prompts (row, token).

        Each token of an answer is predicted from the prompt and the tokens before it, as they should be.
        """
        if self.is_encoder_decoder:
            logits = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask.long(),
                decoder_input_ids=self._shifted(labels),
                use_cache=False,
            ).logits
            return AnswerLogits(logits)
        joined, many = self.join(input_ids, attention_mask, labels), labels.shape[1]
        given: dict[str, Any] = {"input_ids": joined.input_ids, "attention_mask": joined.attention_mask.long()}
        if "position_ids" in self._takes:
            given["position_ids"] = joined.position_ids
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = many + 1
        return AnswerLogits(self.encoder(**given, use_cache=False).logits[:, -many - 1 : -1])

    def join(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> DecoderInputs:
        """Return prompts, and behind them the answers if there are any, as a decoder-only model reads them."""
        real = attention_mask.bool()
        order = real.int().argsort(dim=1, stable=True)
        ids, prompt = input_ids.gather(1, order), real.gather(1, order)
        if labels is None:
            return DecoderInputs(ids, prompt, prompt)
        answered = labels != IGNORE_INDEX
        return DecoderInputs(
            torch.cat([ids, labels.masked_fill(~answered, self.pad_token_id)], 1),
            torch.cat([prompt, answered], 1),
            torch.cat([prompt, torch.zeros_like(answered)], 1),
        )

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return what the decoder of an encoder–decoder reads.

        The answers, one later, behind the token that begins them.
        """
        first = labels.new_full((len(labels), 1), self.encoder.generation_config.decoder_start_token_id)
        return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE_INDEX, self.pad_token_id)], 1)

    # -- answers that are written -------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, new_tokens: int = NEW_TOKENS) -> Tensor:
        """The answers (row, token) to prompts (row, token): greedy, at most so many tokens, padded behind their end.

        They do not depend on what else is in the batch, but for rounding where two tokens are all but equally likely.
        """
        ids, real, model = input_ids, attention_mask.bool(), cast(Any, self.encoder)
        if not self.is_encoder_decoder:
            joined = self.join(input_ids, attention_mask)
            ids, real = joined.input_ids, joined.attention_mask
        with suppress_logging():
            found: Tensor = model.generate(input_ids=ids, attention_mask=real.long(), max_new_tokens=new_tokens)
        return found[:, 1:] if self.is_encoder_decoder else found[:, ids.shape[1] :]

    # -- disk -----------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a model that Transformers loads as the language model that it is, `lineage` in its configuration.

        Low-rank adapters are added to the weights that they stand beside. Of a part of a network only the configuration
        is written, and how it writes.
        """
        model = self.encoder
        if self.config.lora:
            model = deepcopy(model)
            merge_lora(model)
        config = deepcopy(model.config)
        config.lineage, config.part_of = self.config.lineage, self.config.part_of
        if self.config.part_of is not None:
            config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            return
        before, model.config = model.config, config
        try:
            model.save_pretrained(folder)
        finally:
            model.config = before

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Generator:
        """Return the generator that `save_pretrained` wrote. Raises UserError for a part of a network."""
        config = AutoConfig.from_pretrained(folder)
        if getattr(config, "part_of", None) is not None:
            raise UserError(
                f"model: expected a language model, {folder} is the network of {config.part_of}; "
                "regard.continual.models.load_network reads it"
            )
        kind = select_language_model_class(config)
        model = kind.from_pretrained(folder, config=config, use_safetensors=True, dtype="auto")
        return cls(model.eval(), GeneratorConfig(lineage=dict(getattr(config, "lineage", None) or {})))

    @classmethod
    def empty(cls, folder: str | Path, *, lora: Mapping[str, Any] | None) -> Generator:
        """Return a generator as the folder's configuration says, with weights that are to be given."""
        config = AutoConfig.from_pretrained(folder)
        model = select_language_model_class(config).from_config(config)
        model.generation_config = GenerationConfig.from_pretrained(folder)
        if lora:
            add_lora(model, **lora)
        lineage = dict(getattr(config, "lineage", None) or {})
        return cls(model.eval(), GeneratorConfig(lora=dict(lora) if lora else None, lineage=lineage))


def _greedy(loaded: Loaded) -> GenerationConfig:
    """Return how a model writes: the likeliest token at each step, until one that ends an answer.

    Nothing else of what its makers set for writing is kept, as beams or penalties.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    told = model.generation_config or GenerationConfig()
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model: expected a tokenizer with a token that ends a text (eos), that of {loaded.name} has none"
        )
    ends = told.eos_token_id if isinstance(told.eos_token_id, list) else [told.eos_token_id]
    start = None
    if model.config.is_encoder_decoder:
        start = told.decoder_start_token_id
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        if start is None:
            raise UserError(f"model: expected a decoder_start_token_id, the configuration of {loaded.name} has none")
    pads = (tokenizer.pad_token_id, told.pad_token_id, tokenizer.eos_token_id)
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        bos_token_id=told.bos_token_id,
        eos_token_id=sorted({tokenizer.eos_token_id, *(one for one in ends if one is not None)}),
        pad_token_id=next(one for one in pads if one is not None),
        decoder_start_token_id=start,
    )
