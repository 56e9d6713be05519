"""What is known of one forward pass of a stack: tokens, padding, packing, and how much came before."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class ForwardContext:
    """One forward pass of a stack, from its arguments."""

    offset: int
    """Tokens already in the cache."""
    tokens: Tensor | None
    """Token ids (batch, query) of this pass, if it was given ids."""
    token_mask: Tensor | None
    """Which tokens so far are not padding, (batch, all so far); None if all are."""
    segments: Tensor | None
    """Which packed sequence each token belongs to, (batch, query); None if there is one a row."""
    encoder_mask: Tensor | None
    """Which keys of cross-attention are not padding."""
    calls: Counter[str] = field(default_factory=Counter)
    """Attention layers seen so far in this pass, by kind."""
    embeddings: Tensor | None = None
    """The input of the first layer, until the first attention has told how its tokens belong together."""
    blocks: int = 0
    """Layers finished so far."""

    @classmethod
    def from_arguments(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], before: ForwardContext | None
    ) -> ForwardContext:
        """Read off the arguments of a stack's forward, which may go on where `before` ended."""
        given = _named(module, args, kwargs)
        offset = _cached(given.get("past_key_values"))
        mask = given.get("attention_mask")
        segments = None
        if mask is None and offset == 0:
            segments = _segments(given.get("position_ids"))
        return cls(
            offset=offset,
            tokens=_tensor(given.get("input_ids")),
            token_mask=_real(mask, offset, before.token_mask if before is not None and offset else None),
            segments=segments,
            encoder_mask=_padding(_seen(given.get("encoder_attention_mask"))),
        )

    def query_mask(self, count: int) -> Tensor | None:
        """Which of this pass's `count` queries are not padding; None if all are."""
        if self.token_mask is None:
            return None
        return self.token_mask[:, self.offset : self.offset + count]


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, those in **kwargs included."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    for name, value in list(bound.items()):
        if isinstance(value, dict) and name in ("kwargs", "flash_attn_kwargs"):
            bound.update(value)
    return dict(bound)


def _cached(cache: Any) -> int:
    return int(cache.get_seq_length()) if cache is not None and hasattr(cache, "get_seq_length") else 0


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _real(mask: Any, offset: int, before: Tensor | None) -> Tensor | None:
    """Which tokens so far are not padding; None if all are. A full mask tells this of the new tokens alone."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    seen = _seen(mask)
    if seen is None or mask.ndim == 2:
        return _padding(seen)
    new = mask.shape[-2]
    first = offset - max(offset + new - seen.shape[-1], 0)
    if before is None:
        before = seen.new_ones(len(seen), offset)
    return _padding(torch.cat([before, seen[:, first : first + new]], dim=1))


def _seen(mask: Any) -> Tensor | None:
    """The keys that some query may see: a two-dimensional mask as it is, a full one summed up; None without a mask."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        return mask.bool()
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.any(dim=(1, 2))


def _padding(real: Tensor | None) -> Tensor | None:
    return None if real is None or bool(real.all()) else real


def _segments(positions: Any) -> Tensor | None:
    """Number of the packed sequence that each token belongs to, where position ids start again within a row."""
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return None
    breaks = positions.diff(dim=-1) != 1
    if not bool(breaks.any()):
        return None
    return torch.nn.functional.pad(breaks, (1, 0)).cumsum(-1)
