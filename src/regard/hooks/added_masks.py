"""What a mask of pairs may hold: True and False, or numbers that are added to scores."""

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.attention.tracing import is_traced
from regard.errors import UserError


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
