"""The attention matrix in cache-sized tiles, exponentiated but not normalized; never more than one tile is held.

A tile is samples × heads × queries × the range of keys that those queries may see, in two buffers that are used again.
A small matrix on a CPU is one tile of all keys. Scores are in base 2 (log2(e) goes into the scale), because exp2 is the
cheaper instruction.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.attention.call import AttentionCall, slices, visible_mask
from regard.attention.device_choice import choose_for
from regard.attention.spans import key_spans, union
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
    groups = call.key.shape[1]
    num_rows = min(queries, max_rows(call))
    if _is_one_tile(call, num_rows):
        yield _whole_tile(call)
        return
    masks = _Masks(call, num_rows)
    num_samples, num_groups = _num_samples_and_groups(call, num_rows * masks.most_keys)
    size = num_samples * num_groups * call.num_key_value_groups * num_rows * masks.most_keys
    buffers = call.query.new_empty(2, size)
    query = call.query.unflatten(1, (groups, call.num_key_value_groups))
    for sample in slices(batch, num_samples):
        last = max(masks.num_keys[sample])
        for group in slices(groups, num_groups):
            head = slice(group.start * call.num_key_value_groups, group.stop * call.num_key_value_groups)
            key, value = call.key[sample, group, :last], call.value[sample, group, :last]
            if masks.reads_of_keys >= READS_PER_COPY:
                key, value = key.contiguous(), value.contiguous()
            for row in slices(queries, num_rows):
                seen = masks.seen_keys(sample, row)
                shape = tuple(map(_size, (sample, head, row, seen)))
                raw, exps = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                _multiply(query[sample, group, :, row], key[:, :, seen], call.scale * LOG2_E, raw)
                masks.apply(raw, sample, head, row, seen)
                base, total = _exponentiate(call, (sample, head, row), raw, exps)
                yield Tile(sample, head, row, seen, value[:, :, seen], raw, exps, base, total)


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
    _cap_and_bias(call, raw, *whole, slice(0, keys))
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


def _num_samples_and_groups(call: AttentionCall, num_pairs: int) -> tuple[int, int]:
    """Return how many samples, and key/value heads of each, make a tile of about `BYTES`, of so many pairs a head."""
    batch, groups = call.key.shape[:2]
    budget = choose_for(call.query.device, BYTES)
    heads = max(1, budget // (call.query.element_size() * max(num_pairs, 1) * call.num_key_value_groups))
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
        sink = sink_scores(call.sink, index, raw.dtype)
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


def sink_scores(sink: Tensor, index: tuple[slice, slice, slice], dtype: torch.dtype) -> Tensor:
    """Return the scores of a sink, to base 2, that stand beside the rows of a tile at an index."""
    logits = sink[index[1]][None, :, None] if sink.ndim == 1 else sink[index]
    return (logits.to(dtype) * LOG2_E)[..., None]


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

        self.num_rows = num_rows
        self.spans = key_spans(call, num_rows)
        blocks = slices(call.query.shape[2], num_rows)
        widths = [keys] if self.spans is None else [_size(self.seen_keys(slice(0, batch), row)) for row in blocks]
        self.most_keys = max(widths, default=0)
        """The most keys that the queries of a tile see."""
        self.reads_of_keys = sum(widths) // keys if self.spans is not None else call.query.shape[2] // num_rows
        """How often each key is read, about."""

    def seen_keys(self, sample: slice, row: slice) -> slice:
        """Return the range of keys that some queries may see, of at least one key."""
        last = max(self.num_keys[sample])
        stop = max(1, min(last, self.call.offset + row.stop)) if self.call.causal else last
        if self.spans is None:
            return slice(0, stop)
        of_samples = self.spans[row.start // self.num_rows]
        seen = union(of_samples if len(of_samples) == 1 else of_samples[sample])
        stop = max(1, min(stop, seen.stop))
        return slice(min(seen.start, stop - 1), stop)

    def apply(self, raw: Tensor, sample: slice, head: slice, row: slice, seen: slice) -> None:
        call = self.call
        _cap_and_bias(call, raw, sample, head, row, seen)
        if call.keep is not None:
            _hide(raw, _part(call.keep, sample, head, row, seen))
        if any(self.has_gaps[sample]) or len(set(self.num_keys[sample])) > 1:
            raw.add_(self.padding[sample, ..., seen])
        if call.causal:
            self._hide_future(raw, call.offset + row.start - seen.start)

    def _hide_future(self, raw: Tensor, first: int) -> None:
        """Hide the keys behind each query; the first query stands at key `first`."""
        diagonal = raw[..., max(first, 0) :]
        height, width = diagonal.shape[-2:]
        skipped = min(max(-first, 0), height)
        if width == 0:
            return
        if skipped:
            raw[..., :skipped, :].fill_(HIDDEN)
            diagonal, height = diagonal[..., skipped:, :], height - skipped
        diagonal.add_(self.future[:height, :width])


def _cap_and_bias(call: AttentionCall, raw: Tensor, sample: slice, head: slice, row: slice, keys: slice) -> None:
    if call.softcap is not None:
        cap = call.softcap * LOG2_E
        raw.div_(cap).tanh_().mul_(cap)
    if call.bias is not None:
        raw.add_(_part(call.bias, sample, head, row, keys).to(raw.dtype).mul(LOG2_E).clamp_(min=HIDDEN))


def _hide(raw: Tensor, keep: Tensor) -> None:
    """Hide all other pairs, by a sum: on a CPU `masked_fill_` takes five times as long."""
    raw.add_(torch.where(keep, 0.0, HIDDEN))


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _part(mask: Tensor, sample: slice, head: slice, row: slice, keys: slice) -> Tensor:
    """Return a tile's part of a mask, which may be of size 1 over samples, heads or queries."""
    index = tuple(s if size > 1 else slice(None) for s, size in zip((sample, head, row), mask.shape[:3], strict=True))
    return mask[(*index, keys)]
