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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
from transformers.pytorch_utils import Conv1D

from regard.errors import UserError, check_choice
from regard.models import heads
from regard.models.heads import LABEL_SCALE, HeadName, LabelTextHead, Pooling, PreScalingHead
from regard.models.lora_targets import query_value_layers
from regard.models.model_files import Loaded, as_user_error
from regard.runs.model_type import original_type

_AUTO = "auto"


class ClassifierConfig(PreTrainedConfig):
    """Configuration of a `Classifier`.

    Args:
        base: Configuration of the encoder.
        pooling: Token that the head reads, "first" or "last", or "mean". "auto" is "last" for causal models, "mean" for
            the encoder of an encoder–decoder and for the head "labels", else "first".
        common: Ids of common tokens, for the head "sink".
        lora: Rank, alpha and targets of LoRA adapters beside frozen weights, or None.
        lineage: The model that this one started from, and the tasks it has learned, in order.
        part_of: Method of whose network this is a part that cannot answer alone; None for a complete classifier.
        label_words: Number of other words that the head "labels" contrasts in training.
    """

    model_type = "regard-classifier"

    def __init__(
        self,
        *,
        base: Mapping[str, Any] | None = None,
        head: HeadName = "linear",
        classes: Sequence[str] = (),
        pooling: str = _AUTO,
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
        check_choice("head", head, heads.HEADS)
        if pooling not in (_AUTO, *heads.POOLINGS):
            raise UserError(f"pooling: expected one of {_AUTO}, {', '.join(heads.POOLINGS)}, got {pooling!r}")
        if not isinstance(label_scale, (int, float)) or not 0 < label_scale < float("inf"):
            raise UserError(f"label_scale: expected a number over 0, got {label_scale!r}")
        self.base, self.lora = dict(base or {}), dict(lora) if lora else None
        self.head, self.pooling, self.head_dropout = head, pooling, head_dropout
        self.classes, self.common = list(classes), sorted(common)
        self.lineage, self.part_of = dict(lineage or {}), part_of
        self.label_scale, self.label_words = float(label_scale), int(label_words)
        self.label_texts = dict(label_texts or {})
        others.setdefault("id2label", dict(enumerate(self.classes)))
        others.setdefault("label2id", {name: index for index, name in enumerate(self.classes)})
        super().__init__(**others)

    def base_config(self) -> PreTrainedConfig:
        fields = dict(self.base)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


class Classifier(PreTrainedModel):
    """An encoder, causal model or T5's encoder with a classification head on its last hidden states.

    `encoder` is the Transformers model itself, so that measuring and replacing work on it. One head has the classes of
    all tasks; the caller leaves out the logits of classes that a text cannot have.
    """

    config: ClassifierConfig
    config_class = ClassifierConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ClassifierConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        base_config = config.base_config()
        self.encoder = extract_encoder(AutoModel.from_config(base_config)) if encoder is None else encoder
        options: dict[str, Any] = {"pooling": _resolve_pooling(config, base_config), "dropout": config.head_dropout}
        options |= {"scale": config.label_scale, "words": config.label_words}
        self.head = heads.make_head(config.head, _hidden_size(base_config), len(config.classes), **options)
        self.post_init()
        if config.lora:  # after the initial weights, which are drawn for the layers that exist by then
            add_lora(self.encoder, **config.lora)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize heads only; the encoder has initialized itself."""
        if isinstance(module, (heads.ClassVectorHead, LabelTextHead)):
            module.reset()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a classifier as any model of Transformers; an encoder with adapters is frozen again."""
        config = kwargs.get("config")
        if isinstance(config, ClassifierConfig) and config.part_of is not None:
            problem = f"{args[0]} is the network of {config.part_of}; regard.continual.models.load_network reads it"
            raise UserError(f"model: expected a classifier, {problem}")
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, parameter in model.encoder.named_parameters() if model.config.lora else ():
            parameter.requires_grad_("lora_" in name)
        if isinstance(model.head, LabelTextHead) and not bool(model.head.vectors.isfinite().all()):
            raise UserError(f"model: expected the states of the labels' words, head.vectors, in {args[0]}")
        return loaded

    @classmethod
    def from_loaded(
        cls,
        loaded: Loaded,
        classes: Sequence[str],
        *,
        head: HeadName = "linear",
        common: Sequence[int] = (),
        lora: Mapping[str, Any] | None = None,
        seed: int = 0,
        pooling: str = _AUTO,
        label_scale: float = LABEL_SCALE,
        label_texts: Mapping[str, str] | None = None,
        label_words: int = 0,
    ) -> Classifier:
        """Make a classifier over a copy of a pretrained model, with a new head initialized from the seed.

        The other arguments are those of `ClassifierConfig`; `label_texts` are words of classes other than their names.

        Raises:
            UserError: The model has no hidden states, peft is missing, or two labels are the same tokens.
        """
        if (label_texts or label_words) and head != "labels":
            raise UserError(f"label_texts: expected none with the head {head}, which does not read them")
        texts = heads.resolve_label_texts(classes, label_texts or {}) if head == "labels" else {}
        words = heads.sample_background_words(loaded.tokenizer, list(texts.values()), label_words)
        options: dict[str, Any] = {"head": head, "classes": classes, "common": common, "lora": lora, "pooling": pooling}
        options |= {"label_scale": label_scale, "label_texts": texts, "label_words": len(words)}
        options["lineage"] = {"base": loaded.name, "sha256": loaded.sha256, "tasks": []}
        config = ClassifierConfig(base=_base_fields(loaded.model.config), **options)
        encoder = extract_encoder(deepcopy(loaded.model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls(config, encoder)
            torch.manual_seed(seed)  # whatever was drawn before: with more classes the first begin as with fewer
            model._init_weights(model.head)
        if isinstance(model.head, LabelTextHead):
            model.head.vectors = heads.encode_labels(loaded, encoder, texts, model.head.pooling)
            if words:
                model.head.others = heads.encode_texts(loaded.tokenizer, encoder, words, model.head.pooling)
        else:
            model.head.to(encoder.dtype)
        return model

    accepts_loss_kwargs = False  # of a Trainer: the loss is a mean over rows, which it divides by the accumulated steps

    def take_encoder(self) -> PreTrainedModel:
        """Return the trained encoder with adapters merged and weights trainable; the classifier becomes unusable."""
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
        """Return the logits (row, class) over all classes, and the mean cross-entropy if labels are given."""
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        states = self.states(input_ids, mask, token_type_ids, **others)
        logits: Tensor = self.head(states, mask, self.common(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def states(self, input_ids: Tensor, mask: Tensor, token_type_ids: Tensor | None = None, **others: Any) -> Tensor:
        """Return the last hidden states (row, token, width)."""
        if token_type_ids is not None:
            others["token_type_ids"] = token_type_ids
        outputs = self.encoder(input_ids=input_ids, attention_mask=mask.long(), **others, return_dict=True)
        return outputs.last_hidden_state

    def common(self, input_ids: Tensor) -> Tensor | None:
        """Return the mask (row, token) of common tokens, or None if the head does not need it."""
        if self.config.head != "sink":
            return None
        return torch.isin(input_ids, torch.tensor(self.config.common, device=input_ids.device))

    def scales(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return how a pre-scaling head weights the tokens of each row for each class, (row, class, token)."""
        if not isinstance(self.head, PreScalingHead):
            raise UserError(f"head: expected one that scales, got {self.config.head}")
        mask = attention_mask.bool()
        return self.head.scales(self.states(input_ids, mask, token_type_ids), mask, self.common(input_ids))


def extract_encoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model whose hidden states are read: its encoder or base model, without a pooler."""
    encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None
    return cast(PreTrainedModel, encoder)


def mark_encoder_only(encoder: PreTrainedModel) -> PreTrainedModel:
    """Change the configuration of an encoder that was a part of an encoder–decoder."""
    encoder.config.is_encoder_decoder = False
    return encoder


def _base_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of an encoder's configuration, or of the encoder–decoder that it is a part of."""
    fields: dict[str, Any] = config.to_diff_dict() | {"model_type": config.model_type}
    if getattr(type(config), "is_encoder_decoder", False) and not getattr(config, "is_decoder", False):
        fields["is_encoder_decoder"] = True
    return fields


def add_lora(model: PreTrainedModel, rank: int = 8, alpha: float | None = None, targets: Sequence[str] = ()) -> None:
    """Add LoRA adapters of peft to a model and freeze its other weights.

    By default `alpha` is twice the rank, and `targets` are peft's choice, or the layers of queries and values.

    Source: LoRA (arXiv 2106.09685).
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES
    except ImportError as error:
        raise UserError("lora needs the package peft: pip install 'regard[learn]'") from error
    kind = original_type(model.config)  # peft knows no type of ours
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    layers: Any = list(targets or ()) or CHOICES.get(kind) or query_value_layers(model, linear) or None
    scale: Any = alpha or 2 * rank  # peft takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=layers)
    with as_user_error("lora:"), warnings.catch_warnings():  # of GPT-2's layers, which peft then takes as they are
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set", category=UserWarning)
        inject_adapter_in_model(config, model)


def merge_lora(model: PreTrainedModel) -> None:
    """Merge the adapters of `add_lora` into the weights and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    model._hf_peft_config_loaded = False
    if "peft_config" in vars(model):
        del model.peft_config


def _hidden_size(config: Any) -> int:
    size = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    text = getattr(config, "text_config", None)
    if not isinstance(size, int):
        problem = f"the configuration of {config.model_type} has no width"
        advice = "; of a model that reads more than text, save its text model and pass that" if text is not None else ""
        raise UserError(f"model: expected one with hidden states, {problem}{advice}")
    return int(getattr(text, "hidden_size", size))  # PaliGemma's own is 2048 whatever its text model has


def reads_to_the_right(config: Any) -> bool:
    """Whether a model with this configuration is causal: a token sees the ones before it alone.

    So is one whose text model is, though PaliGemma's prompts see all of themselves where its masks are those of SDPA.
    """
    name, text = original_type(config), getattr(config, "text_config", None)
    if name == "regard" or getattr(config, "is_decoder", False) or (name in CAUSAL and name not in MASKED):
        return True
    return text is not None and text is not config and reads_to_the_right(text)


def _resolve_pooling(config: ClassifierConfig, base_config: Any) -> Pooling:
    if config.pooling != _AUTO:
        return cast(Pooling, config.pooling)
    if base_config.is_encoder_decoder:
        return "mean"
    if reads_to_the_right(base_config):
        return "last"
    return "mean" if config.head == "labels" else "first"


AutoConfig.register(ClassifierConfig.model_type, ClassifierConfig)
AutoModelForSequenceClassification.register(ClassifierConfig, Classifier)
