"""Reductions of vectors, of what output projections receive, and of hidden states.

Those of queries, keys, values and outputs take time and memory linear in the number of tokens; only of gated outputs
the matrix is computed, block by block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from regard.attention import reference
from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall, is_same_view, relative_positions, slices, visible_mask
from regard.attention.operator import expand_bias
from regard.attention.reduction import WEIGHT_REDUCTIONS, Reduction
from regard.errors import UserError
from regard.hooks.modalities import modality_mass

ROWS = 256
"""Queries whose mask is multiplied at once."""
SMALLEST_NORM = 1e-12
"""What a smaller norm is taken for where it divides."""
MAX_GATE = 1000.0
"""Largest factor between an entry of an output and what is projected of it, over that of their root mean squares."""


def to_acc_dtype(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if that is their dtype."""
    return values if values.dtype == torch.float64 else values.float()


class HeadProjections:
    """The part W_h of an output projection W_O that each head goes through."""

    def __init__(self, weight: Float[Tensor, "width heads_times_value_width"], heads: int) -> None:
        self.parts = to_acc_dtype(weight).unflatten(1, (heads, -1)).permute(1, 2, 0)

    @cached_property
    def gram(self) -> Float[Tensor, "head value_width value_width"]:
        """W_hᵀW_h of each head."""
        return self.parts @ self.parts.mT

    def norm(self, vectors: Float[Tensor, "batch head token value_width"]) -> Float[Tensor, "batch head token"]:
        """Return ‖W_h x‖; of many tokens as √(xᵀ(W_hᵀW_h)x), which never leaves the width of the head."""
        vectors = to_acc_dtype(vectors)
        batch, _, tokens, width = vectors.shape
        if batch * tokens < width:
            return (vectors @ self.parts).norm(dim=-1)
        return (vectors @ self.gram * vectors).sum(-1).clamp(min=0).sqrt()


@dataclass(frozen=True)
class AttentionIO:
    """One finished attention call, and what returns W_O or raises a UserError if it is not recognized.

    `is_self` says whether queries and keys are the same tokens, `members` of which modality the keys are.
    """

    call: AttentionCall
    projection: Callable[[], Float[Tensor, "width heads_times_value_width"]]
    is_self: bool
    members: Bool[Tensor, "batch key member"] | None = None


def no_projection() -> Tensor:
    """Stand for W_O where calls of several layers are one: what needs it is not computed of these."""
    raise AssertionError("there is no output projection of several layers")


@dataclass(frozen=True)
class HeadOutputs:
    """One attention call, its output, and what the output projection receives in the place of the output.

    `path` is that of the attention module, `weight` W_O, and `column_mass` the reduction of this name.
    """

    path: str
    call: AttentionCall
    output: Float[Tensor, "batch head query value_width"]
    received: Float[Tensor, "batch head query value_width"]
    weight: Float[Tensor, "width heads_times_value_width"]
    column_mass: Float[Tensor, "batch head key"] | None

    @cached_property
    def projections(self) -> HeadProjections:
        """W_O by head."""
        return HeadProjections(self.weight, self.output.shape[1])


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states in float32 or float64, and their norms."""

    states: Float[Tensor, "batch token width"]

    @cached_property
    def norm(self) -> Float[Tensor, "batch token"]:
        """The L2 norm of each token's."""
        return vector_norm(self.states, dim=-1)

    @property
    def direction(self) -> Float[Tensor, "batch token width"]:
        """Hidden states of norm 1; zero where they are."""
        return self.states / self.norm.clamp(min=SMALLEST_NORM)[..., None]


def _early_query_count(io: AttentionIO) -> Float[Tensor, "batch 1 key"] | None:
    """Count early queries, block by block if a mask or a prefix decides; None if there can be none."""
    call = io.call
    if not io.is_self or call.query.shape[2] == 1 or (call.causal and not call.hides_pairs):
        return None
    (batch, _, queries, _), keys = call.query.shape, call.key.shape[2]
    dtype, device = torch.promote_types(call.query.dtype, torch.float32), call.query.device
    if not call.hides_pairs:
        real = torch.ones(batch, queries, device=device) if call.query_mask is None else call.query_mask
        before = (real := real.to(dtype)).cumsum(-1)
        if call.offset == 0 and keys == queries:
            return (before - real)[:, None]
        first = (torch.arange(keys, device=device) - call.offset).clamp(0, queries)
        return torch.nn.functional.pad(before, (1, 0)).index_select(1, first)[:, None]
    count = torch.zeros(batch, 1, keys, dtype=dtype, device=device)
    for block, columns in blocks(call):
        early = visible_mask(block) & (relative_positions(block) < 0)
        if block.query_mask is not None:
            early = early & block.query_mask[:, None, :, None]
        count[..., columns] += early.any(1, keepdim=True).sum(2)
    return count


def _sum_over_queries(
    values: Float[Tensor, "batch head query width"], call: AttentionCall
) -> Float[Tensor, "batch head key width"]:
    """Sum values over the real queries that see each key; of padded keys any sum."""
    if call.query_mask is not None:
        values = values * call.query_mask[:, None, :, None]
    keys = call.key.shape[2]
    if call.hides_pairs:
        total = values.new_zeros(*values.shape[:2], keys, values.shape[-1])
        visible = visible_mask(call).expand(-1, -1, values.shape[2], -1)
        for rows in slices(values.shape[2], ROWS):
            total += visible[:, :, rows].mT.to(values.dtype) @ values[:, :, rows]
        return total
    if not call.causal:
        return values.sum(2, keepdim=True).expand(-1, -1, keys, -1)
    suffix = torch.nn.functional.pad(values.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    first = (torch.arange(keys, device=values.device) - call.offset).clamp(0, values.shape[2])
    return suffix.index_select(2, first)


def _pairs(name: str, feature: Callable[[Tensor], Tensor]) -> Reduction:
    """Return the reduction Σ_i φ(q_i)·φ(k_j) over the real queries i that see key j."""

    def compute(io: AttentionIO) -> Float[Tensor, "batch head key"]:
        sums = _sum_over_queries(feature(to_acc_dtype(io.call.query)), io.call)
        return (sums * io.call.expand_groups(feature(to_acc_dtype(io.call.key)))).sum(-1)

    return _of_keys(name=name, steps="add", compute=compute)


def _find_gate(outputs: HeadOutputs) -> Float[Tensor, "batch head query value_width"]:
    """Return the factor of each output entry, zero at padded queries. UserError if no factor explains a change."""
    output, received = to_acc_dtype(outputs.output), to_acc_dtype(outputs.received)
    if outputs.call.query_mask is not None:
        output, received = (values * outputs.call.query_mask[:, None, :, None] for values in (output, received))
    gate = torch.where(output == 0, 0.0, received / output)
    scale = received.norm() / output.norm().clamp(min=torch.finfo(output.dtype).tiny)
    if bool(((output == 0) & (received != 0)).any() | (gate.abs() > MAX_GATE * scale).any()):
        raise UserError(
            f"cannot weigh the values of {outputs.path}: what its output projection receives is not the output of "
            "attention times a gate; leave out value_weighted_mass"
        )
    return gate


def _are_equal(received: Tensor, output: Tensor) -> bool:
    """Return whether an output projection receives the output itself; the same memory is not read."""
    is_same = received.dtype == output.dtype and is_same_view(received, output)
    return is_same or torch.equal(received, output.to(received.dtype))


def _value_weighted_sum(outputs: HeadOutputs) -> Float[Tensor, "batch head key"]:
    """Compute Σ_i A_ij ‖W_O (g_i ∘ v_j)‖; with a gate query by query, of the matrix block by block."""
    if _are_equal(outputs.received, outputs.output):
        assert outputs.column_mass is not None
        values = outputs.call.expand_groups(outputs.call.value)
        return outputs.column_mass * outputs.projections.norm(values)
    call, gate = outputs.call.detach().to_acc_dtype(), _find_gate(outputs)
    batch, heads = gate.shape[:2]
    factor = torch.linalg.qr(outputs.projections.parts.mT, mode="r").R
    values = call.expand_groups(call.value)
    total = gate.new_zeros(batch, heads, call.key.shape[2])
    row = 0
    whole = slice(0, call.key.shape[2])
    for block, columns in blocks(call) if call.constant is None else [(expand_bias(call), whole)]:
        for weights in reference.distribution(block)[0].unbind(2):
            gated = factor * gate[:, :, row, None]
            total[..., columns] += weights * (gated @ values[:, :, columns].mT).norm(dim=-2)
            row += 1
    return total


_of_keys = partial(Reduction, source="vectors", axis="key")
_hidden = partial(Reduction, source="hidden")
_REDUCTIONS = (
    _of_keys(name="key_norm", steps="write", compute=lambda io: vector_norm(to_acc_dtype(io.call.key), dim=-1)),
    _of_keys(name="value_norm", steps="write", compute=lambda io: vector_norm(to_acc_dtype(io.call.value), dim=-1)),
    _pairs("cosine_sum", lambda vectors: normalize(vectors, dim=-1)),
    _pairs("norm_sum", lambda vectors: vectors.norm(dim=-1, keepdim=True)),
    _pairs("pair_count", lambda vectors: torch.ones_like(vectors[..., :1])),
    _of_keys(name="early_query_count", steps="add", compute=_early_query_count),
    _of_keys(
        name="value_output_norm",
        steps="write",
        joins_calls=False,
        compute=lambda io: HeadProjections(io.projection(), io.call.query.shape[1]).norm(
            io.call.expand_groups(io.call.value)
        ),
    ),
    Reduction(
        name="modality_mass",
        source="vectors",
        axis="query",
        steps="concat",
        packed=False,
        joins_calls=False,
        compute=lambda io: None if io.members is None else modality_mass(io.call, io.members),
    ),
    Reduction(
        name="output_norm",
        source="projection",
        axis="query",
        steps="concat",
        compute=lambda outputs: outputs.projections.norm(outputs.received),
    ),
    Reduction(
        name="value_weighted_sum",
        source="projection",
        axis="key",
        steps="add",
        requires=("column_mass",),
        compute=_value_weighted_sum,
    ),
    _hidden(name="hidden_norm", axis="token", steps="concat", compute=lambda hidden: hidden.norm),
    _hidden(name="direction", axis="sample", steps="add", compute=lambda hidden: hidden.direction),
    _hidden(
        name="hidden",
        axis="token",
        steps="concat",
        joins_layers=False,
        joins_calls=False,
        compute=lambda hidden: hidden.states,
    ),
)
REDUCTIONS: dict[str, Reduction] = WEIGHT_REDUCTIONS | {reduction.name: reduction for reduction in _REDUCTIONS}
"""Every reduction by name.

Of an `AttentionIO` (source "vectors"):

* `key_norm`, `value_norm`: L2 norms of keys (positions applied) and values, by key/value head.
* `cosine_sum`, `norm_sum`: Σ cos(q_i, k_j) and Σ |q_i||k_j| over the real queries i that see key j.
* `pair_count`: number of these queries.
* `early_query_count`: number of real queries before key j that see it in any head, because a prefix or the mask lets
  them.
* `value_output_norm`: ‖W_O v_j‖ through the part of W_O of each head.
* `modality_mass`: attention of each query to the keys of each modality, and to their first tokens.

Of `HeadOutputs` (source "projection"), whose x_i is the head's part of what is projected:

* `output_norm`: ‖W_O x_i‖ through the part of W_O of each head.
* `value_weighted_sum`: Σ_i A_ij ‖W_O (g_i ∘ v_j)‖ over real queries, where x_i = g_i ∘ o_i; g_i is 1 without a gate.

Of hidden states (batch, token, width) those by sample are summed over its tokens.
"""
