"""The model that a run of `regard learn` begins with, by its name or as it is given in Python."""

from typing import Any

from regard.commands.learn.config import LearnConfig, split_methods
from regard.continual.methods import method_named
from regard.continual.network import Network
from regard.errors import UserError, warn_user
from regard.models.generator import add_model_hash
from regard.models.pretrained import Loaded, as_loaded, check_model, load


def check_named_model(config: LearnConfig, model: Any, *, text: bool) -> None:
    """Raise UserError for a named model that `load_model` would refuse before it reads weights."""
    if model is None or isinstance(model, str):
        check_model(config.model, config.adapter, language_model=text)


def load_model(config: LearnConfig, model: Any, tokenizer: Any, *, text: bool) -> Loaded:
    """Load the model; a language model for text-to-text tasks."""
    if model is None or isinstance(model, str):
        return load(config.model, dtype="float32", language_model=text, adapter=config.adapter)
    if config.adapter is not None:
        raise UserError("adapter: expected none with a model given in Python; pass a PeftModel, or names of both")
    call = "regard.learn(stream, method, model, tokenizer=tokenizer)"
    loaded = add_model_hash(as_loaded(model, tokenizer, to="teach", call=call))
    if not any(parameter.requires_grad for parameter in loaded.model.parameters()):
        _warn_of_frozen(config)
    return loaded


def _warn_of_frozen(config: LearnConfig) -> None:
    """Warn of methods that are to train all of a model whose weights are frozen."""
    plain = [one for one in split_methods(config) if one.lora_rank is None]
    names = [one.method for one in plain if method_named(one.method).Network is Network and one.method != "probe"]
    if names:
        what = f"the model's are frozen, so {', '.join(names)} can train a new head alone"
        warn_user(f"model: expected weights that require gradients, {what}; model.requires_grad_(True) opens them")
