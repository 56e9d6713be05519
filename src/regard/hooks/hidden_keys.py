"""Whether keys that no query of a layer sees are padding, where no argument of a module of one's own says it."""

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.errors import UserError


def check_padding(name: str, call: AttentionCall, seen: Bool[Tensor, "batch key"]) -> None:
    """Raise a UserError for keys of self-attention that no query sees, of which it is not clear that they are padding.

    `seen` are the others.
    """
    if not _may_be_padding(call, seen):
        raise unknown_padding(
            name, "its queries may choose keys, as the largest scores, and some keys are seen by none"
        )


def unknown_padding(name: str, reason: str) -> UserError:
    """Return the error of keys that no query sees, which may be padding or not."""
    return UserError(
        f"cannot observe {name}: {reason}; expected those of padding in every layer, or an argument attention_mask "
        "(batch, token) of the model, which says it"
    )


def _may_be_padding(call: AttentionCall, seen: Bool[Tensor, "batch key"]) -> bool:
    """Return whether keys are hidden as padding is: in all heads alike, or but for the distance of query and key."""
    if call.keep is None:
        return True
    keep = call.keep
    if call.query.shape[1] > 1 and bool((keep == keep[:, :1]).all()):
        return True
    queries, keys = keep.shape[-2:]
    distance = torch.arange(queries, device=keep.device)[:, None] - torch.arange(keys, device=keep.device) + keys - 1
    real = seen.to(keep.device)[:, None, None, :] & seen.to(keep.device)[:, None, :, None]
    counts = [
        keep.new_zeros(*keep.shape[:2], queries + keys - 1, dtype=torch.int32).index_add_(
            -1, distance.flatten(), (pairs & real).flatten(-2).int()
        )
        for pairs in (keep, ~keep)
    ]
    return not bool(((counts[0] > 0) & (counts[1] > 0)).any())
