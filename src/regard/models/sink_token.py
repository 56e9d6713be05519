"""A learned embedding in front of every sequence of a decoder, which draws the attention that a sink would."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache

from regard.errors import UserError

_ORDER = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
"""The arguments of a decoder's forward that may be passed by position."""


def put_sink_token(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a decoder's forward with its sink token in front of the first real token of each row.

    Behind a cache it stands there already: mask and positions tell of it, and no embedding is added.
    """
    others = kwargs | dict(zip(_ORDER, args, strict=False))
    ids, mask, positions, past, stream, cache = (others.pop(name, None) for name in (*_ORDER[:-1], "cache"))
    cache = cache if past is None else past
    if isinstance(cache, StaticCache):
        raise UserError("cache: expected one that grows beside a sink token, which `generate` makes no room for")
    if mask is not None and mask.ndim != 2:
        raise UserError(f"attention_mask: expected (batch, token) beside a sink token, got {mask.ndim} dimensions")
    stream = model.embed_tokens(ids) if stream is None else stream
    started = cache is not None and int(cache.get_seq_length()) > 0
    start = None
    if mask is not None:
        start = mask.int().argmax(-1, keepdim=True)
        mask = torch.nn.functional.pad(mask, (1, 0)).scatter(1, start, 1)
    if positions is not None:
        positions = positions + 1
        positions = positions if started else torch.nn.functional.pad(positions, (1, 0))
        if start is not None and not started:
            positions = positions.expand(start.shape[0], -1).scatter(1, start, 0)
    if not started:
        stream = _in_front(model.sink_token, stream, start)
    inputs = {"inputs_embeds": stream, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return (), others | inputs | {"drop_first": not started}


def _in_front(token: Tensor | None, stream: Tensor, start: Tensor | None) -> Tensor:
    """Return the embeddings with one more before column `start` of each row."""
    assert token is not None
    longer = torch.cat([token.to(stream.dtype).expand(stream.shape[0], 1, -1), stream], dim=1)
    if start is None:
        return longer
    columns = torch.arange(longer.shape[1], device=stream.device)
    before, at = (columns < start)[..., None], (columns == start)[..., None]
    padded = torch.nn.functional.pad(stream, (0, 0, 0, 1))
    return torch.where(before, padded, torch.where(at, token.to(stream.dtype), longer))
