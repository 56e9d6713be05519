"""Attention in cache-sized tiles: exact output and statistics in one pass, never more than a tile of the matrix.

A tile is some heads × 64 queries × all keys those may see, about a megabyte, in two buffers that are used again for
every tile. Scores are kept in base 2 (log2(e) goes into the product's scale) because exp2 is the cheaper instruction,
and a tile is never divided by its normaliser: that goes into the small factors beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.attention.call import Call

LOG2_E = math.log2(math.e)
HIDDEN = -1e30
"""The score of a masked pair: its exponential is zero, and unlike −inf it may be multiplied by that zero."""
ROWS = 64
BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


@dataclass(slots=True)
class Tile:
    """Heads × queries × keys of one sample's matrix, before normalisation: `weights = exps · inverse`.

    `scores` are base-2 logs relative to the row's maximum; `exps = 2**scores`; both are overwritten by the next tile.
    `inverse` is 0 for a row that sees nothing. `base` (the maximum) and `total` (the normaliser) give the log-sum-exp.
    """

    batch: int
    heads: slice
    queries: slice
    keys: slice
    scores: Tensor
    exps: Tensor
    base: Tensor
    total: Tensor
    inverse: Tensor

    @property
    def at_queries(self) -> tuple[int, slice, slice]:
        """Where this tile's rows stand in a (batch, head, query) tensor."""
        return self.batch, self.heads, self.queries

    @property
    def at_keys(self) -> tuple[int, slice, slice]:
        """Where this tile's columns stand in a (batch, head, key) tensor."""
        return self.batch, self.heads, self.keys


def tiles(call: Call) -> Iterator[Tile]:
    """Every tile of the call's matrix, sample by sample, some heads at a time, from the first query to the last."""
    batch, _, queries, _ = call.query.shape
    groups, keys = call.key.shape[1:3]
    size = call.query.element_size()
    together = max(1, BYTES.get(call.query.device.type, BYTES["cpu"]) // (size * ROWS * keys * call.shares))
    together = min(groups, together)
    scratch = call.query.new_empty(2, together * call.shares * min(ROWS, queries) * keys)
    masks = _Masks(call)
    key = call.key.mT
    for b in range(batch):
        query = call.query[b].unflatten(0, (groups, call.shares))
        for g in range(0, groups, together):
            stop = min(g + together, groups)
            head = slice(g * call.shares, stop * call.shares)
            for start in range(0, queries, ROWS):
                row = slice(start, min(start + ROWS, queries))
                end = max(1, min(keys, call.offset + row.stop)) if call.causal else keys
                shape = (head.stop - head.start, row.stop - start, end)
                raw, exps = (s[: math.prod(shape)].view(shape) for s in scratch)
                _multiply(query[g:stop, :, row], key[b, g:stop, :, :end], call.scale * LOG2_E, raw)
                masks.apply(raw, b, head, row)
                yield _normalise(call, b, head, row, raw, exps)


def _multiply(query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
    """q·k of the heads that share a key/value head in one product, into `out`."""
    flat = out.view(key.shape[0], -1, key.shape[-1])
    torch.baddbmm(flat, query.flatten(1, 2), key, beta=0, alpha=scale, out=flat)


def _normalise(call: Call, b: int, head: slice, row: slice, raw: Tensor, exps: Tensor) -> Tile:
    base = raw.amax(-1, keepdim=True).clamp_(min=HIDDEN / 2)
    if call.sink is not None:
        sink = (call.sink[head].to(raw.dtype) * LOG2_E)[:, None, None]
        base = torch.maximum(base, sink)
    raw.sub_(base)
    torch.exp2(raw, out=exps)
    total = exps.sum(-1, keepdim=True)
    if call.sink is not None:
        total.add_(torch.exp2(sink - base))
    inverse = total.reciprocal()
    if masked_rows_possible(call):
        inverse.masked_fill_(total == 0, 0.0)
    return Tile(b, head, row, slice(0, raw.shape[-1]), raw, exps, base, total, inverse)


def masked_rows_possible(call: Call) -> bool:
    """Whether some query may see no key at all."""
    return call.keep is not None or call.bias is not None or call.key_real is not None or call.offset < 0


class _Masks:
    """What is done to the scores of a tile before they are exponentiated: soft-cap, bias, and hiding, in this order."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shape = (call.query.shape[0], call.query.shape[1])
        device, dtype = call.query.device, call.query.dtype
        self.future = torch.zeros(ROWS, ROWS, dtype=dtype, device=device)
        self.future.masked_fill_(torch.ones(ROWS, ROWS, dtype=torch.bool, device=device).triu_(1), HIDDEN)
        self.padding = None
        if call.key_real is not None:
            self.padding = torch.zeros(call.key_real.shape, dtype=dtype, device=device)
            self.padding.masked_fill_(~call.key_real, HIDDEN)

    def apply(self, raw: Tensor, b: int, head: slice, row: slice) -> None:
        call, end = self.call, raw.shape[-1]
        if call.softcap is not None:
            cap = call.softcap * LOG2_E
            raw.div_(cap).tanh_().mul_(cap)
        if call.bias is not None:
            raw.add_(self._part(call.bias, b, head, row, end).to(raw.dtype).mul(LOG2_E).clamp_(min=HIDDEN))
        if call.keep is not None:
            raw.masked_fill_(~self._part(call.keep, b, head, row, end), HIDDEN)
        if self.padding is not None:
            raw.add_(self.padding[b, :end])
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
            raw[:, :skipped].fill_(HIDDEN)
            diagonal, height = diagonal[:, skipped:], height - skipped
        diagonal.add_(self.future[:height, :width])

    def _part(self, mask: Tensor, b: int, head: slice, row: slice, end: int) -> Tensor:
        """The tile's part of a mask that may be of size 1 over samples, heads or queries."""
        sample = mask[b if mask.shape[0] > 1 else 0]
        if sample.shape[0] > 1:
            sample = sample[head]
        if sample.shape[1] > 1:
            sample = sample[:, row]
        return sample[..., :end]
