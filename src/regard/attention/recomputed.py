"""Attention in tiles of its matrix, which the backward pass computes again: no query × key entries are kept.

A tile is some samples × some heads × 64 queries × the keys those may see; scores, weights and their gradients replace
each other in its buffers. Keys are in reverse order, so that pairs of one distance are antidiagonals: a bias by
distance is a view of one row of numbers with both strides 1, and its gradient a sum over a skewed view.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall, Operation
from regard.attention.chunks import AttentionSpan, RowChunk, RowChunks, Tile
from regard.attention.fused import column_score
from regard.attention.gradients import first_order
from regard.attention.inplace_weightings import INPLACE_WEIGHTINGS

ROWS, KEYS = 64, 1024
"""Queries in a tile, and most keys of a row that need not be whole."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def recomputed(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of a whole causal sequence, in the dtype of its queries, by one of `INPLACE_WEIGHTINGS`."""
    column = column_score(call, operation)
    if column is not None:
        column = column + operation.shift
    bias, fixed = _distance_bias(call, operation), operation.detach()
    output, share = _Recomputed.apply(call.query, call.key, call.value, bias, column, fixed, call.scale)
    if operation.extra_value is None:
        return output
    value = operation.extra_value[:, None]
    extra = value if share is None or operation.extra_key is None else share * value
    return output + extra.to(output.dtype)


def _distance_bias(call: AttentionCall, operation: Operation) -> Float[Tensor, "head distance"] | None:
    """Return what is added to the score of a pair by its distance, in float32 at least; None for nothing."""
    heads, length = call.query.shape[1:3]
    acc_dtype = torch.promote_types(call.query.dtype, torch.float32)
    bias = None
    if operation.distance is not None:
        bias = operation.distance[:, :length].to(acc_dtype).expand(heads, length)
    if operation.slopes is not None:
        positions = torch.arange(length, device=operation.slopes.device, dtype=acc_dtype)
        slopes = -operation.slopes.to(acc_dtype)[:, None] * positions
        bias = slopes if bias is None else bias + slopes
    return bias


class _Heads(NamedTuple):
    """Queries, keys (reversed) and values of some heads; scores of the column beside the keys, and biases."""

    query: Tensor
    key: Tensor
    value: Tensor
    column: Tensor | None
    line: Tensor | None


class _Workspace:
    """The tiles of one run; a *line* has a number for each distance, −T to T − 1: (group, queries_per_key, 2T)."""

    def __init__(self, operation: Operation, scale: float, chunks: RowChunks, distance_bias: Tensor | None) -> None:
        self.chunks, self.scale, self.weighting = chunks, scale, INPLACE_WEIGHTINGS[operation.weighting]
        self.normalised = self.weighting.floor is not None or operation.normalisation == "sum"
        like, length = chunks.like, chunks.length
        window, prefix = operation.window or length, min(operation.prefix, length)
        span = AttentionSpan(length=length, window=window, prefix=prefix)
        self.tiles = span.tiles(ROWS, KEYS if self.weighting.floor is None else None)
        widest = max((tile.row.stop - tile.row.start) * tile.width for tile in self.tiles)
        chunks.fit(widest)
        skewed = ROWS * min(ROWS, length) if distance_bias is not None else 0
        self.buffers = like.new_empty(2, chunks.num_groups * (widest + skewed) * chunks.queries_per_key)
        self.has_shift = operation.shift != 0
        self.shift = like.new_full((1, 1, 1), operation.shift * self.weighting.unit)
        distance = torch.arange(-length, length, device=like.device)
        seen, hidden = (like.new_full((), mark) for mark in self.weighting.marks)
        self.marks = torch.where((distance >= 0) & (distance < window), seen, hidden).view(1, 1, -1)
        self.line = None
        if distance_bias is not None:
            bias = distance_bias.to(like.dtype) * self.weighting.unit
            bias = torch.cat([bias[:, :1].expand(-1, length), bias], dim=1)
            self.line = bias.view(chunks.groups, chunks.queries_per_key, -1)

    def buffer(self, index: int, groups: int, rows: slice, width: int) -> Tensor:
        """Return a buffer for a tile of so many key/value heads: (group, row, key)."""
        shape = (groups, rows.stop - rows.start, width)
        return self.buffers[index, : math.prod(shape)].view(shape)

    def rows(self, queries: slice) -> slice:
        """Return the rows of some queries: those that share a key stand together."""
        return slice(queries.start * self.chunks.queries_per_key, queries.stop * self.chunks.queries_per_key)

    def by_head(self, part: Tensor, line: Tensor) -> Tensor:
        """View a part of a tile as (sample, group, query, query head, key), with the groups of a line or all."""
        groups = len(line) if len(line) > 1 else 1
        return part.unflatten(1, (-1, self.chunks.queries_per_key)).unflatten(0, (-1, groups))

    def along(self, line: Tensor, queries: slice, keys: slice) -> Tensor:
        """View a line at the distances of some pairs: (group, query, query head, key).

        The key that is j-th from the end stands i − (T − 1 − j) before query i: its number is that at i + j + 1.
        """
        groups, heads, size = line.shape
        shape = (groups, queries.stop - queries.start, heads, keys.stop - keys.start)
        offset = line.storage_offset() + queries.start + keys.start + 1
        return line.as_strided(shape, (heads * size, 1, size, 1), offset)

    def scores(self, heads: _Heads, tile: Tile) -> Tensor:
        """Return the scores of a tile, times the unit of the weighting, in the first buffer."""
        rows, weighting = self.rows(tile.row), self.weighting
        buffer = self.buffer(0, len(heads.query), rows, tile.width)
        query, scale = heads.query[:, rows], self.scale * weighting.unit
        for stretch in tile.stretches:
            part, key = buffer[..., stretch.columns], heads.key[:, stretch.keys].mT
            torch.baddbmm(self.shift, query, key, beta=float(self.has_shift), alpha=scale, out=part)
            if heads.line is not None:
                self.by_head(part, heads.line).add_(self.along(heads.line, tile.row, stretch.keys))
        self.hide(buffer, tile, weighting.hide)
        return buffer

    def hide(self, buffer: Tensor, tile: Tile, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Write the marks of pairs into a tile, where some do not meet."""
        for stretch in tile.stretches:
            for edge in stretch.edges:
                part = self.by_head(buffer[..., stretch.columns_of(edge)], self.marks)
                write(part, self.along(self.marks, tile.row, edge))

    def heads(self, chunk: RowChunk, query: Tensor, key: Tensor, value: Tensor, column: Tensor | None) -> _Heads:
        q, k, v = (self.chunks.take(tensor, chunk) for tensor in (query, key, value))
        c = None if column is None else self.chunks.take(column[..., None], chunk) * self.weighting.unit
        return _Heads(q, k.flip(1), v.flip(1), c, None if self.line is None else self.line[chunk[1]])

    def weights(
        self, heads: _Heads, tile: Tile, bases: Tensor, *, is_first: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the weights of a tile, a buffer of their shape, and the base of each row, found the first time."""
        rows, scores, base = self.rows(tile.row), self.scores(heads, tile), None
        buffer = self.buffer(1, len(scores), rows, tile.width)
        if self.weighting.floor is not None:
            if is_first:
                top = scores.amax(-1, keepdim=True).clamp_(min=self.weighting.floor)
                bases[:, rows] = top if heads.column is None else torch.maximum(top, heads.column[:, rows])
            base = bases[:, rows]
            scores.sub_(base)
        return self.weighting.weigh(scores, buffer, base), buffer, base

    def forward(self, heads: _Heads) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output of some heads, the base and the total of each row, and the share of the column."""
        weighting, normalised = self.weighting, self.normalised
        output = heads.query.new_zeros(*heads.query.shape[:2], heads.value.shape[2])
        row_stats = heads.query.new_zeros(*heads.query.shape[:2], 2)
        bases, totals = row_stats[..., :1], row_stats[..., 1:]
        for tile in self.tiles:
            rows = self.rows(tile.row)
            weights, buffer, _ = self.weights(heads, tile, bases, is_first=True)
            if normalised:
                totals[:, rows] += weighting.total(weights, buffer)
            value_weights = weighting.value_weights(weights, buffer)
            for stretch in tile.stretches:
                output[:, rows].baddbmm_(value_weights[..., stretch.columns], heads.value[:, stretch.keys])
        share = None
        if heads.column is not None:
            column, buffer = self.column_weights(heads.column, bases), torch.empty_like(heads.column)
            totals += weighting.total(column, buffer)
            share = weighting.value_weights(column, buffer)
        if normalised:
            totals += weighting.epsilon
            output.div_(totals)
            share = share if share is None else share.div_(totals)
        return output, row_stats, share

    def column_weights(self, column: Tensor, bases: Tensor) -> Tensor:
        """Return the weights of the column beside the keys, of its scores."""
        base = None if self.weighting.floor is None else bases
        scores = column.clone() if base is None else column - base
        return self.weighting.weigh(scores, torch.empty_like(scores), base)

    def column_backward(self, column: Tensor, grad: Tensor, less: Tensor | None, bases: Tensor) -> Tensor:
        """Return the gradient of the column's scores, from that of its share."""
        if less is not None:
            grad = grad.add(less, alpha=self.weighting.less_factor)
        return self.weighting.backward(grad, self.column_weights(column, bases), less, bases)

    def backward(
        self, heads: _Heads, grad: Tensor, less: Tensor | None, bases: Tensor, line_grad: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; add those of the biases to `line_grad`."""
        query_grad, key_grad, value_grad = (torch.zeros_like(t) for t in (heads.query, heads.key, heads.value))
        weighting, scale = self.weighting, self.scale
        for tile in self.tiles:
            rows = self.rows(tile.row)
            q, g = heads.query[:, rows], grad[:, rows]
            row_less = None if less is None else less[:, rows]
            weights, buffer, base = self.weights(heads, tile, bases)
            value_weights = weighting.value_weights(weights, buffer)
            for stretch in tile.stretches:
                value_grad[:, stretch.keys].baddbmm_(value_weights[..., stretch.columns].mT, g)
            start, factor = (self.shift, 0) if row_less is None else (row_less, weighting.less_factor)
            for stretch in tile.stretches:
                part, value = buffer[..., stretch.columns], heads.value[:, stretch.keys].mT
                torch.baddbmm(start, g, value, beta=factor, out=part)
            score_grad = weighting.backward(buffer, weights, row_less, base)
            if weighting.leaks:
                self.hide(score_grad, tile, Tensor.mul_)
            for stretch in tile.stretches:
                part = score_grad[..., stretch.columns]
                query_grad[:, rows].baddbmm_(part, heads.key[:, stretch.keys])
                key_grad[:, stretch.keys].baddbmm_(part.mT, q)
                if line_grad is not None:
                    self.add_line_grad(part, tile.row, stretch.keys, line_grad)
        return query_grad.mul_(scale), key_grad.mul_(scale).flip(1), value_grad.flip(1)

    def add_line_grad(self, part: Tensor, queries: slice, keys: slice, line_grad: Tensor) -> None:
        """Add the sums of a tile's antidiagonals to the gradient of a line; overwrite the first buffer.

        With zeros behind each row, viewed with rows one shorter than they are, antidiagonals are columns.
        """
        heads, groups = self.chunks.queries_per_key, len(part)
        rows, width = queries.stop - queries.start, keys.stop - keys.start
        padded = width + rows - 1
        buffer = self.buffer(0, groups, self.rows(queries), padded)
        buffer[..., :width] = part
        buffer[..., width:] = 0
        shape, strides = (groups, rows, heads, padded), (rows * heads * padded, heads * padded - 1, padded, 1)
        sums = buffer.as_strided(shape, strides, buffer.storage_offset()).sum(1)
        start = queries.start + keys.start + 1
        line_grad[..., start : start + padded] += sums.view(-1, *line_grad.shape[:2], padded).sum(0)


class _Recomputed(torch.autograd.Function):
    """The output, and the share of the column beside the keys; gradients of the tensors, biases and its scores."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        query, key, value, distance_bias, column, operation, scale = inputs
        chunks = RowChunks(query, key)
        batch, heads, length = query.shape[:3]
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        share = None if column is None else chunks.like.new_empty(batch, heads, length, 1)
        with torch.autocast(query.device.type, enabled=False):
            workspace = _Workspace(operation, scale, chunks, distance_bias)
            row_stats = chunks.like.new_empty(batch, heads, length, 2) if workspace.normalised else None
            for chunk in chunks:
                parts = workspace.forward(workspace.heads(chunk, query, key, value, column))
                for part, tensor in zip(parts, (output, row_stats, share), strict=True):
                    if part is not None and tensor is not None:
                        chunks.put(part, tensor, chunk)
        ctx.operation, ctx.scale = operation, scale
        saved = (None, None) if row_stats is None else (output, share)
        ctx.save_for_backward(query, key, value, distance_bias, column, row_stats, *saved)
        return output, share

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, share_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, distance_bias, column, row_stats, output, share = ctx.saved_tensors
        chunks = RowChunks(query, key)
        grads = tuple(torch.empty_like(t) for t in (query, key, value))
        column_grad = None if column is None else torch.empty_like(column)
        with torch.autocast(query.device.type, enabled=False):
            workspace = _Workspace(ctx.operation, ctx.scale, chunks, distance_bias)
            line = workspace.line if ctx.needs_input_grad[3] else None
            line_grad = None if line is None else torch.zeros_like(line)
            for chunk in chunks:
                heads, g = workspace.heads(chunk, query, key, value, column), chunks.take(grad, chunk)
                s = None if column is None or share_grad is None else chunks.take(share_grad, chunk)
                less, bases = None, g
                if row_stats is not None:
                    bases, totals = chunks.take(row_stats, chunk).split(1, dim=-1)
                    less = g.mul(chunks.take(output, chunk)).sum(-1, keepdim=True)
                    if s is not None:
                        less += s * chunks.take(share, chunk)
                        s = s / totals
                    less, g = less.div_(totals).neg_(), g / totals
                chunk_line = None if line_grad is None else line_grad[chunk[1]]
                for tensor, part in zip(grads, workspace.backward(heads, g, less, bases, chunk_line), strict=True):
                    chunks.put(part, tensor, chunk)
                if heads.column is not None and s is not None and column_grad is not None:
                    part = workspace.column_backward(heads.column, s, less, bases)
                    chunks.put(part, column_grad[..., None], chunk)
        bias_grad = None
        if line_grad is not None:  # the bias of the first distance is also that of all later keys
            later, bias_grad = line_grad.flatten(0, 1).chunk(2, dim=1)
            bias_grad[:, 0] += later.sum(1)
        return (*grads, bias_grad, column_grad, None, None)
