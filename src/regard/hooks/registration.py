"""Regard's attention functions and mask functions, registered in Transformers under two names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

NAME = "regard"
EAGER_NAME = "regard-eager"
"""For models that do not support SDPA: they get the masks of eager attention, and without a mask all keys are seen."""
HINT = "regard_hint"
"""Attribute of a mask with the fields of a call that say the same, as long as nobody has written to the mask."""


def register(attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Make the functions known to Transformers; without a mask function the mask would silently be None."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(EAGER_NAME, partial(attention, is_eager_host=True))
    AttentionMaskInterface.register(EAGER_NAME, make_eager_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return the host's SDPA mask, with a hint where it is simple; padding alone is a view without T×T entries."""
    fits, padding = _read_padding(attention_mask, kv_offset, kv_length)
    if mask_function is bidirectional_mask_function and padding is not None and not options.get("use_vmap"):
        if options.get("allow_is_bidirectional_skip") and bool(padding.all()):
            return None
        expanded = padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        return _add_hint(expanded, causal=False, key_mask=padding, offset=0)
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    if mask is not None and mask_function is causal_mask_function and fits:
        return _add_hint(mask, causal=True, key_mask=padding, offset=int(q_offset) - int(kv_offset))
    return mask


def make_eager_mask(kv_length: int, *, kv_offset: int = 0, q_offset: int = 0, **options: Any) -> Tensor | None:
    """Return the host's eager mask, 0 or the lowest number, with a hint where it is simple."""
    mask: Tensor | None = eager_mask(kv_length=kv_length, kv_offset=kv_offset, q_offset=q_offset, **options)
    fits, padding = _read_padding(options.get("attention_mask"), kv_offset, kv_length)
    function = options.get("mask_function", causal_mask_function)
    if mask is None or not fits or function not in (causal_mask_function, bidirectional_mask_function):
        return mask
    causal = function is causal_mask_function
    return _add_hint(mask, causal=causal, key_mask=padding, offset=int(q_offset) - int(kv_offset) if causal else 0)


def _read_padding(mask: Tensor | None, first: int, length: int) -> tuple[bool, Tensor | None]:
    """Return whether a mask (batch, key) says all about padding, and its part for these keys, if there is one."""
    padding = None if mask is None else mask[:, first : first + length].bool()
    return (True, padding) if padding is None or padding.shape[-1] == length else (False, None)


def _add_hint(mask: Tensor, **fields: Any) -> Tensor:
    if not mask.is_inference():  # of a tensor of inference mode nobody can tell whether it is written to
        setattr(mask, HINT, (mask._version, fields))
    return mask


def hint(mask: Tensor) -> dict[str, Any] | None:
    """Return the fields of a call that say the same as a mask; None for masks of others, and ones written to since."""
    version, fields = getattr(mask, HINT, (None, None))
    return dict(fields) if fields is not None and version == mask._version else None


def find_configs(model: nn.Module) -> list[tuple[Any, str]]:
    """Return every config that an attention layer of the model may read, each once, with the name that it gets."""
    configs: dict[int, Any] = {}
    hosts: dict[int, list[bool]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs.setdefault(id(config), config)
            if isinstance(module, PreTrainedModel):
                hosts.setdefault(id(config), []).append(module._supports_sdpa)
    return [(config, NAME if all(hosts.get(key, ())) else EAGER_NAME) for key, config in configs.items()]
