"""The attention matrix in cache-sized tiles, exponentiated but not normalized; never more than one tile is held.

A tile is samples × heads × queries × the keys that those queries may see, up to the last real one, in two buffers that
are used again. A small matrix on a CPU is one tile of all keys. Scores are in base 2 (log2(e) goes into the scale),
because exp2 is the cheaper instruction.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.attention.call import AttentionCall, slices, visible_mask
from regard.attention.device_choice import choose_for
from regard.attention.tracing import cached_for

LOG2_E = math.log2(math.e)
HIDDEN = -1e30
"""The score of a masked pair: its exponential is zero, and unlike −inf it may be multiplied by that zero."""
UNSEEN = HIDDEN / 2
"""The maximum of a row that sees no key."""
ROWS = {"cpu": 128, "cuda": 1024}
"""Most queries in a tile. A GPU takes longer to launch an operation than to compute a tile of a cache's size."""
BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""The size of a tile."""
MASKED_SHARE = 8
"""The one tile of a small matrix has at most `BYTES`; 1/8 of that where it may have keys that no query sees."""
READS_PER_COPY = 8
"""How often keys must be read to repay a copy of them."""


@dataclass(slots=True)
class Tile:
    """Samples × heads × queries × keys of the matrix, before normalization: `weights = exps / total`.

    The tensors are overwritten by the next tile. `base` and `total` have an axis of size 1 for keys.

    Attributes:
        value: Values of these keys, by key/value head.
        scores: Logarithms to base 2, relative to the row's maximum `base`.
        exps: `2**scores`; zero in a row that sees no key.
        base: Maximum of each row; `UNSEEN` in a row that sees no key.
        total: Sum of each row; 1 in a row that sees no key. The log-sum-exp is log2(total) + base.
        is_whole: Whether it is the whole matrix, so that there is no next one.
    """

    samples: slice
    heads: slice
    queries: slice
    keys: slice
    value: Tensor
    scores: Tensor
    exps: Tensor
    base: Tensor
    total: Tensor
    is_whole: bool = False

    @property
    def at_queries(self) -> tuple[slice, slice, slice]:
        """Index of this tile's rows in a (batch, head, query) tensor."""
        return self.samples, self.heads, self.queries

    @property
    def at_keys(self) -> tuple[slice, slice, slice]:
        """Index of this tile's columns in a (batch, head, key) tensor."""
        return self.samples, self.heads, self.keys


def tiles(call: AttentionCall) -> Iterator[Tile]:
    """Yield every tile of a softmax call's matrix: some samples or heads at a time, from first query to last."""
    batch, _, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    num_rows = min(queries, max_rows(call))
    if _is_one_tile(call, num_rows):
        yield _whole_tile(call)
        return
    num_samples, num_groups = _num_samples_and_groups(call, num_rows)
    buffers = call.query.new_empty(2, num_samples * num_groups * call.num_key_value_groups * num_rows * keys)
    masks = _Masks(call, num_rows)
    query = call.query.unflatten(1, (groups, call.num_key_value_groups))
    for sample in slices(batch, num_samples):
        last = max(masks.num_keys[sample])
        for group in slices(groups, num_groups):
            head = slice(group.start * call.num_key_value_groups, group.stop * call.num_key_value_groups)
            key, value = call.key[sample, group, :last], call.value[sample, group, :last]
            if queries // num_rows >= READS_PER_COPY:
                key, value = key.contiguous(), value.contiguous()
            for row in slices(queries, num_rows):
                end = max(1, min(last, call.offset + row.stop)) if call.causal else last
                shape = (sample.stop - sample.start, head.stop - head.start, row.stop - row.start, end)
                raw, exps = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                _multiply(query[sample, group, :, row], key[:, :, :end], call.scale * LOG2_E, raw)
                masks.apply(raw, sample, head, row)
                base, total = _exponentiate(call, (sample, head, row), raw, exps)
                yield Tile(sample, head, row, slice(0, end), value[:, :, :end], raw, exps, base, total)


def _is_one_tile(call: AttentionCall, num_rows: int) -> bool:
    """Return whether all rows are one tile, of a CPU, where it costs more to begin operations than to mask a few keys.

    Those are padding, or room in a cache behind the last query. Other tiles leave out most of them.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    size = call.query.element_size() * call.query.shape[:3].numel() * keys
    has_masked = call.key_mask is not None or (call.causal and call.offset + queries < keys)
    limit = BYTES["cpu"] // MASKED_SHARE if has_masked else BYTES["cpu"]
    return size == 0 or (call.query.device.type == "cpu" and num_rows == queries and size <= limit)


def _whole_tile(call: AttentionCall) -> Tile:
    batch, heads, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    whole = slice(0, batch), slice(0, heads), slice(0, queries)
    raw = call.query.new_empty(batch, heads, queries, keys)
    _multiply(call.query.unflatten(1, (groups, -1)), call.key, call.scale * LOG2_E, raw)
    _cap_and_bias(call, raw, *whole)
    if call.key_mask is not None and call.keep is None and not call.causal:
        _hide(raw, call.key_mask[:, None, None])
    elif call.keep is not None or call.key_mask is not None:
        _hide(raw, visible_mask(call))
    elif call.causal:
        raw.add_(cached_for(raw, _future)(queries, keys, call.offset, raw.dtype, raw.device))
    base, total = _exponentiate(call, whole, raw, exps := torch.empty_like(raw))
    return Tile(*whole, slice(0, keys), call.value, raw, exps, base, total, is_whole=True)


@lru_cache(maxsize=1)  # that of the layer before
def _future(queries: int, keys: int, offset: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what hides the keys after each query where it is added; never write to it."""
    with torch.inference_mode(False):
        return torch.full((queries, keys), HIDDEN, dtype=dtype, device=device).triu_(1 + offset)


def max_rows(call: AttentionCall) -> int:
    """Return the most queries of a tile: many multiply faster, but over few keys most of a causal tile is future."""
    most = choose_for(call.query.device, ROWS)
    return max(most // 2, min(most, call.key.shape[2] // 4)) if call.causal else most


def _num_samples_and_groups(call: AttentionCall, num_rows: int) -> tuple[int, int]:
    """Return how many samples, and key/value heads of each, make a tile of about `BYTES`."""
    batch, groups, keys, _ = call.key.shape
    budget = choose_for(call.query.device, BYTES)
    heads = max(1, budget // (call.query.element_size() * num_rows * keys * call.num_key_value_groups))
    return (max(1, min(batch, heads // groups)), groups) if heads >= groups else (1, heads)


def _multiply(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """Write q·k into `out`, one product for the heads that share a key/value head; one call of samples side by side."""
    if len(query) > 1 and query.is_contiguous() and key.is_contiguous():
        query, key, out = query.flatten(0, 1)[None], key.flatten(0, 1)[None], out.flatten(0, 1)[None]
    for q, k, o in zip(query, key, out, strict=True):
        flat = o.view(k.shape[0], -1, k.shape[1])
        torch.baddbmm(flat, q.flatten(1, 2), k.mT, beta=0, alpha=scale, out=flat)


def _exponentiate(
    call: AttentionCall, index: tuple[slice, slice, slice], raw: Tensor, exps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the maximum and the normalizer of each row; make `raw` relative to the first, and write `exps`."""
    base = raw.amax(-1, keepdim=True)
    if call.sink is not None:
        logits = call.sink[index[1]][None, :, None] if call.sink.ndim == 1 else call.sink[index]
        sink = (logits.to(raw.dtype) * LOG2_E)[..., None]
        base = torch.maximum(base, sink)
    may_see_none = call.keep is not None or call.bias is not None or call.key_mask is not None or call.offset < 0
    if may_see_none:
        base.clamp_(min=UNSEEN)
    torch.exp2(raw.sub_(base), out=exps)
    total = exps.sum(-1, keepdim=True)
    if call.sink is not None:
        total.add_(torch.exp2(sink - base))
    if may_see_none:
        total.clamp_(min=1.0)
    return base, total


class _Masks:
    """Soft-cap, bias and masks of a tile's scores, applied in this order."""

    def __init__(self, call: AttentionCall, num_rows: int) -> None:
        self.call = call
        if call.causal:
            options = call.query.dtype, call.query.device
            self.future = cached_for(call.query, _future)(num_rows, num_rows, 0, *options)
        batch, keys = call.key.shape[0], call.key.shape[2]
        self.num_keys = [keys] * batch
        """Keys of each sample up to its last real one, at least one."""
        self.has_gaps: list[bool] = []
        """Which samples have padding before that."""
        if call.key_mask is not None:
            last = (call.key_mask * torch.arange(1, keys + 1, device=call.key.device)).amax(-1).clamp_(min=1)
            if call.key_mask.device.type == "cpu":
                self.num_keys, self.has_gaps = last.tolist(), (call.key_mask.sum(-1) < last).tolist()
            else:  # nothing is read from a GPU
                self.has_gaps = [True] * batch
            self.padding = call.query.new_zeros(call.key_mask.shape).masked_fill_(~call.key_mask, HIDDEN)[:, None, None]

    def apply(self, raw: Tensor, sample: slice, head: slice, row: slice) -> None:
        call, end = self.call, raw.shape[-1]
        _cap_and_bias(call, raw, sample, head, row)
        if call.keep is not None:
            _hide(raw, _part(call.keep, sample, head, row, end))
        if any(self.has_gaps[sample]) or len(set(self.num_keys[sample])) > 1:
            raw.add_(self.padding[sample, ..., :end])
        if call.causal:
            self._hide_future(raw, row)

    def _hide_future(self, raw: Tensor, row: slice) -> None:
        first = self.call.offset + row.start
        diagonal = raw[..., max(first, 0) :]
        height, width = diagonal.shape[-2:]
        skipped = min(max(-first, 0), height)
        if width == 0:
            return
        if skipped:
            raw[..., :skipped, :].fill_(HIDDEN)
            diagonal, height = diagonal[..., skipped:, :], height - skipped
        diagonal.add_(self.future[:height, :width])


def _cap_and_bias(call: AttentionCall, raw: Tensor, sample: slice, head: slice, row: slice) -> None:
    if call.softcap is not None:
        cap = call.softcap * LOG2_E
        raw.div_(cap).tanh_().mul_(cap)
    if call.bias is not None:
        raw.add_(_part(call.bias, sample, head, row, raw.shape[-1]).to(raw.dtype).mul(LOG2_E).clamp_(min=HIDDEN))


def _hide(raw: Tensor, keep: Tensor) -> None:
    """Hide all other pairs, by a sum: on a CPU `masked_fill_` takes five times as long."""
    raw.add_(torch.where(keep, 0.0, HIDDEN))


def _part(mask: Tensor, sample: slice, head: slice, row: slice, end: int) -> Tensor:
    """Return a tile's part of a mask, which may be of size 1 over samples, heads or queries."""
    index = tuple(s if size > 1 else slice(None) for s, size in zip((sample, head, row), mask.shape[:3], strict=True))
    return mask[(*index, slice(0, end))]
