"""Attention whose weights are a function of each score alone, f(s_ij), in tiles, with a backward pass that makes anew.

Such weights (sigmoid: Ramapuram et al. 2024; elu + 1: Gu et al. 2025) need no normaliser before they meet the values.
A tile is some samples × some heads × 64 queries × the keys those may see, in buffers that are used again: scores,
weights and their gradients replace each other in place. Tiles end at the diagonal, begin at the window, and what a
prefix opens beyond that is a tile of its own. With a normalisation, Σ_j A_ij is kept for each query, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.call import Call, Operation
from regard.attention.pieces import Piece, Pieces
from regard.attention.tiles import LOG2_E
from regard.attention.weightings import EPSILON

ROWS, KEYS = 64, 1024
BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
"""How large each of the two buffers of a tile is."""


@dataclass(frozen=True)
class Pointwise:
    """A weighting in place: scores become weights; a gradient of weights becomes one of scores, by the weights.

    `weigh(scores, room)` gets the scores times `unit`, and may use `room` of the same shape. `back(gradient, weights)`
    may overwrite both. Where a weight is zero, so is the gradient it leaves: hidden pairs.
    """

    weigh: Callable[[Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]
    unit: float = 1.0


def _sigmoid(scores: Tensor, _room: Tensor) -> Tensor:
    return scores.sigmoid_()


def _sigmoid_back(gradient: Tensor, weights: Tensor) -> Tensor:
    """The gradient g · A (1 − A)."""
    return torch.ops.aten.sigmoid_backward.grad_input(gradient, weights, grad_input=gradient)


def _elu(scores: Tensor, room: Tensor) -> Tensor:
    """max(s, 0) + exp(min(s, 0)), of s · log2(e): exp2 takes a fifth of the time of exp."""
    below = torch.clamp(scores, max=0, out=room).exp2_()
    return torch.add(below, scores.relu_(), alpha=1 / LOG2_E, out=scores)


def _elu_back(gradient: Tensor, weights: Tensor) -> Tensor:
    """The gradient g · min(A, 1): a weight exceeds 1 just where its score is positive; elsewhere it is exp(s)."""
    return gradient.mul_(weights.clamp_(max=1))


POINTWISE = {"sigmoid": Pointwise(_sigmoid, _sigmoid_back), "elu": Pointwise(_elu, _elu_back, unit=LOG2_E)}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pointwise(call: Call, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of a whole causal sequence whose weighting is one of `POINTWISE`, in the dtype of its queries."""
    plan = _Plan(
        weighting=POINTWISE[operation.weighting],
        normalised=operation.normalisation == "sum",
        scale=call.scale,
        shift=operation.shift,
        window=operation.window or call.key.shape[2],
        prefix=min(operation.prefix, call.key.shape[2]),
    )
    output: Tensor = _Function.apply(call.query, call.key, call.value, operation.slopes, plan)
    if operation.extra_value is None:
        return output
    return output + operation.extra_value.to(output.dtype)[:, None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is computed, beside the tensors."""

    weighting: Pointwise
    normalised: bool
    scale: float
    shift: float
    window: int
    prefix: int

    def tiles(self, length: int) -> Iterator[tuple[slice, slice]]:
        """Which queries meet which keys; all of them, and few others."""
        for first in range(0, length, ROWS):
            row = slice(first, min(first + ROWS, length))
            begin = max(0, first - self.window + 1)
            ranges = [(begin, row.stop)]
            if self.prefix:
                apart = begin > self.prefix
                ranges = [(0, self.prefix), *ranges] if apart else [(0, max(row.stop, self.prefix))]
            for start, stop in ranges:
                yield from ((row, slice(k, min(k + KEYS, stop))) for k in range(start, stop, KEYS))

    def edges(self, row: slice, key: slice) -> Iterator[slice]:
        """The keys of a tile that some of its queries may see and others not: future ones, and ones before a window."""
        future = slice(max(row.start + 1, self.prefix, key.start), min(row.stop, key.stop))
        past = slice(max(key.start, self.prefix), min(row.stop - self.window, key.stop))
        return (edge for edge in (future, past) if edge.start < edge.stop)


class _Work:
    """The tiles of one run: their buffers, which pairs meet in them, and how far apart these stand."""

    def __init__(self, plan: _Plan, pieces: Pieces, slopes: Tensor | None) -> None:
        self.plan, self.pieces, self.slopes = plan, pieces, slopes
        like, length = pieces.like, pieces.length
        at = torch.arange(length, device=like.device)
        self.tiles = []
        for row, key in plan.tiles(length):
            hidden = []
            for edge in plan.edges(row, key):
                gap = at[row, None] - at[edge]
                see = (gap >= 0) & (gap < plan.window)
                hidden.append((slice(edge.start - key.start, edge.stop - key.start), see[:, None].to(like.dtype)))
            self.tiles.append((row, key, hidden))
        widest = max((row.stop - row.start) * (key.stop - key.start) for row, key, _ in self.tiles)
        self.pieces.fit(BYTES.get(like.device.type, BYTES["cpu"]), widest)
        self.room = like.new_empty(2, pieces.together * widest * pieces.shares)
        self.shift = like.new_full((1, 1, 1), plan.shift * plan.weighting.unit)
        if slopes is not None:
            columns = torch.arange(length, -max(ROWS, plan.prefix), -1, device=like.device)
            relative = torch.arange(ROWS, device=like.device)[:, None] + columns
            self.distance = relative.clamp_(min=0).to(like.dtype)[:, None]

    def buffer(self, number: int, count: int, row: slice, key: slice) -> Tensor:
        """Room for a tile of `count` key heads: (head, query · share, key)."""
        shape = (count, (row.stop - row.start) * self.pieces.shares, key.stop - key.start)
        return self.room[number, : math.prod(shape)].view(shape)

    def gap(self, row: slice, key: slice) -> Tensor:
        """How far each key stands before each query, zero for later ones: (query, 1, key)."""
        zero = self.pieces.length - row.start
        return self.distance[: row.stop - row.start, :, zero + key.start : zero + key.stop]

    def shared(self, tile: Tensor) -> Tensor:
        """A tile with an axis for the query heads that share a key: (head, query, share, key)."""
        return tile.unflatten(1, (-1, self.pieces.shares))

    def weights(
        self, query: Tensor, key: Tensor, slopes: Tensor | None, row: slice, keys: slice, hidden: Any
    ) -> Tensor:
        """The weights of a tile, in the first buffer."""
        tile, room = (self.buffer(number, len(query), row, keys) for number in (0, 1))
        plan, unit = self.plan, self.plan.weighting.unit
        torch.baddbmm(self.shift, query, key.mT, beta=float(plan.shift != 0), alpha=plan.scale * unit, out=tile)
        if slopes is not None:
            self.shared(tile).addcmul_(self.gap(row, keys), slopes, value=-unit)
        tile = plan.weighting.weigh(tile, room)
        for edge, see in hidden:
            self.shared(tile)[..., edge].mul_(see)
        return tile

    def slopes_of(self, piece: Piece) -> Tensor | None:
        """The slopes of a piece's heads: (head, 1, share, 1)."""
        if self.slopes is None:
            return None
        sample, group = piece
        own = self.slopes.to(self.pieces.like.dtype).view(self.pieces.groups, -1)[group]
        return own.repeat(sample.stop - sample.start, 1)[:, None, :, None]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of some heads, and Σ_j A_ij + 10⁻⁸ of each query, by which it was divided if that is planned."""
        output = query.new_zeros(*query.shape[:2], value.shape[2])
        total = query.new_full((*query.shape[:2], 1), EPSILON) if self.plan.normalised else query.new_empty(0)
        for row, keys, hidden in self.tiles:
            at = self.rows(row)
            tile = self.weights(query[:, at], key[:, keys], slopes, row, keys, hidden)
            output[:, at].baddbmm_(tile, value[:, keys])
            if self.plan.normalised:
                total[:, at] += tile.sum(-1, keepdim=True)
        return (output.div_(total) if self.plan.normalised else output), total

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gradient: Tensor,
        less: Tensor | None,
        slopes: Tensor | None,
        of_slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values; those of the slopes are added to `of_slopes`.

        `less` is taken off the gradient of every weight in a query's row.
        """
        found = tuple(torch.zeros_like(t) for t in (query, key, value))
        of_query, of_key, of_value = found
        scale = self.plan.scale
        for row, keys, hidden in self.tiles:
            at = self.rows(row)
            q, k, g = query[:, at], key[:, keys], gradient[:, at]
            tile = self.weights(q, k, slopes, row, keys, hidden)
            of_value[:, keys].baddbmm_(tile.mT, g)
            back = self.buffer(1, len(query), row, keys)
            if less is None:
                torch.bmm(g, value[:, keys].mT, out=back)
            else:
                torch.baddbmm(less[:, at], g, value[:, keys].mT, out=back)
            back = self.plan.weighting.back(back, tile)
            of_query[:, at].baddbmm_(back, k)
            of_key[:, keys].baddbmm_(back.mT, q)
            if of_slopes is not None:
                parts = torch.mul(self.shared(back), self.gap(row, keys), out=self.shared(tile)).sum((1, 3))
                of_slopes -= parts.view(-1, *of_slopes.shape).sum(0)
        return of_query.mul_(scale), of_key.mul_(scale), of_value

    def rows(self, row: slice) -> slice:
        """Where queries stand when those of a shared key stand together."""
        return slice(row.start * self.pieces.shares, row.stop * self.pieces.shares)


class _Function(torch.autograd.Function):
    """The output, and the gradients of queries, keys, values and slopes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, plan: _Plan) -> Tensor:
        pieces = Pieces(query, key)
        batch, heads, length = query.shape[:3]
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        totals = pieces.like.new_empty(batch, heads, length, 1) if plan.normalised else None
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(plan, pieces, slopes)
            for piece in pieces:
                q, k, v = (pieces.take(t, piece) for t in (query, key, value))
                result, total = work.forward(q, k, v, work.slopes_of(piece))
                pieces.put(result, output, piece)
                if totals is not None:
                    pieces.put(total, totals, piece)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, slopes, output if plan.normalised else None, totals)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, output, totals = ctx.saved_tensors
        pieces = Pieces(query, key)
        found = tuple(torch.empty_like(t) for t in (query, key, value))
        of_slopes = None if slopes is None or not ctx.needs_input_grad[3] else torch.zeros_like(slopes)
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(ctx.plan, pieces, slopes)
            for piece in pieces:
                q, k, v, g = (pieces.take(t, piece) for t in (query, key, value, gradient))
                less = None
                if totals is not None:
                    total = pieces.take(totals, piece)
                    less = g.mul(pieces.take(output, piece)).sum(-1, keepdim=True).div_(total).neg_()
                    g = g / total
                into = None if of_slopes is None else of_slopes.view(pieces.groups, -1)[piece[1]]
                for whole, part in zip(
                    found, work.backward(q, k, v, g, less, work.slopes_of(piece), into), strict=True
                ):
                    pieces.put(part, whole, piece)
        return (*found, of_slopes, None)
