"""The slot in Transformers: one attention function and one mask function, registered under one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from regard.errors import UserError

NAME = "regard"
WRAPPED = ("deberta", "deberta-v2")
"""Model types that do not ask for an attention function, for which there is a wrapper."""
HINT = "regard_hint"
"""The attribute of a mask that says in a word what its entries say one by one, as long as nobody has written to it."""


def register(attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Make the slot known to Transformers; without a mask function beside it the mask would silently be None."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The host's own SDPA mask, with a hint where it is simple; padding alone is a view that holds no T×T entries."""
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    fits = real is not None and real.shape[-1] == kv_length
    if mask_function is bidirectional_mask_function and fits and not options.get("use_vmap"):
        assert real is not None
        if options.get("allow_is_bidirectional_skip") and bool(real.all()):
            return None
        result = real[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        return _hinted(result, False, real, 0)
    made = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    if made is not None and mask_function is causal_mask_function and (real is None or fits):
        return _hinted(made, True, real, int(q_offset) - int(kv_offset))
    return made


def _hinted(mask: Tensor, causal: bool, real: Tensor | None, offset: int) -> Tensor:
    if mask.is_inference():
        return mask  # nobody could tell whether it is written to
    setattr(mask, HINT, (mask._version, {"causal": causal, "key_mask": real, "offset": offset}))
    return mask


def hint(mask: Tensor) -> dict[str, Any] | None:
    """What our mask function said of this mask; None for any other mask, and for one written to since."""
    version, said = getattr(mask, HINT, (None, None))
    return dict(said) if said is not None and version == mask._version else None


@contextmanager
def attention_installed(model: nn.Module) -> Iterator[None]:
    """While it lasts the model's attention runs through the slot; afterwards every config is as it was."""
    before = [(config, config._attn_implementation_internal) for config in find_configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def find_configs(model: nn.Module) -> list[Any]:
    """Every config that an attention layer of the model may consult, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found.setdefault(id(config), config)
    return list(found.values())


def check_observable(model: nn.Module) -> None:
    """Nothing, or a UserError that says why this model's attention cannot be reached."""
    if not isinstance(model, nn.Module) or not any(isinstance(m, PreTrainedModel) for m in model.modules()):
        raise UserError(
            f"cannot observe {type(model).__name__}: expected a Hugging Face PreTrainedModel, or a module around one"
        )
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise UserError(f"cannot observe a compiled {type(model).__name__}: pass the model as it was before compiling")
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _computes_on_its_own(module):
            raise UserError(
                f"cannot observe {type(module).__name__}: it does not call its attention through Transformers' "
                "AttentionInterface"
            )


def _type(config: Any) -> str:
    """The family of a model, also of one whose heads were replaced."""
    return str(getattr(config, "base_model_type", config.model_type))


def _computes_on_its_own(model: PreTrainedModel) -> bool:
    """Whether Transformers says of a model of its own that no attention function can be put into it."""
    own = type(model).__module__.startswith("transformers.models.") and _type(model.config) not in WRAPPED
    return own and not type(model)._can_set_attn_implementation()
