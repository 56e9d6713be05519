"""What `joint` and `separate` train: adapters like those of the methods that they are references of, or the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.commands.learn.metrics import REFERENCES
from regard.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from regard.commands.learn.config import LearnConfig
    from regard.continual.adapter_network import LoraConfig

LORA = "reference_lora"
"""Key of the adapters in a run's metadata."""


def choose_reference_lora(configs: Sequence[LearnConfig], model: nn.Module) -> dict[str, Any] | None:
    """Choose the LoRA adapters that `joint` and `separate` train, as arguments of `add_lora`; None for the whole model.

    They have rank, α and layers of the first compared method with LoRA adapters, by default if there is one. Raises
    UserError if peft is missing, or the model has no such layers.
    """
    from regard.adapters.lora_pool import ALL_LINEAR, target_layers
    from regard.continual.adapter_network import LoraConfig

    first = configs[0]
    has_references = any(run.method in REFERENCES for run in configs)
    if not has_references or first.references == "model" or first.lora_rank is not None:
        return None
    adapted = [settings for run in configs if (settings := _lora_settings(run)) is not None]
    if not adapted and first.references == "auto":
        return None
    if importlib.util.find_spec("peft") is None:
        needed = "the package peft (pip install 'regard[learn]') for joint and separate with adapters"
        raise UserError(f"references: expected {needed}, or references=model")
    settings = adapted[0] if adapted else LoraConfig()
    names = target_layers(model, settings.target_modules)
    is_chosen = settings.target_modules in ("auto", ALL_LINEAR)
    targets = [name.rsplit(".", 1)[-1] for name in names] if is_chosen else settings.target_modules.split(",")
    targets = list(dict.fromkeys(target.strip() for target in targets))
    return {"rank": settings.r, "alpha": settings.lora_alpha, "targets": targets}


def _lora_settings(config: LearnConfig) -> LoraConfig | None:
    """Return the settings of a method's LoRA adapters, if it trains such."""
    from regard.continual.adapter_network import LoraConfig

    settings = config.make_method().config
    is_lora = isinstance(settings, LoraConfig) and getattr(settings, "adapter_type", "lora") == "lora"
    return settings if is_lora else None


def describe_references(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say which references train adapters, from metadata of runs; empty if none does."""
    names = list(dict.fromkeys(str(run["method"]) for run in runs if run.get(LORA)))
    if not names:
        return ""
    lora = next(run[LORA] for run in runs if run.get(LORA))
    verb, layers = "train" if names[1:] else "trains", ", ".join(lora["targets"])
    adapters = f"LoRA adapters of rank {lora['rank']} (alpha {lora['alpha']:g}; {layers})"
    return f"{' and '.join(names)} {verb} {adapters}; --references model trains the whole model"
