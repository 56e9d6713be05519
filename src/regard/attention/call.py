"""What one layer asks of attention, and what may be asked of the weights on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.spec import AttentionSpec

PER_KEY = frozenset({"column_mass", "column_square"})
PER_QUERY = frozenset({"lse", "entropy", "distance", "row_sum", "virtual_sink_mass", "first_mass"})
PER_SAMPLE = frozenset({"spectral_bound"})
PER_CALL = frozenset({"weights"})
REDUCTIONS = PER_KEY | PER_QUERY | PER_SAMPLE | PER_CALL


@dataclass(frozen=True, kw_only=True)
class ConstantHeadsInput:
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

    def detached(self) -> ConstantHeadsInput:
        """The same, cut from the graph."""
        gate = None if self.gate is None else self.gate.detach()
        return replace(self, matrices=self.matrices.detach(), gate=gate)

    @property
    def shifted(self) -> bool:
        """Whether samples begin at different positions."""
        return self.query_shift is not None or self.key_shift is not None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What a call computes in the place of softmax attention: a choice of names, and the tensors it has learned.

    `weights = normalisation(weighting(scale · q·k + shift + biases))`; queries and keys have gone through their feature
    map before. `extra_key` (and `extra_value`, None: zero) stand beside the keys of every head, or once for all, and
    are seen by every query; `extra_value` without `extra_key` is added to the output. A key that stands d before a
    query has `distance[:, d]` added to its score, one after it `distance[:, 0]`; `slopes` lower it by slope · d. Each
    query sees the last `window` keys up to its own; of the tokens that are real, all see the first `prefix`, unless
    the call hides them entry by entry (`keep`).
    """

    weighting: str = "softmax"
    normalisation: str = "none"
    shift: float = 0.0
    extra_key: Float[Tensor, "#head width"] | None = None
    extra_value: Float[Tensor, "#head value_width"] | None = None
    distance: Float[Tensor, "#head distance"] | None = None
    slopes: Float[Tensor, " head"] | None = None
    window: int | None = None
    prefix: int = 0
    form: str = "blockwise"
    """How a whole sequence is computed; one that is cached or padded goes block by block."""

    @classmethod
    def of(cls, spec: AttentionSpec, **tensors: Any) -> Operation:
        """What a spec asks for, with its tensors, and `shift` where it has one."""
        names = {name: getattr(spec, name) for name in ("weighting", "normalisation", "window", "prefix")}
        return cls(**names, form=spec.resolved, **tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it holds of tensors, by name."""
        every = {name: getattr(self, name) for name in ("extra_key", "extra_value", "distance", "slopes")}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @property
    def column(self) -> bool:
        """Whether a column stands beside the keys."""
        return self.extra_key is not None

    @property
    def reaches(self) -> bool:
        """Whether it says itself which keys are seen, by a window or a prefix."""
        return self.window is not None or self.prefix > 0

    def of_heads(self, heads: slice | list[int]) -> Operation:
        """That of some heads alone."""
        each = {name: tensor for name, tensor in self.tensors.items() if len(tensor) > 1 or name == "slopes"}
        own: dict[str, Any] = {name: tensor[heads] for name, tensor in each.items()}
        return replace(self, **own)

    def detached(self) -> Operation:
        """The same, cut from the graph."""
        bare: dict[str, Any] = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return replace(self, **bare)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention: `weights = softmax(cap(scale · q·k) + bias)` over the keys that a query may see.

    H query heads share G key/value heads (H a multiple of G). Query i stands at key position `offset + i`;
    `causal` lets it see no later key. A learned `sink` logit per head joins the normaliser without a key of its own.
    `query_mask` and `key_mask` are False on padding: padded keys are never seen, padded queries are computed but not
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
    query_mask: Bool[Tensor, "batch query"] | None = None
    key_mask: Bool[Tensor, "batch key"] | None = None
    starts: tuple[int, ...] | None = None
    """Where each sample's first real key stands, for `first_mass`: 0 if None, negative if a cache has dropped it."""
    dropout: float = 0.0
    constant: ConstantHeadsInput | None = None
    """What some heads use instead of their attention."""
    operation: Operation | None = None
    """What is computed in the place of softmax attention."""

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def plain(self) -> bool:
        """Whether scores are nothing but scaled products, masked by position and padding at most."""
        masked = self.keep is not None or self.bias is not None
        return not masked and self.softcap is None and self.sink is None and self.operation is None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked of the output."""
        learned = () if self.operation is None else tuple(self.operation.tensors.values())
        sink = () if self.sink is None else (self.sink,)
        return any(t.requires_grad for t in (self.query, self.key, self.value, *sink, *learned))

    def detached(self) -> AttentionCall:
        """The same call, cut from the graph."""
        parts = ("query", "key", "value", "bias", "sink")
        bare: dict[str, Any] = {p: t.detach() for p in parts if (t := getattr(self, p)) is not None}
        if self.constant is not None:
            bare["constant"] = self.constant.detached()
        if self.operation is not None:
            bare["operation"] = self.operation.detached()
        return replace(self, **bare)

    def of_heads(self, heads: Sequence[int]) -> AttentionCall:
        """The call of some heads alone, each with its own keys and values."""
        chosen = run(heads)
        groups = run([head // self.num_key_value_groups for head in heads])
        parts: dict[str, Any] = {"query": self.query[:, chosen], "constant": None}
        parts |= {"key": self.key[:, groups], "value": self.value[:, groups]}
        for name in ("keep", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[1] == self.query.shape[1]:
                parts[name] = tensor[:, chosen]
        if self.sink is not None:
            parts["sink"] = self.sink[chosen]
        if self.operation is not None:
            parts["operation"] = self.operation.of_heads(chosen)
        return replace(self, **parts)


def visible(call: AttentionCall) -> Tensor:
    """Which (query, key) pairs may meet: bool, broadcastable to (batch, head, query, key)."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    see = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
    if call.causal:
        see = see.tril(diagonal=call.offset)
    if call.operation is not None:
        see = _reach(call, call.operation, see)
    if call.keep is not None:
        see = see & call.keep
    if call.key_mask is not None:
        see = see & call.key_mask[:, None, None, :]
    return see


def _reach(call: AttentionCall, operation: Operation, see: Tensor) -> Tensor:
    """What an operation's window hides, and its prefix opens of what is to come or beyond the window."""
    gap = relative_positions(call)
    if operation.window is not None:
        see = see & (gap < operation.window)
    if operation.prefix:
        first = torch.arange(call.key.shape[2], device=see.device)[None]
        if call.key_mask is not None:
            first = first - call.key_mask.int().argmax(-1, keepdim=True)
        see = see | (first < operation.prefix)[:, None, None, :]
    return see


def relative_positions(call: AttentionCall) -> Int[Tensor, "query key"]:
    """How far each key stands before a query."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    at = torch.arange(queries, device=call.query.device) + call.offset
    return at[:, None] - torch.arange(keys, device=call.query.device)


def run(numbers: Sequence[int]) -> slice | list[int]:
    """The numbers as a slice where they follow each other, so that no copy is made."""
    first = numbers[0]
    together = list(numbers) == list(range(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if together else list(numbers)


@dataclass(frozen=True, kw_only=True)
class ReductionRequest:
    """Which reductions of the weights are asked for: names out of `REDUCTIONS`, and their few settings."""

    names: frozenset[str] = field(default_factory=frozenset)
    first: int = 1
    """How many first keys `first_mass` covers."""
    iterations: int = 64
    """The most Lanczos steps that `spectral_bound` takes."""

    def __post_init__(self) -> None:
        unknown = self.names - REDUCTIONS
        assert not unknown, f"unknown reductions {sorted(unknown)}; there are {sorted(REDUCTIONS)}"
