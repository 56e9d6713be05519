"""What a configuration says of a model: which auto class loads it, and whether it writes text."""

import importlib
import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto import modeling_auto

from regard.errors import UserError
from regard.models.classifier import ClassifierConfig
from regard.runs.model_type import original_type

_HEAD_NAMES = (
    *("CausalLM", "MaskedLM", "Seq2SeqLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    *("MultipleChoice", "ImageClassification", "ImageTextToText", "SpeechSeq2Seq", "MultimodalLM", "DepthEstimation"),
    *("ObjectDetection", "SemanticSegmentation", "UniversalSegmentation", "PoseEstimation", "PreTraining"),
)
_WITH_HEAD = tuple(
    getattr(modeling_auto, name) for head in _HEAD_NAMES if hasattr(modeling_auto, name := f"AutoModelFor{head}")
)
"""Auto classes for the types that have no model without a head (TrOCR, Depth Anything); not all are in all releases."""
_MODEL_TYPES = {"regard-replaced": "regard.hooks.replaced_model"}
"""Model types of ours above this package, and what makes them known to Transformers."""
_SAPT = "sapt"


def import_model_type(folder: Path) -> None:
    """Make the model type of a folder known to Transformers, if it is one of ours."""
    model_type = str(json.loads((folder / "config.json").read_bytes()).get("model_type"))
    if model_type in _MODEL_TYPES:
        importlib.import_module(_MODEL_TYPES[model_type])


def select_auto_class(config: Any) -> Any:
    """Return AutoModel, or the auto class with a head where there is no AutoModel: own code, or `regard.replaced`."""
    auto_map = getattr(config, "auto_map", None)
    if auto_map is not None:
        return AutoModel if "AutoModel" in auto_map or "AutoModelForCausalLM" not in auto_map else AutoModelForCausalLM
    if original_type(config) == "speecht5" and (config.architectures or [""])[0].endswith("ForSpeechToText"):
        return AutoModelForSpeechSeq2Seq  # without its head it has no layers that read sounds
    return next((auto for auto in (AutoModel, *_WITH_HEAD) if type(config) in auto._model_mapping), AutoModel)


def select_language_model_class(config: Any) -> Any:
    """Return the auto class that loads a model with a language model head."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def select_head_class(config: Any) -> Any:
    """Return the auto class that loads the head which the configuration names; None if it names none that we know."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        return AutoModelForMaskedLM
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        kinds = (select_language_model_class(config), AutoModelForImageTextToText, AutoModelForSeq2SeqLM)
        return next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[0])
    return AutoModelForSequenceClassification if architecture.endswith("ForSequenceClassification") else None


def is_bidirectional(config: Any) -> bool:
    """Return whether the model is an encoder alone, which cannot generate from left to right."""
    is_encoder = (
        original_type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder
    )
    return is_encoder and not getattr(config, "is_decoder", False)


def check_generates_text(config: Any, name: str) -> None:
    """Raise UserError if the model `name` cannot generate text; unknown types pass."""
    architecture = (config.architectures or [config.model_type])[0]
    kind = None
    if isinstance(config, ClassifierConfig):
        kind, architecture = "a classifier", f"over {config.base_config().model_type}"
    elif is_bidirectional(config):
        kind = "an encoder"
    elif original_type(config) in modeling_auto.MODEL_MAPPING_NAMES and not getattr(config, "auto_map", None):
        generative = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.is_encoder_decoder:
            generative = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        kind = None if original_type(config) in generative else "of another kind"
    if kind is not None:
        expected = "one that writes text"
        raise UserError(f"model: expected {expected}, got '{name}', {kind} ({architecture})")


def check_complete_model(config: Any, name: str) -> None:
    """Raise UserError if `regard rollback` wrote `name` as a part of a network."""
    method = getattr(config, "part_of", None)
    if method is None:
        return
    adapters = f"; `regard look BASE TEXT --learnt {name}` shows its adapters" if str(method).startswith(_SAPT) else ""
    kind = f"the network of {method}, which has weights beside its model"
    advice = f"regard.LearntModel.from_pretrained('{name}') predicts with it{adapters}"
    raise UserError(f"model: expected a complete one, got '{name}', {kind}; {advice}")
