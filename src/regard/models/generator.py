"""A model that writes its answers: any language model, from text to text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from regard.data.examples import IGNORE_INDEX as IGNORE_INDEX
from regard.errors import UserError
from regard.models.auto_classes import is_bidirectional, select_language_model_class
from regard.models.classifier import add_lora, extract_encoder, merge_lora
from regard.models.inputs import find_decoder_start
from regard.models.model_files import Loaded, eval_mode
from regard.models.pretrained import load
from regard.runs.provenance import sha256_of_weights
from regard.runs.quiet import suppress_logging

NEW_TOKENS = 50  # of an answer at most, as SAPT has it (arXiv 2401.08295)


@dataclass(eq=False)
class GeneratorConfig:
    """What a `Generator` is made of; see `ClassifierConfig` for the fields."""

    head: ClassVar[Literal["text"]] = "text"
    common: ClassVar[tuple[int, ...]] = ()
    lora: dict[str, Any] | None = None
    lineage: dict[str, Any] = field(default_factory=dict)
    part_of: str | None = None


@dataclass(frozen=True, eq=False)
class DecoderInputs:
    """Prompts and answers (row, token) as a decoder-only model reads them, all answers beginning in the same column.

    There is padding before the prompt and behind the answer, where `attention_mask` is False.
    """

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def position_ids(self) -> Tensor:
        """Positions, counted from each row's first real token."""
        return (self.attention_mask.long().cumsum(1) - 1).clamp(min=0)


def load_generator(name: str, **options: Any) -> Loaded:
    """Return a language model with its head and its tokenizer; the options are those of `load`."""
    return load(name, language_model=True, **options)


def is_language_model(model: nn.Module) -> bool:
    """Return whether a model has a language model's head and writes text from left to right."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not is_bidirectional(model.config)


def add_model_hash(loaded: Loaded) -> Loaded:
    """Return the model with a hash of its weights if no file has one: of a language model all, else the encoder's."""
    return replace(loaded, sha256=loaded.sha256 or hash_weights(loaded, encoder=not is_language_model(loaded.model)))


def hash_weights(loaded: Loaded, *, encoder: bool) -> str:
    """Return a hash of all weights of a model, or of its encoder's."""
    return sha256_of_weights(extract_encoder(deepcopy(loaded.model)) if encoder else loaded.model)


class Generator(nn.Module):
    """A language model that reads prompts and writes answers.

    `encoder` is the Transformers model itself, head included, so that adapters, measuring and replacing work on it.
    Prompts come padded on the right, whatever the model: a decoder-only one gets them padded on the left.
    """

    def __init__(self, encoder: PreTrainedModel, config: GeneratorConfig) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config

    @classmethod
    def from_loaded(cls, loaded: Loaded, *, lora: Mapping[str, Any] | None = None, seed: int = 0) -> Generator:
        """Return a generator over a copy of a pretrained language model.

        `lora` has arguments of `add_lora`, which freezes the model; the seed is of its weights. Raises UserError if the
        model has no head, if nothing says how an answer begins or ends, or without peft.
        """
        if not is_language_model(loaded.model):
            advice = f"regard.models.generator.load_generator({loaded.name!r}) loads one"
            kind = type(loaded.model).__name__
            raise UserError(f"model: expected a language model with its head, got {kind}; {advice}")
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
        return bool(self.encoder.config.is_encoder_decoder)

    @property
    def pad_token_id(self) -> int:
        return self.encoder.generation_config.pad_token_id

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return tuple(self.encoder.generation_config.eos_token_id)

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(inspect.signature(type(self.encoder).forward).parameters)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalLMOutput:
        """Return the logits (row, token, word) of answers, each from the tokens before it; −100 is padding."""
        length, inputs = labels.shape[1], dict[str, Any](use_cache=False)
        if self.is_encoder_decoder:
            inputs |= {"input_ids": input_ids, "decoder_input_ids": self._shift(labels)}
            return CausalLMOutput(logits=self.encoder(attention_mask=attention_mask.long(), **inputs).logits)
        joined = self.join(input_ids, attention_mask, labels)
        inputs |= {"input_ids": joined.input_ids, "attention_mask": joined.attention_mask.long()}
        if "position_ids" in self._input_names:
            inputs["position_ids"] = joined.position_ids
        if "logits_to_keep" in self._input_names:
            inputs["logits_to_keep"] = length + 1
        return CausalLMOutput(logits=self.encoder(**inputs).logits[:, -length - 1 : -1])

    def join(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> DecoderInputs:
        """Return prompts, and behind them the answers if there are any, as a decoder-only model reads them."""
        real = attention_mask.bool()
        order = real.int().argsort(dim=1, stable=True)
        ids, prompt = input_ids.gather(1, order), real.gather(1, order)
        if labels is None:
            return DecoderInputs(ids, prompt)
        answered = labels != IGNORE_INDEX
        return DecoderInputs(
            torch.cat([ids, labels.masked_fill(~answered, self.pad_token_id)], 1),
            torch.cat([prompt, answered], 1),
        )

    def _shift(self, labels: Tensor) -> Tensor:
        """Return answers behind the token that begins them, as the decoder of an encoder–decoder reads them."""
        first = labels.new_full((len(labels), 1), self.encoder.generation_config.decoder_start_token_id)
        return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE_INDEX, self.pad_token_id)], 1)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, new_tokens: int = NEW_TOKENS) -> Tensor:
        """Return the greedy answers (row, token) to prompts (row, token), padded behind their end."""
        ids, real, model = input_ids, attention_mask.bool(), cast(Any, self.encoder)
        if not self.is_encoder_decoder:
            joined = self.join(input_ids, attention_mask)
            ids, real = joined.input_ids, joined.attention_mask
        with suppress_logging(), eval_mode(model):
            output = model.generate(input_ids=ids, attention_mask=real.long(), max_new_tokens=new_tokens)
        return output[:, 1 if self.is_encoder_decoder else ids.shape[1] :]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a model that Transformers loads as a language model, with LoRA adapters merged.

        `lineage` is in its configuration. Of a part of a network only the configurations are written.
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
        """Return the generator that `save_pretrained` wrote; raise UserError for a part of a network."""
        config = AutoConfig.from_pretrained(folder)
        if getattr(config, "part_of", None) is not None:
            problem = f"{folder} is the network of {config.part_of}; regard.continual.models.load_network reads it"
            raise UserError(f"model: expected a language model, {problem}")
        auto_class = select_language_model_class(config)
        model = auto_class.from_pretrained(folder, config=config, use_safetensors=True, dtype="auto")
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
    """Return the configuration of greedy decoding, without beams or penalties that the model's makers set."""
    model, eos = loaded.model, loaded.tokenizer.eos_token_id
    published = model.generation_config or GenerationConfig()
    if eos is None:
        expected = "a tokenizer with a token that ends a text (eos)"
        raise UserError(f"model: expected {expected}, that of {loaded.name} has none")
    ends = published.eos_token_id if isinstance(published.eos_token_id, list) else [published.eos_token_id]
    start = None
    if model.config.is_encoder_decoder:
        start = find_decoder_start(model)
        if start is None:
            raise UserError(f"model: expected a decoder_start_token_id, the configuration of {loaded.name} has none")
    pads = (loaded.tokenizer.pad_token_id, published.pad_token_id, eos)
    tokens = {"bos_token_id": published.bos_token_id, "decoder_start_token_id": start}
    tokens["eos_token_id"] = sorted({eos, *(token for token in ends if token is not None)})
    tokens["pad_token_id"] = next(token for token in pads if token is not None)
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **tokens)
