"""Regard's attention functions and mask functions, registered in Transformers under three names."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.attention.registered_names import EAGER_NAME, NAME, NAMES, UNMASKED_NAME
from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.module_tree import modules_of

EAGER = "eager"
"""The attention of Transformers that multiplies whole matrices."""
_HOSTS: WeakKeyDictionary[type, Any] = WeakKeyDictionary()
"""The model of a class of configs: to look it up takes as long as some operations."""
MADE = "regard_made"
"""Attribute of a mask that Transformers has made here of what its user has passed."""
HINT = "regard_hint"
"""Attribute of a mask with the fields of a call that say the same, as long as nobody has written to the mask."""


def register(attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Make the functions known to Transformers; without a mask function, as of the third, the mask is None."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(EAGER_NAME, partial(attention, is_eager_host=True))
    AttentionMaskInterface.register(EAGER_NAME, partial(make_mask, is_eager=True))
    AttentionInterface.register(UNMASKED_NAME, partial(attention, is_unmasked=True))


def make_mask(**options: Any) -> Tensor | None:
    """Return the mask of a host, with a note that it is made here."""
    mask = _make_mask(**options)
    if mask is not None and not is_traced():
        setattr(mask, MADE, True)
    return mask


def is_made(mask: Tensor) -> bool:
    """Return whether Transformers has made a mask here, and no user."""
    return hasattr(mask, MADE)


def _make_mask(*, is_eager: bool = False, **options: Any) -> Tensor | None:
    """Return the host's mask for SDPA, or the one for eager attention, with a hint where it is simple.

    Padding alone is a view without T×T entries. `options` are those of `sdpa_mask` and `eager_mask` of Transformers.
    """
    is_eager = is_eager or lacks_sdpa(options.get("config"))
    if is_traced():
        return eager_mask(**options) if is_eager else sdpa_mask(**options)
    function = options.get("mask_function", causal_mask_function)
    first, length = options.get("kv_offset", 0), options["kv_length"]
    padding: Tensor | None = options.get("attention_mask")
    if padding is not None:
        padding = padding[:, first : first + length].bool()
    fits = padding is None or padding.shape[-1] == length
    mask: Tensor | None
    if not is_eager and function is bidirectional_mask_function:
        if padding is None or not fits or options.get("use_vmap"):
            return sdpa_mask(**options)
        if options.get("allow_is_bidirectional_skip") and bool(padding.all()):
            return None
        mask = padding[:, None, None, :].expand(options["batch_size"], 1, options["q_length"], length)
    else:
        mask = eager_mask(**options) if is_eager else sdpa_mask(**options)
    is_causal = function is causal_mask_function
    if mask is None:
        return None
    if not fits or not (is_causal or function is bidirectional_mask_function):
        return _add_hint(mask, keep=mask == 0) if is_eager else mask  # of layers that share it, read once
    offset = int(options.get("q_offset", 0)) - int(first) if is_causal else 0
    return _add_hint(mask, causal=is_causal, key_mask=padding, offset=offset)


def lacks_sdpa(config: Any) -> bool:
    """Return whether models with a config do not support SDPA, so that they expect the masks of eager attention."""
    host = _HOSTS.get(type(config)) or _find_host(type(config))
    return host is not None and not getattr(host, "_supports_sdpa", True)


def _find_host(config_class: type) -> Any:
    """Return the model of a class of configs, None if there is none, and keep it for the next layer."""
    try:
        host = AutoModel._model_mapping.get(config_class, None)
    except ValueError:  # Transformers names the model of this config, and does not export it
        return None
    if host is not None and not is_traced():
        _HOSTS[config_class] = host
    return host


def function_of_user(functions: Mapping[str, Any], name: str | None) -> Any:
    """Return the function that is registered under a name, of a kernel of the hub as well, if it is none of ours."""
    function = None if name is None or name in NAMES else functions.get(name)
    defined_in = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return None if function is None or defined_in.split(".")[0] == "transformers" else function


def check_masks(config: Any, host: str) -> None:
    """Raise a UserError if a user has registered what makes the masks of a config, which a block would not call."""
    name = config._attn_implementation_internal
    if function_of_user(ALL_MASK_ATTENTION_FUNCTIONS, name) is not None:
        raise UserError(
            f"cannot observe {host}: its masks are made by a function that was registered for the attention {name!r}; "
            f"{_describe_masks(name)}"
        )


def lacks_masks(name: str | None) -> bool:
    """Return whether a user has registered an attention of a name without a mask function, so that it gets no masks."""
    if name == UNMASKED_NAME:
        return True
    return function_of_user(ALL_ATTENTION_FUNCTIONS, name) is not None and name not in ALL_MASK_ATTENTION_FUNCTIONS


def without_masks(host: str, problem: str) -> UserError:
    """Return the error of an attention that gets no masks, where nobody knows what it makes of that."""
    return UserError(
        f"cannot observe {host}: its attention gets no masks, for no mask function is registered for its name, and "
        f"{problem}; {_describe_masks('…')}"
    )


def _describe_masks(name: str | None) -> str:
    register = f"AttentionMaskInterface.register({name!r}, sdpa_mask)"
    return f"expected masks of Transformers, as by {register}, or attn_implementation='sdpa'"


def _add_hint(mask: Tensor, **fields: Any) -> Tensor:
    if not mask.is_inference():  # of a tensor of inference mode nobody can tell whether it is written to
        setattr(mask, HINT, (mask._version, fields))
    return mask


def hint(mask: Tensor) -> dict[str, Any] | None:
    """Return the fields of a call that say the same as a mask; None for masks of others, and ones written to since."""
    version, fields = getattr(mask, HINT, (None, None))
    return dict(fields) if fields is not None and version == mask._version else None


def find_configs(model: nn.Module) -> list[tuple[Any, str]]:
    """Return every config that an attention layer of the model may read, each once, with the name that it gets.

    Where eager attention is set, masks are those of eager attention: some hosts compute another thing with SDPA.
    """
    configs: dict[int, Any] = {}
    hosts: dict[int, list[bool]] = {}
    for module in modules_of(model):
        config = getattr(module, "config", None) if hasattr(type(module), "config") else vars(module).get("config")
        if hasattr(config, "_attn_implementation_internal"):
            configs.setdefault(id(config), config)
            if isinstance(module, PreTrainedModel):
                hosts.setdefault(id(config), []).append(module._supports_sdpa)

    def name_of(key: int) -> str:
        own = configs[key]._attn_implementation_internal
        if lacks_masks(own):
            return UNMASKED_NAME
        return EAGER_NAME if own in (EAGER, EAGER_NAME) or not all(hosts.get(key, ())) else NAME

    return [(config, name_of(key)) for key, config in configs.items()]


def read_hosts(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the path of each part that is a model, its config, and the name under which its attention is routed."""
    names = {id(config): name for config, name in find_configs(model)}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield path, module.config, names[id(module.config)]
