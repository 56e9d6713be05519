"""Attention whose weights are the products themselves, A_ij = φ(q_i)·φ(k_j), in chunks: time and memory linear in T.

What all chunks before one give to its queries goes through one matrix, Σ_j k_j v_jᵀ (Katharopoulos et al. 2020; in
chunks: Hua et al. 2022); only within a chunk are the weights made. Σ_j A_ij, which normalises, is the output for values
that are one, a column beside the others. The tokens of a prefix, which see each other, are the matrix that the chunks
start from. The backward pass makes the matrices anew, and those of the queries and gradients from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.call import AttentionCall, Operation
from regard.attention.row_chunks import RowChunk, RowChunks
from regard.attention.weightings import EPSILON

CHUNK = 64
BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
"""How large the keys are of the heads that are computed together."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """The output of a whole causal sequence whose weighting is linear, in the dtype of its queries."""
    assert operation.weighting == "linear"
    assert operation.window is None
    plan = _Plan(
        normalisation=operation.normalisation,
        scale=call.scale,
        prefix=min(operation.prefix, call.key.shape[2]),
    )
    output: Tensor = _Function.apply(call.query, call.key, call.value, plan)
    if operation.extra_value is None:
        return output
    return output + operation.extra_value.to(output.dtype)[:, None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is computed, beside the tensors."""

    normalisation: str
    scale: float
    prefix: int

    @property
    def normalised(self) -> bool:
        return self.normalisation != "none"

    def total(self, raw: Tensor) -> Tensor:
        """By what Σ_j A_ij makes the output be divided."""
        return raw.add(EPSILON) if self.normalisation == "sum" else raw.abs().clamp_(min=1)

    def back(self, gradient: Tensor, raw: Tensor) -> Tensor:
        """The gradient of Σ_j A_ij, from that of what it was divided by."""
        return gradient if self.normalisation == "sum" else gradient * raw.sign() * (raw.abs() >= 1)


class _Work:
    """Some heads of a call, and how their sequences are cut into a prefix and chunks.

    Of these, (head, chunk, token · share, width), the last is filled up with zeros. What a chunk gets from all before
    it, or after it, comes through a matrix each.
    """

    def __init__(self, plan: _Plan, pieces: RowChunks) -> None:
        self.plan, self.pieces, self.shares = plan, pieces, pieces.shares
        seen = torch.ones(CHUNK, CHUNK, dtype=pieces.like.dtype, device=pieces.like.device).tril_()
        self.seen = seen.repeat_interleave(self.shares, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Σ_j (q_i·k_j) v_j, over the keys that each query sees."""
        early, queries, keys, values = self.cut(query, key, value)
        first = early[1].mT @ early[2]
        states, inner = self.before(keys, values, first), self.within(queries, keys)
        return self.joined(early[0] @ first, (inner @ values).baddbmm_(queries, states.flatten(0, 1)), query)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        early, queries, keys, values = self.cut(query, key, value)
        early_gradient, gradients = self.parts(gradient, self.shares)
        first = early[1].mT @ early[2]
        states = self.before(keys, values, first)
        after, last = self.after(queries, gradients, early[0].mT @ early_gradient)
        inner, back = self.within(queries, keys), self.within(gradients, values)
        of_query = (back @ keys).baddbmm_(gradients, states.flatten(0, 1).mT)
        of_key = (back.mT @ queries).baddbmm_(values, after.flatten(0, 1).mT)
        of_value = (inner.mT @ gradients).baddbmm_(keys, after.flatten(0, 1))
        return (
            self.joined(early_gradient @ first.mT, of_query, query),
            self.joined(early[2] @ last.mT, of_key, key),
            self.joined(early[1] @ last, of_value, value),
        )

    def cut(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """Queries, keys and values of the prefix, and the chunks of each."""
        both = [self.parts(query, self.shares), self.parts(key, 1), self.parts(value, 1)]
        early, (queries, keys, values) = zip(*both, strict=True)
        return early, queries, keys, values

    def parts(self, tensor: Tensor, shares: int) -> tuple[Tensor, Tensor]:
        """A sequence's prefix, and all chunks of its heads: (head · chunk, token · share, width)."""
        end, size = self.plan.prefix * shares, CHUNK * shares
        rest = tensor[:, end:]
        missing = -rest.shape[1] % size
        rest = torch.nn.functional.pad(rest, (0, 0, 0, missing)) if missing else rest
        return tensor[:, :end], rest.reshape(-1, size, tensor.shape[2])

    def joined(self, early: Tensor, chunks: Tensor, like: Tensor) -> Tensor:
        """A sequence out of its parts, as long as another."""
        rest = chunks.view(len(like), -1, chunks.shape[2])[:, : like.shape[1] - early.shape[1]]
        return torch.cat([early, rest], dim=1) if early.shape[1] else rest

    def within(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The products of the queries and keys of a chunk, zero for later keys."""
        return (rows @ columns.mT).mul_(self.seen)

    def before(self, keys: Tensor, values: Tensor, first: Tensor) -> Tensor:
        """The matrix that each chunk starts from, Σ_j k_j v_jᵀ over all keys before it."""
        states = (keys.mT @ values).unflatten(0, (len(first), -1))
        running = first
        for chunk in range(states.shape[1]):
            running, states[:, chunk] = running + states[:, chunk], running
        return states

    def after(self, queries: Tensor, gradients: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_i q_i g_iᵀ over all queries behind each chunk, and over those that see the prefix."""
        states = (queries.mT @ gradients).unflatten(0, (len(first), -1))
        running = torch.zeros_like(first)
        for chunk in reversed(range(states.shape[1])):
            running, states[:, chunk] = running + states[:, chunk], running
        return states, running + first


class _Function(torch.autograd.Function):
    """The output, and the gradients of queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        pieces = _pieces(query, key)
        batch, heads, length = query.shape[:3]
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        sums = pieces.like.new_empty(batch, heads, length, 1) if plan.normalised else None
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(plan, pieces)
            for piece in pieces:
                result = work.forward(*_taken(pieces, piece, plan, query, key, value))
                if sums is not None:
                    result, sum_ = result[..., :-1], result[..., -1:]
                    pieces.put(sum_, sums, piece)
                    result = result / plan.total(sum_)
                pieces.put(result, output, piece)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, output if plan.normalised else None, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        plan, pieces = ctx.plan, _pieces(query, key)
        found = tuple(torch.empty_like(t) for t in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            work = _Work(plan, pieces)
            for piece in pieces:
                g = pieces.take(gradient, piece)
                if sums is not None:
                    sum_ = pieces.take(sums, piece)
                    g = g / plan.total(sum_)
                    of_total = (g * pieces.take(output, piece)).sum(-1, keepdim=True).neg_()
                    g = torch.cat([g, plan.back(of_total, sum_)], dim=-1)
                of_query, of_key, of_value = work.backward(*_taken(pieces, piece, plan, query, key, value), g)
                parts = of_query * plan.scale, of_key, of_value[..., : value.shape[3]]
                for whole, part in zip(found, parts, strict=True):
                    pieces.put(part, whole, piece)
        return (*found, None)


def _pieces(query: Tensor, key: Tensor) -> RowChunks:
    pieces = RowChunks(query, key)
    pieces.fit(BYTES.get(query.device.type, BYTES["cpu"]), key.shape[2] * key.shape[3])
    return pieces


def _taken(
    pieces: RowChunks, piece: RowChunk, plan: _Plan, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries times the scale, keys, and values with a column of ones if their weights are summed."""
    q, k, v = (pieces.take(t, piece) for t in (query, key, value))
    return q * plan.scale, k, torch.nn.functional.pad(v, (0, 1), value=1.0) if plan.normalised else v
