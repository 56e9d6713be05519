"""Attention in tiles of its matrix, with a backward pass that makes them anew: nothing of query × key entries is kept.

A tile is some samples × some heads × 64 queries × the keys those may see, in buffers that are used again: scores,
weights and their gradients replace each other in place. Tiles end at the diagonal, begin at the window, and hold what a
prefix opens beyond that as a stretch of its own. Of a row that is normalised, two numbers are kept.

Keys are taken backwards: the pairs of one distance are the antidiagonals of a tile, so that a bias which depends on the
distance alone is a view of one row of numbers, with both strides 1, and its gradient a sum over a skewed view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.call import AttentionCall, Operation
from regard.attention.fused import column_score
from regard.attention.row_chunks import RowChunk, RowChunks
from regard.attention.span import AttentionSpan, Tile
from regard.attention.tiles import HIDDEN

ROWS, KEYS = 64, 1024
"""Queries in a tile, and the most keys of one, where a row need not be whole."""
BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
"""How large each of the two buffers of a tile is."""


def unchanged(weights: Tensor, _room: Tensor) -> Tensor:
    """The weights, as they meet the values."""
    return weights


def total(weights: Tensor, _room: Tensor) -> Tensor:
    """Σ_j A_ij of each row."""
    return weights.sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """A weighting in place: scores become weights; a gradient of weights becomes one of scores.

    `weigh(scores, room, base)` gets the scores times `unit`, less the `base` of their row if there is a `floor`: the
    row's maximum, no less than that. It may overwrite the scores and the `room` of their shape. So may, the room alone,
    `total`, by which a row is divided with `epsilon` added, and `met`: what meets the values, if not the weights.
    `back(gradient, weights, less, base)` may overwrite its first two; in the gradient of what meets the values stands
    `less`, what the total of the row takes off, `times` times. Hidden scores become `hide(scores, mark)`, `marks` being
    those of seen and of hidden pairs; `leaks` says that `back` leaves such pairs a gradient that is not theirs.
    """

    weigh: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    back: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    total: Callable[[Tensor, Tensor], Tensor] = total
    met: Callable[[Tensor, Tensor], Tensor] = unchanged
    hide: Callable[[Tensor, Tensor], Tensor] = Tensor.add_
    marks: tuple[float, float] = (0.0, HIDDEN)
    leaks: bool = False
    unit: float = 1.0
    floor: float | None = None
    epsilon: float = 0.0
    times: int = 1


@torch.compiler.disable  # type: ignore[untyped-decorator]
def recomputed(
    call: AttentionCall, operation: Operation, weighting: Tiled, *, normalised: bool
) -> Float[Tensor, "batch head query value_width"]:
    """The output of a whole causal sequence under a weighting, in the dtype of its queries."""
    plan = _Plan(
        weighting=weighting,
        normalised=normalised,
        scale=call.scale,
        shift=operation.shift,
        window=operation.window or call.key.shape[2],
        prefix=min(operation.prefix, call.key.shape[2]),
    )
    column = column_score(call, operation)
    if column is not None:
        column = column + operation.shift
    output, share = _Function.apply(call.query, call.key, call.value, _table(call, operation), column, plan)
    if operation.extra_value is None:
        return output
    value = operation.extra_value[:, None]
    beside = value if share is None or operation.extra_key is None else share * value
    return output + beside.to(output.dtype)


def _table(call: AttentionCall, operation: Operation) -> Float[Tensor, "head distance"] | None:
    """What is added to the score of a pair, by its distance, in float32 at least; None for nothing."""
    heads, length = call.query.shape[1:3]
    wide = torch.promote_types(call.query.dtype, torch.float32)
    table = None
    if operation.distance is not None:
        table = operation.distance[:, :length].to(wide).expand(heads, length)
    if operation.slopes is not None:
        at = torch.arange(length, device=operation.slopes.device, dtype=wide)
        slope = -operation.slopes.to(wide)[:, None] * at
        table = slope if table is None else table + slope
    return table


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is computed, beside the tensors."""

    weighting: Tiled
    normalised: bool
    scale: float
    shift: float
    window: int
    prefix: int


@dataclass(frozen=True)
class _Heads:
    """Queries, keys (backwards) and values of some heads; the scores of the column beside the keys, and the biases."""

    query: Tensor
    key: Tensor
    value: Tensor
    column: Tensor | None
    line: Tensor | None


class _Work:
    """The tiles of one run: their buffers, which pairs meet in them, and what their distance adds to their score."""

    def __init__(self, plan: _Plan, pieces: RowChunks, table: Tensor | None) -> None:
        self.plan, self.pieces, self.weighting = plan, pieces, plan.weighting
        like, length = pieces.like, pieces.length
        reach = AttentionSpan(length=length, window=plan.window, prefix=plan.prefix)
        self.tiles = reach.tiles(ROWS, KEYS if self.weighting.floor is None else None)
        widest = max((tile.row.stop - tile.row.start) * tile.width for tile in self.tiles)
        pieces.fit(BYTES.get(like.device.type, BYTES["cpu"]), widest)
        skewed = ROWS * min(ROWS, length) if table is not None else 0
        self.room = like.new_empty(2, pieces.together * (widest + skewed) * pieces.shares)
        self.shift = like.new_full((1, 1, 1), plan.shift * self.weighting.unit)
        gap = torch.arange(-length, length, device=like.device)
        seen, hidden = (like.new_full((), mark) for mark in self.weighting.marks)
        self.marks = torch.where((gap >= 0) & (gap < plan.window), seen, hidden).view(1, 1, -1)
        self.line = None
        if table is not None:
            numbers = table.to(like.dtype) * self.weighting.unit
            numbers = torch.cat([numbers[:, :1].expand(-1, length), numbers], dim=1)
            self.line = numbers.view(pieces.groups, pieces.shares, -1)

    def buffer(self, number: int, count: int, rows: slice, width: int) -> Tensor:
        """Room for a tile of `count` key heads: (head, query · share, key)."""
        shape = (count, rows.stop - rows.start, width)
        return self.room[number, : math.prod(shape)].view(shape)

    def rows(self, row: slice) -> slice:
        """Where queries stand when those of a shared key stand together."""
        return slice(row.start * self.pieces.shares, row.stop * self.pieces.shares)

    def by_head(self, part: Tensor, line: Tensor) -> Tensor:
        """A part of a tile as (sample, head, query, share, key), the heads those of a line or all."""
        heads = len(line) if len(line) > 1 else 1
        return part.unflatten(1, (-1, self.pieces.shares)).unflatten(0, (-1, heads))

    def along(self, line: Tensor, row: slice, keys: slice) -> Tensor:
        """What a line, which has a number for each distance from −T to T − 1, has for pairs: (head, query, share, key).

        Query i stands i − (T − 1 − j) behind the key that is j-th from the end: its number is that at i + j + 1.
        """
        heads, shares, numbers = line.shape
        shape = (heads, row.stop - row.start, shares, keys.stop - keys.start)
        return line.as_strided(
            shape, (shares * numbers, 1, numbers, 1), line.storage_offset() + row.start + keys.start + 1
        )

    def scores(self, heads: _Heads, tile: Tile) -> Tensor:
        """The scores of a tile in units of its weighting, in the first buffer."""
        at, weighting, plan = self.rows(tile.row), self.weighting, self.plan
        room = self.buffer(0, len(heads.query), at, tile.width)
        query, scale = heads.query[:, at], plan.scale * weighting.unit
        for stretch in tile.stretches:
            part, key = room[..., stretch.columns], heads.key[:, stretch.keys].mT
            torch.baddbmm(self.shift, query, key, beta=float(plan.shift != 0), alpha=scale, out=part)
            if heads.line is not None:
                self.by_head(part, heads.line).add_(self.along(heads.line, tile.row, stretch.keys))
        self.hide(room, tile, weighting.hide)
        return room

    def hide(self, room: Tensor, tile: Tile, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Mark the pairs of a tile that do not meet."""
        for stretch in tile.stretches:
            for edge in stretch.edges:
                part = self.by_head(room[..., stretch.inside(edge)], self.marks)
                how(part, self.along(self.marks, tile.row, edge))

    def heads(self, piece: RowChunk, query: Tensor, key: Tensor, value: Tensor, column: Tensor | None) -> _Heads:
        """Those of one piece."""
        q, k, v = (self.pieces.take(t, piece) for t in (query, key, value))
        c = None if column is None else self.pieces.take(column[..., None], piece) * self.weighting.unit
        return _Heads(q, k.flip(1), v.flip(1), c, None if self.line is None else self.line[piece[1]])

    def weights(self, heads: _Heads, tile: Tile, bases: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The weights of a tile before they meet the values, room of their shape, and the base of each row."""
        at, scores = self.rows(tile.row), self.scores(heads, tile)
        room, base = self.buffer(1, len(scores), at, tile.width), None
        if self.weighting.floor is not None:
            base = bases[:, at]
            scores.sub_(base)
        return self.weighting.weigh(scores, room, base), room, base

    def forward(self, heads: _Heads) -> tuple[Tensor, Tensor, Tensor | None]:
        """The output of some heads, the base and the total of each query, and the share of the column."""
        weighting, normalised = self.weighting, self.plan.normalised
        output = heads.query.new_zeros(*heads.query.shape[:2], heads.value.shape[2])
        kept = heads.query.new_zeros(*heads.query.shape[:2], 2)
        bases, totals = kept[..., :1], kept[..., 1:]
        for tile in self.tiles:
            at = self.rows(tile.row)
            scores, room, base = self.scores(heads, tile), self.buffer(1, len(output), at, tile.width), None
            if weighting.floor is not None:
                base = scores.amax(-1, keepdim=True).clamp_(min=weighting.floor)
                base = base if heads.column is None else torch.maximum(base, heads.column[:, at])
                bases[:, at] = base
                scores.sub_(base)
            weights = weighting.weigh(scores, room, base)
            if normalised:
                totals[:, at] += weighting.total(weights, room)
            met = weighting.met(weights, room)
            for stretch in tile.stretches:
                output[:, at].baddbmm_(met[..., stretch.columns], heads.value[:, stretch.keys])
        share = None
        if heads.column is not None:
            beside, room = self.beside(heads.column, bases), torch.empty_like(heads.column)
            totals += weighting.total(beside, room)
            share = weighting.met(beside, room)
        if normalised:
            totals += weighting.epsilon
            output.div_(totals)
            share = share if share is None else share.div_(totals)
        return output, kept, share

    def beside(self, column: Tensor, bases: Tensor) -> Tensor:
        """What the column beside the keys weighs."""
        base = None if self.weighting.floor is None else bases
        scores = column.clone() if base is None else column - base
        return self.weighting.weigh(scores, torch.empty_like(scores), base)

    def beside_back(self, column: Tensor, gradient: Tensor, less: Tensor | None, bases: Tensor) -> Tensor:
        """The gradient of the scores of the column, of one of what it weighs."""
        if less is not None:
            gradient = gradient.add(less, alpha=self.weighting.times)
        return self.weighting.back(gradient, self.beside(column, bases), less, bases)

    def backward(
        self, heads: _Heads, gradient: Tensor, less: Tensor | None, bases: Tensor, of_line: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values; those of the biases are added to `of_line`."""
        found = tuple(torch.zeros_like(t) for t in (heads.query, heads.key, heads.value))
        of_query, of_key, of_value = found
        weighting, scale = self.weighting, self.plan.scale
        for tile in self.tiles:
            at = self.rows(tile.row)
            q, g = heads.query[:, at], gradient[:, at]
            off = None if less is None else less[:, at]
            weights, room, base = self.weights(heads, tile, bases)
            met = weighting.met(weights, room)
            for stretch in tile.stretches:
                of_value[:, stretch.keys].baddbmm_(met[..., stretch.columns].mT, g)
            start, times = (self.shift, 0) if off is None else (off, weighting.times)
            for stretch in tile.stretches:
                part, value = room[..., stretch.columns], heads.value[:, stretch.keys].mT
                torch.baddbmm(start, g, value, beta=times, out=part)
            back = weighting.back(room, weights, off, base)
            if weighting.leaks:
                self.hide(back, tile, Tensor.mul_)
            for stretch in tile.stretches:
                part = back[..., stretch.columns]
                of_query[:, at].baddbmm_(part, heads.key[:, stretch.keys])
                of_key[:, stretch.keys].baddbmm_(part.mT, q)
                if of_line is not None:
                    self.gather(part, tile.row, stretch.keys, of_line)
        return of_query.mul_(scale), of_key.mul_(scale).flip(1), of_value.flip(1)

    def gather(self, part: Tensor, row: slice, keys: slice, of_line: Tensor) -> None:
        """Add the sums of a tile's antidiagonals to the gradient of a line; the first buffer is overwritten.

        With zeros behind each row, seen with rows one shorter than they are, the antidiagonals are columns.
        """
        shares, count = self.pieces.shares, len(part)
        rows, width = row.stop - row.start, keys.stop - keys.start
        wide = width + rows - 1
        room = self.buffer(0, count, self.rows(row), wide)
        room[..., :width] = part
        room[..., width:] = 0
        shape, strides = (count, rows, shares, wide), (rows * shares * wide, shares * wide - 1, wide, 1)
        sums = room.as_strided(shape, strides, room.storage_offset()).sum(1)
        start = row.start + keys.start + 1
        of_line[..., start : start + wide] += sums.view(-1, *of_line.shape[:2], wide).sum(0)


class _Function(torch.autograd.Function):
    """The output, and the share of a column beside the keys; gradients of the tensors, the biases and its scores."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        column: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor | None]:
        pieces = RowChunks(query, key)
        batch, heads, length = query.shape[:3]
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        kept = pieces.like.new_empty(batch, heads, length, 2) if plan.normalised else None
        share = None if column is None else pieces.like.new_empty(batch, heads, length, 1)
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(plan, pieces, table)
            for piece in pieces:
                parts = work.forward(work.heads(piece, query, key, value, column))
                for part, whole in zip(parts, (output, kept, share), strict=True):
                    if part is not None and whole is not None:
                        pieces.put(part, whole, piece)
        ctx.plan = plan
        rest = (output, share) if plan.normalised else (None, None)
        ctx.save_for_backward(query, key, value, table, column, kept, *rest)
        return output, share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_share: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, table, column, kept, output, share = ctx.saved_tensors
        pieces = RowChunks(query, key)
        found = tuple(torch.empty_like(t) for t in (query, key, value))
        of_column = None if column is None else torch.empty_like(column)
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(ctx.plan, pieces, table)
            of_line = None if work.line is None or not ctx.needs_input_grad[3] else torch.zeros_like(work.line)
            for piece in pieces:
                heads, g = work.heads(piece, query, key, value, column), pieces.take(gradient, piece)
                s = None if column is None or of_share is None else pieces.take(of_share, piece)
                less, bases = None, g
                if kept is not None:
                    bases, totals = pieces.take(kept, piece).split(1, dim=-1)
                    less = g.mul(pieces.take(output, piece)).sum(-1, keepdim=True)
                    if s is not None:
                        less += s * pieces.take(share, piece)
                        s = s / totals
                    less, g = less.div_(totals).neg_(), g / totals
                into = None if of_line is None else of_line[piece[1]]
                for whole, part in zip(found, work.backward(heads, g, less, bases, into), strict=True):
                    pieces.put(part, whole, piece)
                if heads.column is not None and s is not None and of_column is not None:
                    pieces.put(work.beside_back(heads.column, s, less, bases), of_column[..., None], piece)
        return (*found, None if of_line is None else _folded(of_line.flatten(0, 1)), of_column, None)


def _folded(of_line: Tensor) -> Tensor:
    """The gradient of a table, whose first number is that of all later keys: (head, distance)."""
    later, table = of_line.chunk(2, dim=1)
    table[:, 0] += later.sum(1)
    return table
