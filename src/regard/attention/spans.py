"""Which keys a block of queries may see at all: outside of that range a mask hides every pair, so nothing is computed.

Windows, packed sequences and chunks come as masks of pairs. To read one takes a thousandth of the time of a product.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.attention.call import AttentionCall, slices
from regard.attention.tracing import is_traced, is_transformed


def key_spans(call: AttentionCall, num_rows: int) -> list[list[slice]] | None:
    """Return, for each `num_rows` queries in turn, the range from the first key to the last that the mask shows them.

    Each list has an entry a sample, or one for all if they share a mask; an empty range where no key is seen.

    Returns:
        None if there is no mask of pairs, or it cannot be read: nothing is read from a GPU, in a graph or a transform.
    """
    keep = call.keep
    if keep is None or keep.device.type != "cpu" or 0 in (call.query.shape[2], *keep.shape):
        return None
    if is_traced() or type(keep) is not Tensor or is_transformed(keep):
        return None
    pairs = keep.view(torch.uint8)  # whose maxima are found much faster than `any` of the same bytes
    blocks = list(slices(pairs.shape[2], num_rows))
    seen = torch.stack([pairs[:, :, block].amax(2).amax(1) for block in blocks])
    first, stop = seen.argmax(-1), seen.shape[-1] - seen.flip(-1).argmax(-1)
    stop = torch.where(seen.amax(-1) > 0, stop, 0)
    spans = [list(map(slice, *ends)) for ends in zip(first.tolist(), stop.tolist(), strict=True)]
    return spans if len(blocks) > 1 else spans * len(list(slices(call.query.shape[2], num_rows)))


def union(spans: Sequence[slice]) -> slice:
    """Return the least range that holds all that are not empty."""
    held = [span for span in spans if span.start < span.stop]
    return slice(min((span.start for span in held), default=0), max((span.stop for span in held), default=0))
