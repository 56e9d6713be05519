"""Adapters of PEFT: found in their folder, merged into their base model, or read where a `PeftModel` has them."""

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, PreTrainedModel

from regard.attention.quantized import is_quantized_linear
from regard.errors import UserError, naming_option, warn_user
from regard.models.lora_targets import find_shared_layers
from regard.models.model_files import ADAPTER_CONFIG as CONFIG
from regard.models.model_files import ADAPTER_WEIGHTS as WEIGHTS
from regard.models.model_files import as_user_error, find_model_folder
from regard.runs.model_card import public_name

TASK_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""The class that an adapter was trained on, by the task in its configuration."""
CLASSIFIERS = tuple(getattr(transformers, TASK_CLASSES[task]) for task in ("SEQ_CLS", "TOKEN_CLS"))
_PREFIX = "base_model.model."


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def find_adapter_folder(name: str) -> Path:
    """Return the folder of an adapter on disk or on the hub. Raises UserError."""
    given = Path(os.path.expanduser(name))
    names = sorted(path.parent.name for path in given.glob(f"*/{CONFIG}"))
    if names and not any((given / file).is_file() for file in (CONFIG, "config.json")):
        raise UserError(f"adapter: expected one of the folders in '{name}' ({', '.join(names)}), got all of them")
    with naming_option("adapter", instead_of="model"):
        folder = find_model_folder(name)
    if not (folder / CONFIG).is_file():
        raise UserError(f"adapter: expected a folder with {CONFIG}, or the hub id of one, got the model '{name}'")
    return folder


def find_base_name(folder: Path) -> str:
    """Return the name of the model that an adapter was trained on. Raises UserError."""
    name = _read_config(folder).get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"adapter: {folder / CONFIG} does not name its base model; give the model, and the adapter as one"
        )
    return str(name)


def select_adapter_class(folder: Path, config: Any, auto_class: Any) -> Any:
    """Return the class of the model that an adapter is merged into: `auto_class` if the adapter does not say more."""
    task = _read_config(folder).get("task_type")
    if task in TASK_CLASSES:
        return getattr(transformers, TASK_CLASSES[task])
    prefix = getattr(AutoModel._model_mapping.get(type(config), None), "base_model_prefix", "")
    has_head = any(name.startswith(f"{_PREFIX}{prefix}.") for name in _read_weights(folder))
    if has_head and auto_class is AutoModel and config.architectures:
        return getattr(transformers, config.architectures[0], auto_class)
    return auto_class


def count_labels(folder: Path, config: Any, auto_class: Any, *, trust_remote_code: bool = False) -> int:
    """Return the classes of the head that an adapter brings, or those of the configuration if it brings none.

    The configuration of a base model does not know them: it has two unless it says more.
    """
    with torch.device("meta"):
        own = auto_class.from_config(config, trust_remote_code=trust_remote_code).state_dict()
    given = {key.removeprefix(_PREFIX): tensor.shape for key, tensor in _read_weights(folder).items()}
    heads = (
        shape
        for name, shape in given.items()
        if name in own and own[name].shape[0] == config.num_labels and own[name].shape[1:] == shape[1:]
    )
    return next((shape[0] for shape in heads if shape[0] != config.num_labels), config.num_labels)


def merge_adapter(model: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """Return the model with an adapter merged into its weights, or in place beside weights that are quantized.

    Those would be rounded anew, to 4 bits by half of what an adapter adds, or (quanto) stay as they are.

    Raises:
        UserError: It adds tokens or the like, so that it cannot be merged, or does not fit the model.
    """
    peft, weights = _import_peft(), _read_weights(folder)
    base = str(_read_config(folder).get("base_model_name_or_path") or "")
    if base and Path(public_name(base)).name != Path(public_name(str(model.name_or_path))).name:
        warn_user(f"adapter: it was trained on {base}, and is merged into {model.name_or_path}")
    problem, kinds = f"adapter: '{name}' does not fit the model:", (ValueError, KeyError, RuntimeError, TypeError)
    with as_user_error(problem, kinds), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what Transformers renames
        config = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise UserError(_refuse_prompts(config, f"'{name}'"))
        adapted = peft.PeftModel.from_pretrained(model, str(folder), config=config)
        loaded = peft.get_peft_model_state_dict(adapted)
        for key, tensor in weights.items():
            if key not in loaded or not loaded[key].cpu().equal(tensor.to(loaded[key].dtype)):
                raise UserError(f"adapter: '{name}' does not fit the model, which has no place for {key}")
        _check_weights_are_own(adapted, f"'{name}'")
        if _adapts_quantized(adapted):
            return adapted.get_base_model()
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return make_trainable(merged)


def unwrap_peft(model: Any, *, merge: bool) -> Any:
    """Return the model in a `PeftModel`, with its adapters in place or merged into a copy; other models as they are.

    Raises:
        UserError: Its adapter is not one of weights.
    """
    if not type(model).__module__.startswith("peft."):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise UserError(_refuse_prompts(config, f"a {type(model).__name__}"))
    if not merge:
        return model.get_base_model()
    if _adapts_quantized(model):
        raise UserError(
            f"adapter: expected one of whole weights, to be merged; those of this {type(model).__name__} are "
            "quantized: merge it into the model that they were made of"
        )
    _check_weights_are_own(model, f"that of a {type(model).__name__}")
    return make_trainable(copy.deepcopy(model).merge_and_unload())


def make_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that an adapter was merged into with weights that are trained: PEFT has frozen them."""
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
    return model


def _adapts_quantized(model: nn.Module) -> bool:
    """Return whether an adapted layer has a quantized weight."""
    return any(is_quantized_linear(getattr(layer, "base_layer", None)) for layer in model.modules())


def _check_weights_are_own(model: nn.Module, name: str) -> None:
    """Refuse adapted layers whose weight others have too, as a tied head: merged, the adapter would change them all."""
    adapted = {
        layer_name: layer.base_layer
        for layer_name, layer in model.named_modules()
        if isinstance(getattr(layer, "base_layer", None), nn.Module)
        and layer.base_layer._parameters.get("weight") is not None
        and type(layer).__name__ != "TrainableTokensLayer"  # which PEFT ties itself
    }
    if shared := find_shared_layers(model, adapted):
        raise UserError(
            f"adapter: expected one of layers with weights of their own, to be merged; {name} adapts "
            f"{shared[0].removeprefix(_PREFIX)}, whose weight other layers have too"
        )


def _refuse_prompts(config: Any, name: str) -> str:
    kind = getattr(config.peft_type, "value", config.peft_type)
    return f"adapter: expected one that changes weights, such as LoRA; {name} is of type {kind}, which adds tokens"


def _read_config(folder: Path) -> dict[str, Any]:
    with as_user_error(f"adapter: expected a JSON object in {folder / CONFIG}, got", (ValueError, OSError)):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(type(config).__name__)
    return config


def _read_weights(folder: Path) -> dict[str, Any]:
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"adapter: expected {WEIGHTS} in '{folder}'; pickled weights are not read")
    with as_user_error(f"adapter: {folder / WEIGHTS} is damaged or cut off:", (Exception,)):
        return load_file(folder / WEIGHTS)


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("adapter: it needs the package peft: pip install 'regard[learn]'") from error
    return peft
