"""Attention in cache-sized tiles: exact output and statistics in one pass, never more than a tile of the matrix.

A tile is some samples × some heads × 128 queries × all keys those may see, about two megabytes, in two buffers that are
used again for every tile. Scores are kept in base 2 (log2(e) goes into the product's scale) because exp2 is the cheaper
instruction, and a tile is never divided by its normaliser: that goes into the small factors beside it. Keys behind the
last real one of a sample are not computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.call import AttentionCall

LOG2_E = math.log2(math.e)
HIDDEN = -1e30
"""The score of a masked pair: its exponential is zero, and unlike −inf it may be multiplied by that zero."""
BLIND = HIDDEN / 2
"""The maximum of a row that sees nothing."""
ROWS = 128
BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
NEAR = 8
"""How often keys must be read to repay a copy of them."""


@dataclass(slots=True)
class Tile:
    """Samples × heads × queries × keys of the matrix, before normalisation: `weights = exps / total`.

    `scores` are base-2 logs relative to the row's maximum `base`, `exps = 2**scores`; both are overwritten by the next
    tile. `base` and `total` keep the axis of keys, of size 1; log2(total) + base is the log-sum-exp. A row that sees
    nothing has no exps but zeros, a total of 1 and a base of `BLIND`.
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

    @property
    def at_queries(self) -> tuple[slice, slice, slice]:
        """Where this tile's rows stand in a (batch, head, query) tensor."""
        return self.samples, self.heads, self.queries

    @property
    def at_keys(self) -> tuple[slice, slice, slice]:
        """Where this tile's columns stand in a (batch, head, key) tensor."""
        return self.samples, self.heads, self.keys


def tiles(call: AttentionCall) -> Iterator[Tile]:
    """Every tile of the call's matrix: some samples or heads at a time, from their first query to their last."""
    batch, _, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    rows = _rows(call)
    samples, together = _together(call, rows)
    scratch = call.query.new_empty(2, samples * together * call.num_key_value_groups * rows * keys)
    masks = _Masks(call, rows)
    query = call.query.unflatten(1, (groups, call.num_key_value_groups))
    for sample in _slices(batch, samples):
        last = max(masks.reach[sample])
        for group in _slices(groups, together):
            head = slice(group.start * call.num_key_value_groups, group.stop * call.num_key_value_groups)
            key, value = (_near(t[sample, group, :last], queries // rows) for t in (call.key, call.value))
            for row in _slices(queries, rows):
                end = max(1, min(last, call.offset + row.stop)) if call.causal else last
                shape = (sample.stop - sample.start, head.stop - head.start, row.stop - row.start, end)
                raw, exps = (s[: math.prod(shape)].view(shape) for s in scratch)
                _multiply(query[sample, group, :, row], key[:, :, :end], call.scale * LOG2_E, raw)
                masks.apply(raw, sample, head, row)
                base, total = _exponentiate(call, head, raw, exps)
                yield Tile(sample, head, row, slice(0, end), value[:, :, :end], raw, exps, base, total)


def _near(part: Tensor, reads: int) -> Tensor:
    """Keys or values without the gaps that other heads leave between them, if read often enough to repay it."""
    return part.contiguous() if reads >= NEAR else part


def _rows(call: AttentionCall) -> int:
    """Queries a tile: many multiply faster, but over few keys most of a causal tile would be future."""
    keys = call.key.shape[2]
    return min(call.query.shape[2], max(ROWS // 2, min(ROWS, keys // 4)) if call.causal else ROWS)


def _together(call: AttentionCall, rows: int) -> tuple[int, int]:
    """How many samples, and how many key/value heads of each, make a tile of about the wanted size."""
    batch, groups, keys, _ = call.key.shape
    budget = BYTES.get(call.query.device.type, BYTES["cpu"])
    heads = max(1, budget // (call.query.element_size() * rows * keys * call.num_key_value_groups))
    return (min(batch, heads // groups), groups) if heads >= groups else (1, heads)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _multiply(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """q·k of the heads that share a key/value head in one product, into `out`."""
    for q, k, o in zip(query, key, out, strict=True):
        flat = o.view(k.shape[0], -1, k.shape[1])
        torch.baddbmm(flat, q.flatten(1, 2), k.mT, beta=0, alpha=scale, out=flat)


def _exponentiate(call: AttentionCall, head: slice, raw: Tensor, exps: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum and the normaliser of each row, after `raw` was made relative to the one and `exps` was written."""
    base = raw.amax(-1, keepdim=True)
    if call.sink is not None:
        sink = (call.sink[head].to(raw.dtype) * LOG2_E)[:, None, None]
        base = torch.maximum(base, sink)
    if rows_may_be_blind(call):
        base.clamp_(min=BLIND)
    torch.exp2(raw.sub_(base), out=exps)
    total = exps.sum(-1, keepdim=True)
    if call.sink is not None:
        total.add_(torch.exp2(sink - base))
    if rows_may_be_blind(call):
        total.clamp_(min=1.0)
    return base, total


def rows_may_be_blind(call: AttentionCall) -> bool:
    """Whether some query may see no key at all."""
    return call.keep is not None or call.bias is not None or call.key_mask is not None or call.offset < 0


class _Masks:
    """What is done to the scores of a tile before they are exponentiated: soft-cap, bias, and hiding, in this order."""

    def __init__(self, call: AttentionCall, rows: int) -> None:
        self.call = call
        if call.causal:
            self.future = call.query.new_full((rows, rows), HIDDEN).triu_(1)
        batch, keys = call.key.shape[0], call.key.shape[2]
        self.reach = [keys] * batch
        """How many keys of each sample there are up to its last real one, at least one."""
        self.padded: list[bool] = []
        """Which samples have padding before that."""
        if call.key_mask is not None:
            reach = (call.key_mask * torch.arange(1, keys + 1, device=call.key.device)).amax(-1).clamp_(min=1)
            self.reach, self.padded = reach.tolist(), (call.key_mask.sum(-1) < reach).tolist()
            self.padding = call.query.new_zeros(call.key_mask.shape).masked_fill_(~call.key_mask, HIDDEN)[:, None, None]

    def apply(self, raw: Tensor, sample: slice, head: slice, row: slice) -> None:
        call, end = self.call, raw.shape[-1]
        if call.softcap is not None:
            cap = call.softcap * LOG2_E
            raw.div_(cap).tanh_().mul_(cap)
        if call.bias is not None:
            raw.add_(_part(call.bias, sample, head, row, end).to(raw.dtype).mul(LOG2_E).clamp_(min=HIDDEN))
        if call.keep is not None:
            raw.masked_fill_(~_part(call.keep, sample, head, row, end), HIDDEN)
        if any(self.padded[sample]) or len(set(self.reach[sample])) > 1:
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


def _part(mask: Tensor, sample: slice, head: slice, row: slice, end: int) -> Tensor:
    """The tile's part of a mask that may be of size 1 over samples, heads or queries."""
    index = tuple(s if size > 1 else slice(None) for s, size in zip((sample, head, row), mask.shape[:3], strict=True))
    return mask[(*index, slice(0, end))]
