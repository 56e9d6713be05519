"""What kind of model a configuration is of, and whether it is the kind that was asked for."""

from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as FROM_TEXT_TO_TEXT
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as KNOWN

from regard.errors import UserError
from regard.models.classifier import ClassifierConfig

_OF_SAPT = "sapt"


def model_class(config: Any) -> Any:
    """The auto class that loads a model without a head.

    AutoModel; AutoModelForCausalLM where the model brings its own code and that offers no AutoModel.
    """
    offered = getattr(config, "auto_map", None) or {"AutoModel": ""}
    return AutoModel if "AutoModel" in offered or "AutoModelForCausalLM" not in offered else AutoModelForCausalLM


def language_model_class(config: Any) -> Any:
    """The auto class that loads a model with a language model's head."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def is_bidirectional(config: Any) -> bool:
    """Whether it is an encoder's, which reads from both sides and so cannot write from left to right."""
    both_ways = config.model_type in MASKED and not config.is_encoder_decoder
    return both_ways and not getattr(config, "is_decoder", False)


def check_generates_text(config: Any, name: str) -> None:
    """Nothing, or a UserError: the model `name` is none that writes text. Of kinds that are not known, nothing."""
    told = (config.architectures or [config.model_type])[0]
    kind = None
    if isinstance(config, ClassifierConfig):
        kind, told = "a classifier", f"over {config.base_config().model_type}"
    elif is_bidirectional(config):
        kind = "an encoder"
    elif config.model_type in KNOWN and not getattr(config, "auto_map", None):
        writing = FROM_TEXT_TO_TEXT if config.is_encoder_decoder else CAUSAL
        kind = None if config.model_type in writing else "of another kind"
    if kind is not None:
        raise UserError(
            f"model: expected one that writes text (encoder–decoder or causal), got '{name}', {kind} ({told})"
        )


def check_loaded_whole(config: Any, name: str) -> None:
    """Nothing, or a UserError: what `regard rollback` has written as `name` is nothing without a network around it."""
    method = getattr(config, "part_of", None)
    if method is None:
        return
    blocks = ", regard.continual.saved_adapters.load_adapters its blocks" if str(method).startswith(_OF_SAPT) else ""
    raise UserError(
        f"model: expected one that is whole, got '{name}', the network of {method}, which has learnt in more than the "
        f"model below; regard.continual.models.load_network reads it{blocks}"
    )
