"""What `generate` of Transformers makes of its arguments, as far as the router must know it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def default_mask(tokens: Tensor, given: Mapping[str, Any], config: Any) -> Tensor:
    """Return the attention mask (row, token) that a decoder's `generate` makes of tokens that come without one.

    Args:
        tokens: Token ids (row, token).
        given: The other arguments of the call.
        config: The model's own generation config.
    """
    pad, eos = _ids(_setting("pad_token_id", given, config)), _ids(_setting("eos_token_id", given, config))
    if not pad or set(pad) & set(eos):
        return torch.ones_like(tokens)
    return tokens.ne(pad[0]).long()


def _setting(name: str, given: Mapping[str, Any], config: Any) -> Any:
    """Return a setting: that of the call, which may be None, else of the config in the call, else of the model's."""
    if name in given:
        return given[name]
    values = (getattr(one, name, None) for one in (given.get("generation_config"), config))
    return next((value for value in values if value is not None), None)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(number) for number in torch.as_tensor(value).flatten().tolist()]
