"""The attention mask of a forward; what one of pairs may hold: True and False, or numbers that are added to scores."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.tracing import is_traced
from regard.errors import UserError

PADDING_MASKS = ("decoder_padding_mask", "input_mask")
"""Masks that are true at padding, of FSMT and of XLNet."""


def find_mask(module: nn.Module, arguments: Mapping[str, Any], given: Any) -> Any:
    """Return the attention mask of a forward that was passed token ids or embeddings; None if it has none of tokens.

    Raises:
        UserError: It has a mask (row, token) of other rows than the batch, of which Transformers reads the first ones.
    """
    mask = arguments.get("attention_mask")
    padding = next((arguments[name] for name in PADDING_MASKS if arguments.get(name) is not None), None)
    if mask is None and isinstance(padding, Tensor) and padding.ndim == 2:
        mask = ~padding.bool()
    if not (isinstance(mask, Tensor) and isinstance(given, Tensor) and mask.ndim == 2 and given.ndim > 1):
        return mask
    is_own = not isinstance(module, PreTrainedModel)
    if (is_traced() and not is_own) or len(mask) in (1, len(given)):  # a graph would have this number of rows alone
        return mask
    if is_own and len(mask) == mask.shape[1] == given.shape[1]:
        return None  # of pairs, as a module of one's own may read it
    check_batch(mask, len(given))
    return mask


def check_batch(mask: Tensor, batch: int) -> None:
    """Raise a UserError for a mask of other rows than those of a batch, or one for all."""
    if not is_traced() and len(mask) not in (1, batch):
        raise UserError(
            f"attention_mask: expected as many rows as the batch has, {batch}, got {len(mask)}; a mask of pairs has "
            "the shape (batch, 1, query, key)"
        )


def check_mask(mask: Tensor, *, is_added: bool = False) -> None:
    """Raise a UserError for a mask of whole numbers, and for True and False that a model adds as 1 and 0 (`is_added`).

    SDPA refuses whole numbers. Eager attention of Transformers adds whatever it gets, and then hides nothing.
    """
    if mask.is_floating_point() or (mask.dtype == torch.bool and not is_added):
        return
    expected = "numbers to be added to scores" if is_added else "True and False, or numbers to be added to scores"
    reason = ""
    if is_added:
        reason = ", which eager attention would add as 1 and 0; if the model makes it, set attn_implementation='sdpa'"
    raise UserError(
        f"attention_mask: expected {expected}, 0 where a query sees a key and torch.finfo(dtype).min where not; got "
        f"a mask of pairs in {mask.dtype}{reason}"
    )


def check_rows(seen: Bool[Tensor, "batch key"]) -> None:
    """Raise a UserError if no query of a row sees a key, by a mask of pairs: it may mean the opposite."""
    if is_traced() or bool(seen.any(-1).all()):
        return
    row = int((~seen.any(-1)).nonzero()[0])
    raise UserError(
        f"attention_mask: the mask of pairs of row {row} hides all keys from all queries; expected True, or 0 if it is "
        "added to scores, where a query sees a key, in every row"
    )
