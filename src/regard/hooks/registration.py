"""Regard's attention function and mask function, registered in Transformers under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

NAME = "regard"
HINT = "regard_hint"
"""Attribute of a mask with the fields of a call that say the same, as long as nobody has written to the mask."""


def register(attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Make both functions known to Transformers; without a mask function the mask would silently be None."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)


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
    padding = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    fits = padding is not None and padding.shape[-1] == kv_length
    if mask_function is bidirectional_mask_function and fits and not options.get("use_vmap"):
        assert padding is not None
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
    if mask is not None and mask_function is causal_mask_function and (padding is None or fits):
        return _add_hint(mask, causal=True, key_mask=padding, offset=int(q_offset) - int(kv_offset))
    return mask


def _add_hint(mask: Tensor, **fields: Any) -> Tensor:
    if not mask.is_inference():  # of a tensor of inference mode nobody can tell whether it is written to
        setattr(mask, HINT, (mask._version, fields))
    return mask


def hint(mask: Tensor) -> dict[str, Any] | None:
    """Return the fields of a call that say the same as a mask; None for masks of others, and ones written to since."""
    version, fields = getattr(mask, HINT, (None, None))
    return dict(fields) if fields is not None and version == mask._version else None


def find_configs(model: nn.Module) -> list[Any]:
    """Return every config that an attention layer of the model may read, each once."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs.setdefault(id(config), config)
    return list(configs.values())
