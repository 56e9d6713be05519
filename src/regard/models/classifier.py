"""A classifier over several tasks: any encoder, and one head for all their classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from regard.errors import UserError, check_choice
from regard.models import label_texts as labels
from regard.models.configuration import RegardConfig
from regard.models.heads import (
    HEADS,
    LABEL_SCALE,
    POOLINGS,
    HeadName,
    LabelTextHead,
    LinearHead,
    Pooling,
    PreScalingHead,
    make_head,
)
from regard.models.loaded import Loaded

_UNSTATED = "auto"


class ClassifierConfig(PreTrainedConfig):
    """What a `Classifier` is made of.

    `base`: the configuration of the model below, as a dictionary. `head`: one of `regard.models.heads.HEADS`.
    `classes`: their names. `reading`: the token that a head reads, `first`, `last` or `mean`; `auto` is the last of a
    causal model, the mean of an encoder–decoder's encoder and for the head `labels`, and the first else. `common`: ids
    of common tokens, for the head `sink`. `label_scale`, `label_texts`: what the head `labels` multiplies cosines by,
    and the words of each class. `lora`: rank, alpha and targets of low-rank adapters beside frozen weights, or None.
    `lineage`: the model that this one began as, and the tasks that it has learnt since, in order. `part_of`: the method
    whose network this is a part of, which does not answer by itself; None where it does.

    Raises UserError where a choice is unknown.
    """

    model_type = "regard-classifier"

    def __init__(
        self,
        *,
        base: Mapping[str, Any] | None = None,
        head: HeadName = "linear",
        classes: Sequence[str] = (),
        reading: str = _UNSTATED,
        head_dropout: float = 0.1,
        common: Sequence[int] = (),
        lora: Mapping[str, Any] | None = None,
        lineage: Mapping[str, Any] | None = None,
        part_of: str | None = None,
        label_scale: float = LABEL_SCALE,
        label_texts: Mapping[str, str] | None = None,
        label_words: int = 0,
        **others: Any,
    ) -> None:
        check_choice("head", head, HEADS)
        if reading not in (_UNSTATED, *POOLINGS):
            raise UserError(f"reading: expected one of {_UNSTATED}, {', '.join(POOLINGS)}, got {reading!r}")
        if not isinstance(label_scale, (int, float)) or not 0 < label_scale < float("inf"):
            raise UserError(f"label_scale: expected a number over 0, got {label_scale!r}")
        self.base = dict(base or {})
        self.head = head
        self.classes = list(classes)
        self.reading = reading
        self.head_dropout = head_dropout
        self.common = sorted(common)
        self.lora = dict(lora) if lora else None
        self.lineage = dict(lineage or {})
        self.part_of = part_of
        self.label_scale = float(label_scale)
        self.label_texts = dict(label_texts or {})
        self.label_words = int(label_words)
        others.setdefault("id2label", dict(enumerate(self.classes)))
        others.setdefault("label2id", {name: number for number, name in enumerate(self.classes)})
        super().__init__(**others)

    def base_config(self) -> PreTrainedConfig:
        """The configuration of the model below."""
        fields = dict(self.base)
        config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
        return config


class Classifier(PreTrainedModel):
    """An encoder, causal model or T5's encoder, whose last hidden states a head reads classes from.

    `encoder` is the Transformers model itself, so that measuring and replacing work on it as ever. One head has the
    classes of all tasks: which of them a text may be of is for the caller to say, by leaving out the others' logits.
    """

    config: ClassifierConfig
    config_class = ClassifierConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ClassifierConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        below = config.base_config()
        self.encoder = extract_encoder(AutoModel.from_config(below)) if encoder is None else encoder
        self.head = make_head(
            config.head,
            _width(below),
            len(config.classes),
            reading=_reading(config, below),
            dropout=config.head_dropout,
            label_scale=config.label_scale,
            label_words=config.label_words,
        )
        self.post_init()
        if config.lora:  # after the initial weights, which are drawn for layers that are there by then
            add_lora(self.encoder, **config.lora)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Only heads are drawn: what is below has its own initial weights."""
        if isinstance(module, (LinearHead, PreScalingHead, LabelTextHead)):
            module.reset()

    @classmethod
    def from_pretrained(cls, *given: Any, **options: Any) -> Any:
        """As of every model; below adapters it is frozen again.

        Raises UserError for a part of a network, and where the states of the labels' words are not there.
        """
        config = options.get("config")
        if isinstance(config, ClassifierConfig) and config.part_of is not None:
            raise UserError(
                f"model: expected a classifier, {given[0]} is the network of {config.part_of}; "
                "regard.continual.models.load_network reads it"
            )
        found = super().from_pretrained(*given, **options)
        model = found[0] if isinstance(found, tuple) else found
        for name, parameter in model.encoder.named_parameters() if model.config.lora else ():
            parameter.requires_grad_("lora_" in name)
        if isinstance(model.head, LabelTextHead) and not bool(model.head.vectors.isfinite().all()):
            raise UserError(f"model: expected the states of the labels' words, head.vectors, in {given[0]}")
        return found

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's."""
        found: nn.Module = self.encoder.get_input_embeddings()
        return found

    @classmethod
    def over(
        cls,
        loaded: Loaded,
        classes: Sequence[str],
        *,
        head: HeadName = "linear",
        head_dropout: float = 0.1,
        common: Sequence[int] = (),
        lora: Mapping[str, Any] | None = None,
        seed: int = 0,
        reading: str = _UNSTATED,
        label_scale: float = LABEL_SCALE,
        label_texts: Mapping[str, str] | None = None,
        label_words: int = 0,
    ) -> Classifier:
        """A classifier over a copy of a pretrained model, with a new head drawn from the seed.

        `lora`: `rank`, and `alpha` and `targets` (names of layers, None for the choice of `add_lora`), which freezes
        the model below. `label_texts`: the words of classes for the head `labels`, where they are not those of their
        names; `label_words`: so many other words of the vocabulary its classes are held against in training.

        Raises UserError where the model has no hidden states, or peft is not there, and for labels that collide: that
        are the same to the model's tokenizer.
        """
        if (label_texts or label_words) and head != "labels":
            raise UserError(f"label_texts: expected none with the head {head}, which does not read them")
        texts = labels.resolve_label_texts(classes, label_texts or {}) if head == "labels" else {}
        words = labels.sample_background_words(loaded.tokenizer, list(texts.values()), label_words)
        config = ClassifierConfig(
            base=_told(loaded.model.config),
            head=head,
            classes=classes,
            head_dropout=head_dropout,
            common=common,
            lora=lora,
            lineage={"base": loaded.name, "sha256": loaded.sha256, "tasks": []},
            reading=reading,
            label_scale=label_scale,
            label_texts=texts,
            label_words=len(words),
        )
        encoder = extract_encoder(deepcopy(loaded.model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(config, encoder)
            model._init_weights(model.head)
        if isinstance(model.head, LabelTextHead):
            reading = model.head.reading
            model.head.vectors = labels.encode_labels(loaded, encoder, texts, reading)
            if words:
                model.head.others = labels.encode_texts(loaded.tokenizer, encoder, words, reading)
        else:
            model.head.to(encoder.dtype)
        return model

    def learnt_encoder(self) -> PreTrainedModel:
        """The encoder as a model of its own, adapters added to its weights, which can all be trained.

        It is taken out of this classifier, which is not to be used any more.
        """
        if self.config.lora:
            merge_lora(self.encoder)
        return mark_encoder_only(self.encoder.requires_grad_(True))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput:
        """The logits (row, class) over all classes, and the mean cross-entropy where labels are given."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        states = self.states(input_ids, real, token_type_ids, **others)
        logits: Tensor = self.head(states, real, self.common(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def states(self, input_ids: Tensor, real: Tensor, token_type_ids: Tensor | None = None, **others: Any) -> Tensor:
        """The last hidden states (row, token, width)."""
        given = {"input_ids": input_ids, "attention_mask": real.long(), **others}
        if token_type_ids is not None:
            given["token_type_ids"] = token_type_ids
        found: Tensor = self.encoder(**given, return_dict=True).last_hidden_state
        return found

    def common(self, input_ids: Tensor) -> Tensor | None:
        """(row, token): which tokens are common; None where the head need not know."""
        if self.config.head != "sink":
            return None
        return torch.isin(input_ids, torch.tensor(self.config.common, device=input_ids.device))

    def scales(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """How a pre-scaling head weighs the tokens of each row for each class: (row, class, token)."""
        if not isinstance(self.head, PreScalingHead):
            raise UserError(f"head: expected one that scales, got {self.config.head}")
        real = attention_mask.bool()
        return self.head.scales(self.states(input_ids, real, token_type_ids), real, self.common(input_ids))


def extract_encoder(model: PreTrainedModel) -> PreTrainedModel:
    """What hidden states are read from: the encoder of an encoder–decoder, else the model; without a pooler."""
    encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None
    return cast(PreTrainedModel, encoder)


def mark_encoder_only(encoder: PreTrainedModel) -> PreTrainedModel:
    """The same encoder, whose configuration no longer says that it is an encoder–decoder, of which it was a part."""
    encoder.config.is_encoder_decoder = False
    return encoder


def _told(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration of a model below: of an encoder alone, that of the encoder–decoder that it is a part of."""
    told: dict[str, Any] = config.to_diff_dict() | {"model_type": config.model_type}
    if getattr(type(config), "is_encoder_decoder", False) and not getattr(config, "is_decoder", False):
        told["is_encoder_decoder"] = True
    return told


ADAPTED: Mapping[str, Sequence[str]] = {RegardConfig.model_type: ("q_proj", "v_proj")}
"""The layers that low-rank adapters are put into, of architectures that peft does not know."""


def add_lora(
    model: PreTrainedModel, rank: int = 8, alpha: int | None = None, targets: Sequence[str] | None = None
) -> None:
    """Put low-rank adapters (arXiv 2106.09685, peft's) into a model, of which they alone are trained from then on.

    `alpha` is twice the rank unless it is given; `targets` are peft's choice for the architecture, of our own decoder
    what makes queries and values. Raises UserError where peft is not there or knows no layers to adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("lora needs the package peft: pip install 'regard[learn]'") from error
    wanted = targets or ADAPTED.get(model.config.model_type)
    chosen = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules=list(wanted) if wanted else None)
    try:
        with warnings.catch_warnings():  # of GPT-2's layers, which it then takes as they are
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set", category=UserWarning)
            inject_adapter_in_model(chosen, model)
    except ValueError as error:
        raise UserError(f"lora: {' '.join(str(error).split())[:300]}") from error


def merge_lora(model: PreTrainedModel) -> None:
    """Add the adapters of `add_lora` to the weights that they stand beside, and take them out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    model._hf_peft_config_loaded = False
    if "peft_config" in vars(model):
        del model.peft_config


def _width(config: Any) -> int:
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if not isinstance(width, int):
        raise UserError(
            f"model: expected one with hidden states, the configuration of {config.model_type} has no width"
        )
    return width


def _reading(config: ClassifierConfig, below: Any) -> Pooling:
    """The token that the head reads of a model of this kind."""
    if config.reading != _UNSTATED:
        return cast(Pooling, config.reading)
    if below.is_encoder_decoder:
        return "mean"
    if _is_causal(below):
        return "last"
    return "mean" if config.head == "labels" else "first"


def _is_causal(config: Any) -> bool:
    """Whether a model of this kind reads from left to right: whether Transformers makes a language model of it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    kind = config.model_type
    return kind == "regard" or bool(getattr(config, "is_decoder", False)) or (kind in CAUSAL and kind not in MASKED)


AutoConfig.register(ClassifierConfig.model_type, ClassifierConfig)
AutoModelForSequenceClassification.register(ClassifierConfig, Classifier)
