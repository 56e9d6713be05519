"""Attention whose weights are the products themselves, A_ij = φ(q_i)·φ(k_j), in chunks: time and memory linear in T.

What earlier chunks give to a query goes through one matrix, Σ_j k_j v_jᵀ (Katharopoulos et al. 2020; in chunks: Hua et
al. 2022), which begins with the prefix. Σ_j A_ij is the output of a column of ones; backward computes matrices again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.call import AttentionCall, Operation
from regard.attention.chunks import RowChunk, RowChunks
from regard.attention.gradients import first_order
from regard.attention.weightings import EPSILON

CHUNK = 64


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked(call: AttentionCall, operation: Operation) -> Float[Tensor, "batch head query value_width"]:
    """Return the output of a whole causal sequence whose weighting is linear, in the dtype of its queries."""
    assert operation.weighting == "linear"
    assert operation.window is None
    prefix = min(operation.prefix, call.key.shape[2])
    plan = _Plan(normalisation=operation.normalisation, scale=call.scale, prefix=prefix)
    output: Tensor = _Chunked.apply(call.query, call.key, call.value, plan)
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

    def divisor(self, total: Tensor) -> Tensor:
        """Return what the output is divided by, of Σ_j A_ij."""
        return total.add(EPSILON) if self.normalisation == "sum" else total.abs().clamp_(min=1)

    def divisor_backward(self, grad: Tensor, total: Tensor) -> Tensor:
        """Return the gradient of Σ_j A_ij from that of the divisor."""
        return grad if self.normalisation == "sum" else grad * total.sign() * (total.abs() >= 1)


class _Workspace:
    """Sequences of some heads, as a prefix and chunks (head · chunk, token · queries_per_key, width), filled with 0."""

    def __init__(self, plan: _Plan, chunks: RowChunks) -> None:
        chunks.fit(chunks.length * chunks.width)
        self.plan, self.queries_per_key = plan, chunks.queries_per_key
        causal = torch.ones(CHUNK, CHUNK, dtype=chunks.like.dtype, device=chunks.like.device).tril_()
        self.causal = causal.repeat_interleave(self.queries_per_key, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return Σ_j (q_i·k_j) v_j over the keys that each query sees."""
        prefix, queries, keys, values = self.split_all(query, key, value)
        start = prefix[1].mT @ prefix[2]
        states, weights = self.states_before(keys, values, start), self.products_within(queries, keys)
        return self.join(prefix[0] @ start, (weights @ values).baddbmm_(queries, states.flatten(0, 1)), query)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        prefix, queries, keys, values = self.split_all(query, key, value)
        prefix_grad, grads = self.split(grad, self.queries_per_key)
        start = prefix[1].mT @ prefix[2]
        states = self.states_before(keys, values, start)
        after, last = self.states_after(queries, grads, prefix[0].mT @ prefix_grad)
        weights, weights_grad = self.products_within(queries, keys), self.products_within(grads, values)
        query_grad = (weights_grad @ keys).baddbmm_(grads, states.flatten(0, 1).mT)
        key_grad = (weights_grad.mT @ queries).baddbmm_(values, after.flatten(0, 1).mT)
        value_grad = (weights.mT @ grads).baddbmm_(keys, after.flatten(0, 1))
        return (
            self.join(prefix_grad @ start.mT, query_grad, query),
            self.join(prefix[2] @ last.mT, key_grad, key),
            self.join(prefix[1] @ last, value_grad, value),
        )

    def split_all(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the prefix, and the chunks of each."""
        parts = [self.split(query, self.queries_per_key), self.split(key, 1), self.split(value, 1)]
        prefix, (queries, keys, values) = zip(*parts, strict=True)
        return prefix, queries, keys, values

    def split(self, tensor: Tensor, rows_per_token: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's prefix, and its chunks."""
        end, size = self.plan.prefix * rows_per_token, CHUNK * rows_per_token
        rest = tensor[:, end:]
        missing = -rest.shape[1] % size
        rest = torch.nn.functional.pad(rest, (0, 0, 0, missing)) if missing else rest
        return tensor[:, :end], rest.reshape(-1, size, tensor.shape[2])

    def join(self, prefix: Tensor, chunks: Tensor, like: Tensor) -> Tensor:
        """Return a sequence from its prefix and chunks, as long as another."""
        rest = chunks.view(len(like), -1, chunks.shape[2])[:, : like.shape[1] - prefix.shape[1]]
        return torch.cat([prefix, rest], dim=1) if prefix.shape[1] else rest

    def products_within(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the products of rows and columns of a chunk, zero for later columns."""
        return (rows @ columns.mT).mul_(self.causal)

    def states_before(self, keys: Tensor, values: Tensor, start: Tensor) -> Tensor:
        """Return Σ_j k_j v_jᵀ over all keys before each chunk."""
        states = (keys.mT @ values).unflatten(0, (len(start), -1))
        _exclusive_sums(states, start, range(states.shape[1]))
        return states

    def states_after(self, queries: Tensor, grads: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ_i q_i g_iᵀ over all queries behind each chunk, and over those that see the prefix."""
        states = (queries.mT @ grads).unflatten(0, (len(start), -1))
        return states, start + _exclusive_sums(states, torch.zeros_like(start), reversed(range(states.shape[1])))


def _exclusive_sums(states: Tensor, running: Tensor, order: Iterable[int]) -> Tensor:
    """Replace each chunk's matrix by the sum of those before it in an order; return the sum of all."""
    for chunk in order:
        running, states[:, chunk] = running + states[:, chunk], running
    return running


class _Chunked(torch.autograd.Function):
    """The output, and the gradients of queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        chunks = RowChunks(query, key)
        batch, heads, length = query.shape[:3]
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        totals = chunks.like.new_empty(batch, heads, length, 1) if plan.normalised else None
        with torch.autocast(query.device.type, enabled=False):
            workspace = _Workspace(plan, chunks)
            for chunk in chunks:
                result = workspace.forward(*_take_inputs(chunks, chunk, plan, query, key, value))
                if totals is not None:
                    result, total = result[..., :-1], result[..., -1:]
                    chunks.put(total, totals, chunk)
                    result = result / plan.divisor(total)
                chunks.put(result, output, chunk)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, output if plan.normalised else None, totals)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, totals = ctx.saved_tensors
        plan, chunks = ctx.plan, RowChunks(query, key)
        grads = tuple(torch.empty_like(t) for t in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            workspace = _Workspace(plan, chunks)
            for chunk in chunks:
                g = chunks.take(grad, chunk)
                if totals is not None:
                    total = chunks.take(totals, chunk)
                    g = g / plan.divisor(total)
                    divisor_grad = (g * chunks.take(output, chunk)).sum(-1, keepdim=True).neg_()
                    g = torch.cat([g, plan.divisor_backward(divisor_grad, total)], dim=-1)
                inputs = _take_inputs(chunks, chunk, plan, query, key, value)
                query_grad, key_grad, value_grad = workspace.backward(*inputs, g)
                parts = query_grad * plan.scale, key_grad, value_grad[..., : value.shape[3]]
                for tensor, part in zip(grads, parts, strict=True):
                    chunks.put(part, tensor, chunk)
        return (*grads, None)


def _take_inputs(
    chunks: RowChunks, chunk: RowChunk, plan: _Plan, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries times the scale, keys, and values with a column of ones if their weights are summed."""
    q, k, v = (chunks.take(tensor, chunk) for tensor in (query, key, value))
    return q * plan.scale, k, torch.nn.functional.pad(v, (0, 1), value=1.0) if plan.normalised else v
