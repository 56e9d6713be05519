"""Types of models: how to load a configuration's model, and whether it is of the type that is needed."""

from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as ALL_TYPES

from regard.errors import UserError
from regard.models.classifier import ClassifierConfig

_SAPT = "sapt"


def select_auto_class(config: Any) -> Any:
    """Return the auto class that loads a model without head.

    AutoModel, or AutoModelForCausalLM for a model with its own code that has no AutoModel.
    """
    auto_map = getattr(config, "auto_map", None) or {"AutoModel": ""}
    return AutoModel if "AutoModel" in auto_map or "AutoModelForCausalLM" not in auto_map else AutoModelForCausalLM


def select_language_model_class(config: Any) -> Any:
    """Return the auto class that loads a model with a language model head."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def is_bidirectional(config: Any) -> bool:
    """Return whether the model is an encoder alone, which cannot generate from left to right."""
    is_encoder = config.model_type in MASKED and not config.is_encoder_decoder
    return is_encoder and not getattr(config, "is_decoder", False)


def check_generates_text(config: Any, name: str) -> None:
    """Raise UserError if the model `name` cannot generate text; unknown types pass."""
    architecture = (config.architectures or [config.model_type])[0]
    kind = None
    if isinstance(config, ClassifierConfig):
        kind, architecture = "a classifier", f"over {config.base_config().model_type}"
    elif is_bidirectional(config):
        kind = "an encoder"
    elif config.model_type in ALL_TYPES and not getattr(config, "auto_map", None):
        generative = SEQ2SEQ if config.is_encoder_decoder else CAUSAL
        kind = None if config.model_type in generative else "of another kind"
    if kind is not None:
        raise UserError(
            f"model: expected one that writes text (encoder–decoder or causal), got '{name}', {kind} ({architecture})"
        )


def check_complete_model(config: Any, name: str) -> None:
    """Raise UserError if `regard rollback` wrote `name` as a part of a network."""
    method = getattr(config, "part_of", None)
    if method is None:
        return
    adapters = ", regard.continual.saved_adapters.load_adapters its blocks" if str(method).startswith(_SAPT) else ""
    raise UserError(
        f"model: expected a complete one, got '{name}', the network of {method}, which has weights beside its model; "
        f"regard.continual.models.load_network reads it{adapters}"
    )
