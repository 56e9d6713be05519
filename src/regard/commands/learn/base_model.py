"""The model that a run of `regard learn` begins with, by its name or as it is given in Python."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from regard.commands.learn.config import LearnConfig
from regard.continual.methods import method_named
from regard.continual.methods.baselines import Probe
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
    return add_model_hash(as_loaded(model, tokenizer, to="teach", call=call))


def check_trainable(model: nn.Module, configs: Sequence[LearnConfig], *, text: bool) -> None:
    """Warn of methods without adapters that are to train a model whose weights are frozen.

    Raises UserError with tasks from text to text, whose models have no new head that could be trained.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    kinds = {config.method: method_named(config.method) for config in configs}
    names = [name for name, kind in kinds.items() if kind.Network.trains_model and kind is not Probe]
    if names:
        trained = "nothing" if text else "a new head alone"
        what = f"the model's are frozen, so {', '.join(names)} can train {trained}"
        told = f"model: expected weights that require gradients, {what}; model.requires_grad_(True) opens them"
        if text:
            raise UserError(told)
        warn_user(told)
