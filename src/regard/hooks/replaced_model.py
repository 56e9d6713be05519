"""`replaced`: a model with constant heads or another operation for good, saved and loaded as any other."""

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from regard.attention.quantized import is_quantized_linear
from regard.attention.registered_names import EAGER_NAME, UNMASKED_NAME
from regard.attention.spec import AttentionSpec
from regard.constants import Constants, Head, Origin
from regard.errors import UserError, describe_error
from regard.hooks import continuous_batching
from regard.hooks.attention_function import OVERRIDE
from regard.hooks.constant_heads import freeze_constants
from regard.hooks.direct_calls import through_hooks
from regard.hooks.intercepted import SDPA
from regard.hooks.layers import NeedsInputs, find_attention_layers
from regard.hooks.module_tree import unlike_layers
from regard.hooks.modules import AttentionLayer, find_stacks
from regard.hooks.off_loaded import hooks_of
from regard.hooks.operation import Layers, Sites, make_operations
from regard.hooks.own_config import of_class, restore_copies
from regard.hooks.registration import EAGER, find_configs, read_hosts, without_masks
from regard.hooks.replace import (
    ConstantsLike,
    Heads,
    check_constants,
    install_constants,
    replacing,
    resolve_constants,
    select_heads,
)
from regard.hooks.replaced_card import describe_replaced, name_operation
from regard.hooks.routing import route_permanently
from regard.hooks.split_weights import is_sharded
from regard.runs.model_card import ModelCard, public_name
from regard.runs.quiet import suppress_logging

MODEL_TYPE = "regard-replaced"
"""The `model_type` in the config of a saved model."""
ENTRY = "constant_heads"
"""The entry of the config that says which heads are constant."""
OWN_TYPES = {"regard": "regard.models"}
"""Model types that Transformers does not bring, and what makes them known to it."""
HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Options of `from_pretrained` that say where to look."""
AUTO_CLASSES = (
    "AutoModel", "AutoModelForPreTraining", "AutoModelForMultipleChoice", "AutoModelForCausalLM",
    "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForImageClassification",
)  # fmt: skip


class ReplacedConfig(PretrainedConfig):
    """The config of a model that `replaced` made, loaded in a class that also is that of the original model."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        values = dict(config_dict)
        original_type, entry = str(values.get("base_model_type")), values.get(ENTRY)
        _import_own_type(original_type)
        if original_type not in transformers.CONFIG_MAPPING or not isinstance(entry, dict):
            raise UserError(f"expected the config of a model that regard.replaced made, of model type {MODEL_TYPE}")
        original: Any = transformers.CONFIG_MAPPING[original_type]
        config_class, _ = _make_classes(original, str(entry.get("architecture")))
        return super(ReplacedConfig, config_class).from_dict(values, **options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make_again, (self.base_model_type, getattr(self, ENTRY)["architecture"], 0), vars(self)


AutoConfig.register(MODEL_TYPE, ReplacedConfig, exist_ok=True)


def check_original(model: Any, name: str | None) -> None:
    """Raise a UserError if heads of a model are replaced already."""
    if isinstance(model.config, ReplacedConfig):
        entry, shown = model.config.constant_heads, name or type(model).__name__
        what = f"attention {name_operation(entry)}" if entry["operation"] else "constant heads"
        advice = "give the model that it was made of"
        raise UserError(f"model: expected an original, got {shown}, which is already replaced, with {what}; {advice}")


class ReplacedModel:
    """Loads models that `replaced` made."""

    @staticmethod
    def register() -> None:
        """Let the `Auto…` classes of this process load such models, as importing this module does already."""
        AutoConfig.register(MODEL_TYPE, ReplacedConfig, exist_ok=True)

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> PreTrainedModel:
        """Load a model that `save_pretrained` wrote, in the class it was saved in, with its heads constant.

        Args:
            name: Folder, or name on the Hub.
            **options: Of `PreTrainedModel.from_pretrained`.

        Raises:
            UserError: There is no model, or one of another kind.
        """
        config = options.pop("config", None)
        if config is None:
            try:
                config = AutoConfig.from_pretrained(
                    name, **{key: options[key] for key in HUB_OPTIONS if key in options}
                )
            except (OSError, ValueError) as error:
                raise UserError(f"model: cannot read '{name}': {describe_error(error)[:300]}") from error
        if not isinstance(config, ReplacedConfig):
            raise UserError(f"expected a model that regard.replaced made and save_pretrained wrote, got {name}")
        return _model_class(config).from_pretrained(name, config=config, **options)


def replaced(
    model: PreTrainedModel,
    constants: ConstantsLike | AttentionSpec | str,
    heads: Heads = None,
    *,
    layers: Layers = None,
    sites: Sites = None,
    any_model: bool = False,
) -> Any:
    """Return a copy of a model in which some heads are constant for good, or layers compute another operation.

    It computes what the model computes inside `replacing`, and is of a subclass of the model's class: it trains,
    generates and goes into pipelines. `save_pretrained`, `push_to_hub` and `from_pretrained` keep the constants or the
    operation, and leave out what is not computed.

    The model is of a class of Transformers; the other arguments are those of `replacing`, but for functions and
    operations of heads.

    Raises:
        UserError: The constants or the operation do not fit, or the class is not of Transformers.
    """
    _check_copies(model)
    try:
        all_layers = find_attention_layers(model)
    except NeedsInputs as error:
        raise error.of_copy() from error
    config: Any
    if isinstance(constants, (AttentionSpec, str)):
        if heads is not None or any_model:
            raise UserError("heads and any_model are for constants; choose where an operation goes with layers=")
        block: AbstractContextManager[Any] = replacing(model, constants, layers=layers, sites=sites)
        with replacing(model, constants, layers=layers, sites=sites) as operation:
            chosen = [layer for layer in all_layers if layer.key in operation.layers]
            config = _make_config(model, chosen, spec=operation.spec)
    else:
        if layers is not None or sites is not None:
            raise UserError("layers and sites are for operations; choose where constants go with heads=")
        if any(is_quantized_linear(module) for layer in all_layers for module in layer.module.modules()):
            raise UserError(
                f"cannot make a replaced model with constants of this {type(model).__name__}, whose weights are "
                "quantized; use regard.replacing, or replace heads before you quantize"
            )
        sources = resolve_constants(constants)
        sources = check_constants(model, all_layers, sources, any_model)
        selected = select_heads(sources[0], heads)
        config = _make_config(model, all_layers, sources, selected)
        block = replacing(model, sources, selected, any_model=any_model)
    with block:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    copied = _build_model(model, _model_class(config), config, state)
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return copied.train(model.training)


def _check_copies(model: Any) -> None:
    """Raise a UserError if no subclass of the model's class could compute what it computes."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"expected a Hugging Face PreTrainedModel, got {type(model).__name__}")
    if is_sharded(model):
        raise UserError("cannot replace heads of weights that FSDP has sharded for good; shard the replaced model")
    architecture = type(model).__name__
    if _find_architecture(architecture, type(model.config)) is not type(model):
        raise UserError(f"expected a model of a class of Transformers, got {architecture} of {type(model).__module__}")
    if any(any(hooks_of(module)) for module in model.modules()):
        raise UserError(
            f"cannot make a replaced model of this {architecture}, whose weights are off-loaded; use regard.replacing"
        )
    if any(name == UNMASKED_NAME for _, name in find_configs(model)):
        raise without_masks(architecture, "a copy would get some")


def _build_model(model: Any, model_class: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """Return a model of a class with all of a state, each part in its precision. UserError if some has no place."""
    options = {"config": config, "dtype": model.dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with suppress_logging():
        built, report = model_class.from_pretrained(None, state_dict=dict(state), **options)
    mismatched = {key for key, *_ in report["mismatched_keys"]}
    stray = sorted({*report["missing_keys"], *report["unexpected_keys"], *mismatched})
    stray = stray or sorted({*built.state_dict()} ^ {*state}) or unlike_layers(model, built)
    if stray:
        raise UserError(
            f"cannot make a replaced model of this {type(model).__name__}: its parts are not those of its "
            f"class, such as {stray[0]}; use regard.replacing, or replace heads before you change it"
        )
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        if name in state:
            tensor.data = state[name]
    if getattr(model, "hf_quantizer", None) is not None:
        built._weight_conversions = _reversible(getattr(model, "_weight_conversions", None))
    if getattr(model, "generation_config", None) is not None:
        built.generation_config = copy.deepcopy(model.generation_config)
    experts = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else {}
    if any(experts.values()):
        built.set_experts_implementation(experts)
    return built.to(model.device)


def _reversible(conversions: Sequence[Any] | None) -> list[Any] | None:
    """Return the conversions by which Transformers read a checkpoint that it can undo when it saves.

    Others put the parts of a quantized weight together, which the state of its layer holds one by one already.
    """
    reversible = []
    for conversion in conversions or ():
        with suppress(NotImplementedError):
            conversion.reverse_transform()
            reversible.append(conversion)
    return reversible if conversions else None


def _make_config(
    model: Any,
    layers: Sequence[AttentionLayer],
    sources: Sequence[Constants] = (),
    heads: Sequence[Head] = (),
    spec: AttentionSpec | None = None,
) -> Any:
    values = model.config.to_dict()
    values.pop("auto_map", None)  # code of the base, which would leave out what is replaced
    values["base_model_type"] = values.pop("model_type")
    values[ENTRY] = {
        "architecture": type(model).__name__,
        "left_out": [name for name, part in vars(model).items() if part is None and not name.startswith("_")],
        "heads": [list(head) for head in heads],
        "eager": sorted(path for path, _, name in read_hosts(model) if name == EAGER_NAME),
        "lengths": [constants.length for constants in sources],
        "signed": any(bool((m < 0).any()) for constants in sources for m in constants.matrices.values()),
        "row_sums": sorted({layer for constants in sources for layer in constants.row_sums}),
        "places": [_layer_to_dict(layer, model) for layer in layers],
        "origin": {**vars(sources[0].origin), "model": {}} if sources else {},
        "operation": None if spec is None else spec.to_dict(),
        "base": public_name(name) if (name := str(getattr(model.config, "_name_or_path", None) or "")) else None,
    }
    config_class, _ = _make_classes(type(model.config), type(model).__name__)
    return super(ReplacedConfig, config_class).from_dict(values)


def describe_saved(config: Any, base: str | None = None) -> ModelCard:
    """Return the card of a model that `replaced` made, of its config; `base` is a better name of the original."""
    entry = getattr(config, ENTRY)
    return describe_replaced(entry["architecture"], entry if base is None else {**entry, "base": base})


def _layer_to_dict(layer: AttentionLayer, model: nn.Module) -> dict[str, Any]:
    """Return the fields from which `_make_constant` finds a layer again without a forward."""
    names = ("site", "layer", "use", "heads", "groups", "width", "causal", "calls", "lends_keys")
    path = next(path for path, module in model.named_modules() if module is layer.module)
    return {**{name: getattr(layer, name) for name in names}, "path": path, "fused": layer.fused and list(layer.fused)}


def _make_constant(model: Any) -> None:
    """Put constants of the shapes in its config into a model for good, or the operation that it names."""
    entry = getattr(model.config, ENTRY)
    stacks, layers = find_stacks(model), []
    for fields in entry["places"]:
        path = fields["path"]
        stack = next(stack for stack in stacks if path.startswith(f"{stack.path}." if stack.path else ""))
        layers.append(AttentionLayer(**(fields | {"module": model.get_submodule(path), "stack": stack})))
    for path, config, _ in read_hosts(model):  # whatever is asked for: the original had these masks
        config._attn_implementation_internal = EAGER if path in entry.get("eager", ()) else SDPA
    route_permanently(model)
    heads = [tuple(head) for head in entry["heads"]]
    shapes = {(fields["site"], fields["layer"]): fields["heads"] for fields in entry["places"]}
    sources = [  # of the right shape, for weights to be loaded into
        Constants(
            matrices={layer: torch.zeros(count, length, length, device="cpu") for layer, count in shapes.items()},
            row_sums={(s, i): torch.zeros(shapes[s, i], length, device="cpu") for s, i in entry.get("row_sums", ())},
            origin=Origin(**entry["origin"]),
        )
        for length in entry["lengths"]
    ]
    install_constants(layers, sources, heads, ExitStack(), signed=entry["signed"])
    if entry.get("operation"):
        operations, hooks = make_operations(layers, AttentionSpec(**entry["operation"]))
        for module, operation in operations.items():
            setattr(module, OVERRIDE, operation)
        for hook in hooks:
            hook.register()


def _find_architecture(name: str, config_class: Any) -> Any:
    """Return the class of models of this name, of Transformers or of an `Auto…` class. UserError if there is none."""
    architecture = getattr(transformers, name, None)
    if architecture is None:
        known = (getattr(transformers, auto)._model_mapping.get(config_class, None) for auto in AUTO_CLASSES)
        architecture = next(
            (model_class for model_class in known if getattr(model_class, "__name__", "") == name), None
        )
    if not inspect.isclass(architecture) or not issubclass(architecture, PreTrainedModel):
        raise UserError(f"expected the name of a model class of Transformers, got {name}")
    return architecture


def _model_class(config: Any) -> Any:
    original = transformers.CONFIG_MAPPING[config.base_model_type]
    return _make_classes(original, getattr(config, ENTRY)["architecture"])[1]


def _import_own_type(model_type: str) -> None:
    """Make one of our model types known to Transformers."""
    if model_type not in transformers.CONFIG_MAPPING and model_type in OWN_TYPES:
        importlib.import_module(OWN_TYPES[model_type])


_CLASSES: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""Classes made so far, by the original config class and the name of the original model class."""


def _make_classes(original: Any, architecture: str) -> tuple[Any, Any]:
    """Return the classes of configs and models derived from these, known to the `Auto…` classes that fit."""
    if (original, architecture) in _CLASSES:
        return _CLASSES[original, architecture]
    base = _find_architecture(architecture, original)

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        vars(self)["config_class"] = original  # which hosts of two models compare with that of the config
        with of_class(config, original):
            base.__init__(self, config, *args, **options)
        del vars(self)["config_class"]
        restore_copies(self, ENTRY)
        for name in getattr(config, ENTRY)["left_out"]:
            if name in self._modules:
                setattr(self, name, None)  # such as a pooler
        _make_constant(self)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        loaded = base.from_pretrained.__func__(cls, *args, **options)
        freeze_constants(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *others: Any, **options: Any
    ) -> None:
        base.save_pretrained(self, save_directory, is_main_process, *others, **options)
        if is_main_process:
            describe_saved(self.config).write(save_directory)

    name = f"Replaced{base.__name__}"
    config_members: dict[str, Any] = {"model_type": MODEL_TYPE, "__module__": __name__}
    if not hasattr(original.__init__, "__wrapped__"):
        config_members["__init__"] = original.__init__  # no data class: no fields say what it takes
    config_class = type(f"{name}Config", (ReplacedConfig, original), config_members)
    members = {"__init__": __init__, "config_class": config_class, "set_attn_implementation": _refuse_attention}
    members |= {"from_pretrained": classmethod(from_pretrained), "save_pretrained": save_pretrained}
    members |= {"forward": through_hooks(base), continuous_batching.BEGIN: continuous_batching.refuse}
    members |= {"__reduce_ex__": _reduce_model, "__module__": base.__module__, "__doc__": base.__doc__}
    model_class = type(name, (base,), members)
    _CLASSES[original, architecture] = config_class, model_class
    for auto in (getattr(transformers, auto_name) for auto_name in AUTO_CLASSES):
        known = auto._model_mapping.get(original, ())
        if base in (known if isinstance(known, (list, tuple)) else (known,)):
            auto.register(config_class, model_class, exist_ok=True)
    return config_class, model_class


def _reduce_model(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Say how a copy or a pickled model is made: its class has no place in a module."""
    return _make_again, (self.config.base_model_type, getattr(self.config, ENTRY)["architecture"], 1), vars(self)


def _make_again(original_type: str, architecture: str, index: int) -> Any:
    """Return an empty config (0) or model (1) that `replaced` made, which gets its state next."""
    _import_own_type(original_type)
    made = _make_classes(transformers.CONFIG_MAPPING[original_type], architecture)[index]
    return made.__new__(made)


def _refuse_attention(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
    """Raise a UserError: another attention function would leave what is replaced out without a word."""
    raise UserError(
        f"cannot set the attention of a model that regard.replaced made to {attn_implementation!r}; leave it as it is, "
        "what is not replaced runs through PyTorch's fused attention already"
    )
