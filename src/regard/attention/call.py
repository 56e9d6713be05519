"""One call of attention: its tensors, what hides or biases scores, and the operation that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class ConstantHeadsInput:
    """Constant matrices that some heads of a call use instead of their attention.

    Attributes:
        matrices: One matrix a constant head. Query i is row `first_query + i`, key j is column `first_key + j`.
        heads: The query heads that use them, in order.
        first_query: Row of the first query.
        first_key: Column of the first key.
        query_shift: Column of each sample's first real query; None if all samples begin at 0.
        key_shift: Column of each sample's first real key; None if all samples begin at 0.
        gate: Share g of a head that is attention: the weights are g·A + (1 − g)·C. None: C alone.
        normalised: Every row sums to one, or is zero, over the keys of this call.
        signed: Entries may be negative.
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

    def detach(self) -> ConstantHeadsInput:
        """Return the same without gradients."""
        gate = None if self.gate is None else self.gate.detach()
        return replace(self, matrices=self.matrices.detach(), gate=gate)

    def select_samples(self, samples: slice | Tensor) -> ConstantHeadsInput:
        """Return the same for some samples."""
        names = ("query_shift", "key_shift")
        changes: dict[str, Any] = {name: t[samples] for name in names if (t := getattr(self, name)) is not None}
        return replace(self, **changes)

    @property
    def is_shifted(self) -> bool:
        """Whether samples begin at different positions."""
        return self.query_shift is not None or self.key_shift is not None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What a call computes instead of softmax attention: choices by name, and learned tensors.

    `weights = normalisation(weighting(scale · q·k + shift + biases))`, of queries and keys behind their feature map.

    Attributes:
        weighting: Name in `regard.attention.weightings.WEIGHTINGS`.
        normalisation: Name in `regard.attention.weightings.NORMALISATIONS`.
        shift: Added to every score.
        extra_key: A key beside the others that every query sees, per head or one for all heads.
        extra_value: Its value (None: zero). Without `extra_key` it is added to the output.
        distance: Added to the score of a key d positions before its query: `distance[:, d]`; 0 stands for later keys.
        slopes: Subtracted from it times d (ALiBi).
        window: A query sees the last `window` keys up to its own; None: all.
        prefix: Every query sees the first `prefix` real keys, unless `AttentionCall.keep` hides them.
        backend: How a whole sequence is computed. A cached or padded one goes block by block.
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
    backend: str = "blockwise"

    @classmethod
    def from_spec(cls, spec: AttentionSpec, **tensors: Any) -> Operation:
        """Return the operation of a spec with its learned tensors, and its `shift` if it has one."""
        names = {name: getattr(spec, name) for name in ("weighting", "normalisation", "window", "prefix")}
        return cls(**names, backend=spec.resolved, **tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Learned tensors by name."""
        tensors = {name: getattr(self, name) for name in ("extra_key", "extra_value", "distance", "slopes")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def has_extra_column(self) -> bool:
        """Whether an extra key stands beside the keys."""
        return self.extra_key is not None

    @property
    def limits_keys(self) -> bool:
        """Whether a window or a prefix decides which keys are seen."""
        return self.window is not None or self.prefix > 0

    def select_heads(self, heads: slice | list[int]) -> Operation:
        """Return the operation of some heads."""
        per_head = {name: t for name, t in self.tensors.items() if len(t) > 1 or name == "slopes"}
        changes: dict[str, Any] = {name: tensor[heads] for name, tensor in per_head.items()}
        return replace(self, **changes)

    def detach(self) -> Operation:
        """Return the same without gradients."""
        changes: dict[str, Any] = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention: `weights = softmax(cap(scale · q·k) + bias)` over the keys that a query may see.

    Attributes:
        query: H query heads, which share G key/value heads (H is a multiple of G).
        key: Keys.
        value: Values.
        scale: Factor of the products.
        causal: A query sees no key after its own position.
        offset: Position of the first query among the keys.
        keep: Pairs that may meet; None: all.
        bias: Added to the scores; for all heads, or for those that are not constant.
        softcap: Scores become `softcap · tanh(score / softcap)`.
        sink: A learned logit a head in the normaliser, without a key.
        query_mask: False at padding, which is computed but not counted.
        key_mask: False at padding, which is never seen.
        starts: Index of each sample's first real key, for `first_mass`. None: 0; negative: a cache has dropped it.
        dropout: Probability of dropping a weight.
        constant: What some heads use instead of their attention.
        operation: What is computed instead of softmax attention.
    """

    query: Float[Tensor, "batch head query width"]
    key: Float[Tensor, "batch group key width"]
    value: Float[Tensor, "batch group key value_width"]
    scale: float
    causal: bool = False
    offset: int = 0
    keep: Bool[Tensor, "#batch #head #query key"] | None = None
    bias: Float[Tensor, "#batch #biased #query key"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, " head"] | None = None
    query_mask: Bool[Tensor, "batch query"] | None = None
    key_mask: Bool[Tensor, "batch key"] | None = None
    starts: tuple[int, ...] | None = None
    dropout: float = 0.0
    constant: ConstantHeadsInput | None = None
    operation: Operation | None = None

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products, masked by position and padding at most."""
        is_masked = self.keep is not None or self.bias is not None
        return not is_masked and self.softcap is None and self.sink is None and self.operation is None

    @property
    def requires_grad(self) -> bool:
        """Whether the output may need a gradient."""
        learned = () if self.operation is None else tuple(self.operation.tensors.values())
        sink = () if self.sink is None else (self.sink,)
        return any(t.requires_grad for t in (self.query, self.key, self.value, *sink, *learned))

    def detach(self) -> AttentionCall:
        """Return the same call without gradients."""
        names = ("query", "key", "value", "bias", "sink", "constant", "operation")
        changes: dict[str, Any] = {name: part.detach() for name in names if (part := getattr(self, name)) is not None}
        return replace(self, **changes)

    def to_acc_dtype(self) -> AttentionCall:
        """Return the call with queries, keys and values of at least float32."""
        if self.query.dtype in (torch.float32, torch.float64):
            return self
        return replace(self, query=self.query.float(), key=self.key.float(), value=self.value.float())

    def select_samples(self, samples: slice | Int[Tensor, " selected"] | Bool[Tensor, " batch"]) -> AttentionCall:
        """Return the call of some samples."""
        changes: dict[str, Any] = {name: getattr(self, name)[samples] for name in ("query", "key", "value")}
        for name in ("keep", "bias", "query_mask", "key_mask"):
            tensor = getattr(self, name)
            if tensor is not None and len(tensor) > 1:
                changes[name] = tensor[samples]
        if self.starts is not None:
            changes["starts"] = tuple(torch.tensor(self.starts)[samples].tolist())
        if self.constant is not None:
            changes["constant"] = self.constant.select_samples(samples)
        return replace(self, **changes)

    def select_heads(self, heads: Sequence[int]) -> AttentionCall:
        """Return the call of some heads, each with its own keys and values, none of them constant."""
        index = as_slice(heads)
        groups = as_slice([head // self.num_key_value_groups for head in heads])
        changes: dict[str, Any] = {"query": self.query[:, index], "constant": None}
        changes |= {"key": self.key[:, groups], "value": self.value[:, groups]}
        for name in ("keep", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[1] == self.query.shape[1]:
                changes[name] = tensor[:, index]
        if self.sink is not None:
            changes["sink"] = self.sink[index]
        if self.operation is not None:
            changes["operation"] = self.operation.select_heads(index)
        return replace(self, **changes)


def visible_mask(call: AttentionCall) -> Bool[Tensor, "#batch #head #query key"]:
    """Return which pairs of query and key may meet, by position, operation, mask and padding."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
    if call.causal:
        visible = visible.tril(diagonal=call.offset)
    if call.operation is not None:
        visible = _apply_span(call, call.operation, visible)
    if call.keep is not None:
        visible = visible & call.keep
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, None, :]
    return visible


def _apply_span(call: AttentionCall, operation: Operation, visible: Tensor) -> Tensor:
    """Hide what lies before an operation's window, and open its prefix."""
    if operation.window is not None:
        visible = visible & (relative_positions(call) < operation.window)
    if operation.prefix:
        positions = torch.arange(call.key.shape[2], device=visible.device)[None]
        if call.key_mask is not None:
            positions = positions - call.key_mask.int().argmax(-1, keepdim=True)
        visible = visible | (positions < operation.prefix)[:, None, None, :]
    return visible


def relative_positions(call: AttentionCall) -> Int[Tensor, "query key"]:
    """Return how many positions each key stands before a query, negative behind it."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    positions = torch.arange(queries, device=call.query.device) + call.offset
    return positions[:, None] - torch.arange(keys, device=call.query.device)


def as_slice(indices: Sequence[int]) -> slice | list[int]:
    """Return consecutive indices as a slice, which copies nothing; others as a list."""
    first, last = indices[0], indices[0] + len(indices)
    return slice(first, last) if list(indices) == list(range(first, last)) else list(indices)
