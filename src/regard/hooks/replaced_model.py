"""`replaced`: a model of its own whose heads are constant, to be saved, shared and loaded as any other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from regard.constants import Constants, Head, Origin
from regard.errors import UserError
from regard.hooks import deberta
from regard.hooks.attention_function import attention_function
from regard.hooks.constant_heads import begin_pass
from regard.hooks.fused_projection import FusedProjection
from regard.hooks.layers import AttentionLayer, find_attention_layers
from regard.hooks.modules import find_stacks
from regard.hooks.registration import NAME, find_configs, register
from regard.hooks.replace import (
    ConstantsLike,
    Heads,
    check_constants,
    install_constants,
    replacing,
    resolve_constants,
    select_heads,
)
from regard.runs.quiet import suppress_logging

TYPE = "regard-replaced"
"""The `model_type` in the configuration of a saved model."""
EXTRA = "constant_heads"
"""The entry of the configuration that says which heads are constant."""
OWN = {"regard": "regard.models"}
"""Model types that Transformers does not bring, and what makes them known to it."""
OF_HUB = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Options of `from_pretrained` that say where to look."""
AUTO = (
    "AutoModel",
    "AutoModelForPreTraining",
    "AutoModelForMultipleChoice",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
)


class ReplacedConfig(PretrainedConfig):
    """The configuration of a model with constant heads: that of the model it was, and which heads they are.

    What is loaded is of a class of its own, made of this one and that of the model it was.
    """

    model_type = TYPE

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """The configuration in a class that also is the one of the original model."""
        values = dict(config_dict)
        base, extra = str(values.get("base_model_type")), values.get(EXTRA)
        if base not in transformers.CONFIG_MAPPING and base in OWN:
            raise UserError(f"model type {base}: import {OWN[base]} first, which makes it known to Transformers")
        if base not in transformers.CONFIG_MAPPING or not isinstance(extra, dict):
            raise UserError(f"expected the configuration of a model with constant heads, of model type {TYPE}")
        original: Any = transformers.CONFIG_MAPPING[base]
        kind, _ = _classes(original, str(extra.get("architecture")))
        return super(ReplacedConfig, kind).from_dict(values, **options)


class ReplacedModel:
    """Loads models with constant heads."""

    @staticmethod
    def register() -> None:
        """From now on `AutoConfig`, `AutoModel` and the other `Auto…` classes of this process load such models, too."""
        AutoConfig.register(TYPE, ReplacedConfig, exist_ok=True)

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> PreTrainedModel:
        """The model that `save_pretrained` wrote, in the class it was saved in, with its heads constant.

        Takes what `PreTrainedModel.from_pretrained` takes. Raises UserError if there is none, or another kind of model.
        """
        ReplacedModel.register()
        config = options.pop("config", None)
        if config is None:
            of_hub = {name: options[name] for name in OF_HUB if name in options}
            try:
                config = AutoConfig.from_pretrained(name, **of_hub)
            except (OSError, ValueError) as error:
                raise UserError(f"model: cannot read '{name}': {' '.join(str(error).split())[:300]}") from error
        if not isinstance(config, ReplacedConfig):
            raise UserError(f"expected a model that regard.replaced made and save_pretrained wrote, got {name}")
        kind = _model_of(config)
        found: PreTrainedModel = kind.from_pretrained(name, config=config, **options)
        return found


def replaced(model: PreTrainedModel, constants: ConstantsLike, heads: Heads = None, *, any_model: bool = False) -> Any:
    """A copy of the model in which some heads are constant for good; the model itself is left as it is.

    Takes `constants` and `heads` as `replacing` does, and computes what the model computes inside of it. The result is
    of a subclass of the model's class: it trains, generates and goes into pipelines as the model does, and
    `save_pretrained`, `push_to_hub` and `from_pretrained` keep the constants and leave out what is not computed. Raises
    UserError for constants that do not fit, and for classes that are not of Transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"expected a Hugging Face PreTrainedModel, got {type(model).__name__}")
    given = resolve_constants(constants)
    here = find_attention_layers(model)
    check_constants(model, here, given, any_model)
    chosen = select_heads(given[0], heads)
    architecture = type(model).__name__
    base = _architecture(architecture, type(model.config))
    if base is not type(model):
        raise UserError(f"expected a model of a class of Transformers, got {architecture} of {type(model).__module__}")
    config: Any = _config(model, here, given, chosen)
    ReplacedModel.register()
    with replacing(model, given, chosen, any_model=any_model):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    found = _built(model, _model_of(config), config, state)
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return found.train(model.training)


def _built(model: Any, kind: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """A model of this class with all of that state, each part in its own precision. UserError if some has no place."""
    with suppress_logging():
        found, about = kind.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=model.dtype, output_loading_info=True
        )
    astray = sorted({*about["missing_keys"], *about["unexpected_keys"], *map(str, about["mismatched_keys"])})
    if astray or sorted(found.state_dict()) != sorted(state):
        astray = astray or sorted({*found.state_dict()} ^ {*state})
        raise UserError(
            f"cannot make a model of constant heads of this {type(model).__name__}: its parts are not those of its "
            f"class, such as {astray[0]}; use regard.replacing, or replace heads before you change it"
        )
    for name, tensor in (*found.named_parameters(), *found.named_buffers()):
        if name in state:
            tensor.data = state[name]
    if getattr(model, "generation_config", None) is not None:
        found.generation_config = copy.deepcopy(model.generation_config)
    return found.to(model.device)


def _config(model: Any, here: list[AttentionLayer], given: tuple[Constants, ...], heads: Sequence[Head]) -> Any:
    values = model.config.to_dict()
    values["base_model_type"] = values.pop("model_type")
    values[EXTRA] = {
        "architecture": type(model).__name__,
        "left_out": [name for name, part in vars(model).items() if part is None and not name.startswith("_")],
        "heads": [list(head) for head in heads],
        "lengths": [one.length for one in given],
        "signed": any(bool((m < 0).any()) for one in given for m in one.matrices.values()),
        "places": [_told(place, model) for place in here],
        "origin": {**vars(given[0].origin), "model": {}},
    }
    kind, _ = _classes(type(model.config), type(model).__name__)
    return super(ReplacedConfig, kind).from_dict(values)


def _told(place: AttentionLayer, model: nn.Module) -> dict[str, Any]:
    """A place in words, from which `_places` finds it again without a forward."""
    names = ("site", "layer", "use", "heads", "groups", "width", "causal")
    path = next(path for path, module in model.named_modules() if module is place.module)
    told = None if place.fused is None else [place.fused.name, place.fused.order]
    return {**{name: getattr(place, name) for name in names}, "path": path, "fused": told}


def _places(model: nn.Module, told: list[dict[str, Any]]) -> list[AttentionLayer]:
    every = find_stacks(model)
    found = []
    for words in told:
        path = words["path"]
        stack = next(stack for stack in every if path.startswith(f"{stack.path}." if stack.path else ""))
        kind = None if words["fused"] is None else FusedProjection(*words["fused"])
        found.append(AttentionLayer(**{**words, "module": model.get_submodule(path), "stack": stack, "fused": kind}))
    return found


def _make_constant(model: Any, given: tuple[Constants, ...], heads: Sequence[Head]) -> None:
    """Puts constants into a model for good."""
    extra = getattr(model.config, EXTRA)
    here = _places(model, extra["places"])
    register(attention_function)
    deberta.wrap(model)
    for config in find_configs(model):
        config._attn_implementation_internal = NAME
    install_constants(here, given, heads, [], signed=extra["signed"])
    for module in {place.stack.module for place in here}:
        module.register_forward_pre_hook(begin_pass, with_kwargs=True)


def _empty(extra: Mapping[str, Any]) -> tuple[Constants, ...]:
    """Constants of the right shape, for weights to be loaded into."""
    shapes = {(told["site"], told["layer"]): told["heads"] for told in extra["places"]}
    origin = Origin(**extra["origin"])
    return tuple(
        Constants(
            matrices={place: torch.zeros(heads, length, length, device="cpu") for place, heads in shapes.items()},
            origin=origin,
        )
        for length in extra["lengths"]
    )


def _architecture(name: str, config: Any) -> Any:
    """The class of models of this name: one of Transformers, or one that an `Auto…` class knows for its configuration.

    Raises UserError if there is none.
    """
    found = getattr(transformers, name, None)
    if found is None:
        known = (getattr(transformers, auto)._model_mapping.get(config, None) for auto in AUTO)
        found = next((kind for kind in known if getattr(kind, "__name__", "") == name), None)
    if not inspect.isclass(found) or not issubclass(found, PreTrainedModel):
        raise UserError(f"expected the name of a model class of Transformers, got {name}")
    return found


def _model_of(config: Any) -> Any:
    """The class of models of this configuration."""
    original = transformers.CONFIG_MAPPING[config.base_model_type]
    return _classes(original, getattr(config, EXTRA)["architecture"])[1]


_CLASSES: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""Classes made so far, by the original configuration's and the name of the original model's."""


def _classes(original: Any, architecture: str) -> tuple[Any, Any]:
    """The classes of configurations and of models that were of these classes, known to the fitting `Auto…` classes."""
    if (original, architecture) in _CLASSES:
        return _CLASSES[original, architecture]
    base = _architecture(architecture, original)

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, config, *args, **options)
        extra = getattr(config, EXTRA)
        for name in extra["left_out"]:
            if name in self._modules:
                setattr(self, name, None)  # such as a pooler that was asked to be left out
        _make_constant(self, _empty(extra), [tuple(head) for head in extra["heads"]])

    name = f"Replaced{base.__name__}"
    of_config: dict[str, Any] = {"model_type": TYPE, "__module__": __name__}
    if not hasattr(original.__init__, "__wrapped__"):
        of_config["__init__"] = original.__init__  # written by hand: no field of a data class says what it takes
    config = type(f"{name}Config", (ReplacedConfig, original), of_config)
    members = {"__init__": __init__, "config_class": config, "set_attn_implementation": _refuse_attention}
    kind = type(name, (base,), {**members, "__module__": base.__module__, "__doc__": base.__doc__})
    _CLASSES[original, architecture] = config, kind
    for auto in (getattr(transformers, each) for each in AUTO):
        known = auto._model_mapping.get(original, ())
        if base in (known if isinstance(known, (list, tuple)) else (known,)):
            auto.register(config, kind, exist_ok=True)
    return config, kind


def _refuse_attention(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
    """Not for models with constant heads: another attention function would leave the constants out without a word."""
    raise UserError(
        f"expected the attention of a model with constant heads to stay as it is, got {attn_implementation!r}; "
        "its other heads run through PyTorch's fused attention already"
    )
