"""What one layer asks of attention, and what may be asked of the weights on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PER_KEY = frozenset({"column_mass", "column_square"})
PER_QUERY = frozenset({"lse", "entropy", "distance", "row_sum", "virtual_sink_mass", "first_mass"})
PER_SAMPLE = frozenset({"spectral_bound"})
PER_CALL = frozenset({"weights"})
REDUCTIONS = PER_KEY | PER_QUERY | PER_SAMPLE | PER_CALL


@dataclass(frozen=True, kw_only=True)
class Constant:
    """What some heads of a call use in the place of their attention.

    Query i of the call stands at row `first_query + i` of the matrices, key j at column `first_key + j`; of samples
    whose first real query or key stands at a later column, `query_shift` and `key_shift` say at which. `normalised`
    says that every row sums to one, or is zero, over the keys of this call; `signed` that entries may be negative.
    With a `gate` g the weights are g·A + (1 − g)·C, else C alone.
    """

    matrices: Float[Tensor, "constant position position2"]
    heads: tuple[int, ...]
    first_query: int = 0
    first_key: int = 0
    query_shift: Int[Tensor, " batch"] | None = None
    key_shift: Int[Tensor, " batch"] | None = None
    gate: Float[Tensor, " constant"] | None = None
    normalised: bool = False
    signed: bool = False

    def detached(self) -> Constant:
        """The same, cut from the graph."""
        gate = None if self.gate is None else self.gate.detach()
        return replace(self, matrices=self.matrices.detach(), gate=gate)

    @property
    def shifted(self) -> bool:
        """Whether samples begin at different positions."""
        return self.query_shift is not None or self.key_shift is not None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of attention: `weights = softmax(cap(scale · q·k) + bias)` over the keys that a query may see.

    H query heads share G key/value heads (H a multiple of G). Query i stands at key position `offset + i`;
    `causal` lets it see no later key. A learned `sink` logit per head joins the normaliser without a key of its own.
    `query_real` and `key_real` are False on padding: padded keys are never seen, padded queries are computed but not
    counted.
    """

    query: Float[Tensor, "batch head query width"]
    key: Float[Tensor, "batch group key width"]
    value: Float[Tensor, "batch group key value_width"]
    scale: float
    causal: bool = False
    offset: int = 0
    keep: Bool[Tensor, "#batch #head #query key"] | None = None
    bias: Float[Tensor, "#batch #biased #query key"] | None = None
    """For all heads, or, where some are constant, for the others alone."""
    softcap: float | None = None
    sink: Float[Tensor, " head"] | None = None
    query_real: Bool[Tensor, "batch query"] | None = None
    key_real: Bool[Tensor, "batch key"] | None = None
    starts: tuple[int, ...] | None = None
    """Where each sample's first real key stands, for `first_mass`: 0 if None, negative if a cache has dropped it."""
    dropout: float = 0.0
    constant: Constant | None = None
    """What some heads use instead of their attention."""

    @property
    def shares(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def plain(self) -> bool:
        """Whether scores are nothing but scaled products, masked by position and padding at most."""
        return self.keep is None and self.bias is None and self.softcap is None and self.sink is None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked of the output."""
        return any(t.requires_grad for t in (self.query, self.key, self.value))

    def detached(self) -> Call:
        """The same call, cut from the graph."""
        parts = ("query", "key", "value", "bias", "sink")
        bare: dict[str, Any] = {p: t.detach() for p in parts if (t := getattr(self, p)) is not None}
        if self.constant is not None:
            bare["constant"] = self.constant.detached()
        return replace(self, **bare)

    def of_heads(self, heads: Sequence[int]) -> Call:
        """The call of some heads alone, each with its own keys and values."""
        chosen = run(heads)
        groups = run([head // self.shares for head in heads])
        parts: dict[str, Any] = {"query": self.query[:, chosen], "constant": None}
        parts |= {"key": self.key[:, groups], "value": self.value[:, groups]}
        for name in ("keep", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[1] == self.query.shape[1]:
                parts[name] = tensor[:, chosen]
        if self.sink is not None:
            parts["sink"] = self.sink[chosen]
        return replace(self, **parts)


def visible(call: Call) -> Tensor:
    """Which (query, key) pairs may meet: bool, broadcastable to (batch, head, query, key)."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    see = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
    if call.causal:
        see = see.tril(diagonal=call.offset)
    if call.keep is not None:
        see = see & call.keep
    if call.key_real is not None:
        see = see & call.key_real[:, None, None, :]
    return see


def run(numbers: Sequence[int]) -> slice | list[int]:
    """The numbers as a slice where they follow each other, so that no copy is made."""
    first = numbers[0]
    together = list(numbers) == list(range(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if together else list(numbers)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which reductions of the weights are asked for: names out of `REDUCTIONS`, and their few settings."""

    names: frozenset[str] = field(default_factory=frozenset)
    first: int = 1
    """How many first keys `first_mass` covers."""
    iterations: int = 64
    """The most Lanczos steps that `spectral_bound` takes."""

    def __post_init__(self) -> None:
        unknown = self.names - REDUCTIONS
        assert not unknown, f"unknown reductions {sorted(unknown)}; there are {sorted(REDUCTIONS)}"
