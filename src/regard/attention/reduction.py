"""Reductions: what is kept of attention weights, vectors and hidden states instead of the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention import reference
from regard.attention.call import AttentionCall, relative_positions
from regard.attention.tiles import Tile

Backend = Literal["tiles", "triton", "lse"]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A quantity that a forward pass leaves behind, with all that other modules need to know of it.

    Attributes:
        name: Its name in `ReductionRequest.names` and `Observation.tensors`.
        axis: What it has one entry for. "key": (batch, head, key). "query": (batch, head, query), which may have
            another axis behind. "token": (batch, token), likewise. "sample": (batch, head), or (batch, width) of
            hidden states. "call": (head, query, key), summed over the samples without padding.
        steps: How the steps of a cached forward join. "add": sums, by key if it has that axis. "write": each step
            writes its keys. "concat": behind each other. "whole": unknown if a sequence comes in several steps.
        packed: Whether it is known for rows that hold several sequences.
        finite: Whether its entries are finite as long as activations are.
        dtype: Its dtype; None: that of the call, or float32 if that is less precise.
        backends: Which backends compute it; blocks of rows compute every reduction of weights.
        requires: Reductions that are computed with it.
        joins_layers: Whether it is so much smaller than activations that several layers are held as one tensor.
        joins_calls: Whether the calls of several layers give the same as one call of all their samples.
        compute: Of weights its definition, from `DenseWeights`. Of vectors None where a call has nothing of the kind.
    """

    name: str
    axis: Literal["key", "query", "token", "sample", "call"]
    source: Literal["weights", "vectors", "projection", "hidden"]
    steps: Literal["add", "write", "concat", "whole"]
    packed: bool = True
    finite: bool = True
    dtype: torch.dtype | None = None
    backends: frozenset[Backend] = frozenset()
    requires: tuple[str, ...] = ()
    joins_layers: bool = True
    joins_calls: bool = True
    compute: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class ReductionRequest:
    """Which reductions to compute: `first_mass` of `num_first_keys`, `spectral_bound` in `max_iterations` at most.

    Where reductions come from tiles, `visitors` are called with each, and with the reciprocal of its totals, before it
    is overwritten. Other backends call none.
    """

    names: frozenset[str] = field(default_factory=frozenset)
    num_first_keys: int = 1
    max_iterations: int = 64
    visitors: tuple[Callable[[Tile, Tensor], None], ...] = ()

    def __post_init__(self) -> None:
        unknown = self.names - WEIGHT_REDUCTIONS.keys()
        assert not unknown, f"unknown reductions {sorted(unknown)}; there are {sorted(WEIGHT_REDUCTIONS)}"

    def select(self, names: Iterable[str]) -> ReductionRequest:
        """Return the request for those of the names that are in it."""
        return self._of(self.names.intersection(names))

    def join(self, other: ReductionRequest) -> ReductionRequest:
        """Return the request for what either asks for."""
        return ReductionRequest(
            names=self.names | other.names,
            num_first_keys=max(self.num_first_keys, other.num_first_keys),
            max_iterations=max(self.max_iterations, other.max_iterations),
            visitors=self.visitors + other.visitors,
        )

    def without(self, names: Iterable[str]) -> ReductionRequest:
        """Return the request for all names but these."""
        return self._of(self.names.difference(names))

    def _of(self, names: frozenset[str]) -> ReductionRequest:
        return self if names == self.names else replace(self, names=names)

    @property
    def in_float64(self) -> frozenset[str]:
        """Names of reductions whose sums are in float64, whatever the dtype of the call."""
        return frozenset(name for name in self.names if WEIGHT_REDUCTIONS[name].dtype == torch.float64)

    def by_axis(self, *axes: str) -> frozenset[str]:
        """Return the names of reductions along these axes."""
        return _with_axis(self.names, axes)

    def by_backend(self, backend: Backend) -> frozenset[str]:
        """Return the names of reductions that a backend computes."""
        return _with_backend(self.names, backend)


@cache
def _with_axis(names: frozenset[str], axes: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if WEIGHT_REDUCTIONS[name].axis in axes)


@cache
def _with_backend(names: frozenset[str], backend: Backend) -> frozenset[str]:
    return frozenset(name for name in names if backend in WEIGHT_REDUCTIONS[name].backends)


@dataclass(frozen=True)
class DenseWeights:
    """The matrix of a call, or of some of its rows; `whole_samples` are those without padding in the whole call."""

    call: AttentionCall
    num_first_keys: int
    whole_samples: Bool[Tensor, " batch"]

    @cached_property
    def _distribution(self) -> tuple[Tensor, Tensor]:
        return reference.distribution(self.call)

    @property
    def weights(self) -> Float[Tensor, "batch head query key"]:
        """What is measured: the weights, or a distribution made of them."""
        return self._distribution[0]

    @cached_property
    def counted(self) -> Float[Tensor, "batch head query key"]:
        """The weights of real queries, zero at padding."""
        mask = self.call.query_mask
        valid = mask[:, None, :] if mask is not None else self.weights.new_ones(1, 1, 1, dtype=torch.bool)
        return self.weights * valid[..., None]

    @property
    def missing(self) -> Float[Tensor, "batch head query"]:
        """The share of each row that goes to no key."""
        return self._distribution[1]


def reduce_dense(call: AttentionCall, request: ReductionRequest) -> dict[str, Tensor]:
    """Return the requested reductions from the whole matrix, by name: the definition."""
    dense = DenseWeights(call, request.num_first_keys, unpadded_samples(call))
    return {name: WEIGHT_REDUCTIONS[name].compute(dense) for name in request.names}


def unpadded_samples(call: AttentionCall) -> Bool[Tensor, " batch"]:
    """Return which samples have no padding, so that their matrices may be summed entry by entry."""
    result = torch.ones(call.query.shape[0], dtype=torch.bool, device=call.query.device)
    for mask in (call.query_mask, call.key_mask):
        if mask is not None:
            result = result & mask.all(-1)
    return result


def _lse(dense: DenseWeights) -> Tensor:
    """Return the log-normalizer of softmax; of other weightings the logarithm of the sum of |weights|."""
    operation = dense.call.operation
    if operation is None or (operation.weighting == "softmax" and operation.function is None):
        return reference.log_normalizer(dense.call)
    return reference.weights(dense.call).abs().sum(-1).log()


def _distance(dense: DenseWeights) -> Tensor:
    call = dense.call
    if call.key_positions is not None and call.query_positions is not None:
        between = call.query_positions[:, None, :, None] - call.key_positions[:, None, None]
    else:
        between = relative_positions(call)
    return (dense.weights * between.abs()).sum(-1)


def _first_mass(dense: DenseWeights) -> Tensor:
    matrix, count = dense.weights, dense.num_first_keys
    if dense.call.key_positions is not None:
        first = torch.arange(count, device=matrix.device)
        return matrix @ (dense.call.key_positions[:, None, :, None] == first).to(matrix.dtype)
    starts = dense.call.starts or (0,) * matrix.shape[0]
    before = max(0, -min(starts))
    behind = max(0, max(starts) + count - matrix.shape[-1])  # a block of rows may end before the samples begin
    padded = torch.nn.functional.pad(matrix, (before, behind))
    return torch.stack([padded[b, ..., before + s : before + s + count] for b, s in enumerate(starts)])


def _spectral_bound(dense: DenseWeights) -> Tensor:
    """Return λ_max of Aᵀ(I − 11ᵀ/n)A, from all singular values of the column-centered matrix of each head."""
    mask = dense.call.query_mask
    matrices = dense.weights if mask is None else [dense.weights[b][:, rows] for b, rows in enumerate(mask)]
    centered = [matrix - matrix.mean(-2, keepdim=True) for matrix in matrices]
    return torch.stack([torch.linalg.matrix_norm(matrix, ord=2).square() for matrix in centered])


_BY_KERNELS: frozenset[Backend] = frozenset({"tiles", "triton"})
_WITH_LSE: frozenset[Backend] = _BY_KERNELS | {"lse"}
_per_key = partial(Reduction, source="weights", axis="key", steps="add", backends=_BY_KERNELS)
_per_query = partial(Reduction, source="weights", axis="query", steps="concat", backends=_BY_KERNELS)
_whole = partial(Reduction, source="weights", steps="whole", packed=False)

_REDUCTIONS = (
    _per_key(name="column_mass", requires=("early_query_count",), compute=lambda dense: dense.counted.sum(-2)),
    _per_key(name="column_sum", dtype=torch.float64, compute=lambda dense: dense.counted.double().sum(-2)),
    _per_key(name="column_square", dtype=torch.float64, compute=lambda dense: dense.counted.double().square().sum(-2)),
    _per_query(name="entropy", compute=lambda dense: -torch.special.xlogy(dense.weights, dense.weights).sum(-1)),
    _per_query(name="distance", compute=_distance),
    _per_query(name="row_sum", compute=lambda dense: reference.weights(dense.call).sum(-1)),
    _per_query(name="virtual_sink_mass", compute=lambda dense: dense.missing),
    _per_query(name="lse", finite=False, backends=_WITH_LSE, compute=_lse),
    _per_query(
        name="first_mass", packed=False, backends=_WITH_LSE, requires=("early_query_count",), compute=_first_mass
    ),
    _whole(
        name="weights",
        axis="call",
        joins_layers=False,
        joins_calls=False,
        backends=frozenset({"tiles"}),
        compute=lambda dense: dense.counted[dense.whole_samples].sum(0),
    ),
    _whole(name="spectral_bound", axis="sample", joins_calls=False, compute=_spectral_bound),
)
BY_POSITION = frozenset({"first_mass", "distance"})
"""Those that count positions, which blocks of rows alone know where padding stands between tokens."""
WEIGHT_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _REDUCTIONS}
"""Every reduction of the attention weights, by name.

`column_sum` is `column_mass` in float64. With `column_square`, Σ_i A_ij², it gives the variance of a column: every
backend sums squares around the mean of some rows, so that the difference of the two is exact to rounding of weights.
"""
