"""One call of attention: its tensors, what hides or biases scores, and the operation that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.spec import AttentionSpec
from regard.attention.tracing import is_traced

Record = TypeVar("Record", bound="ConstantHeadsInput | Operation | AttentionCall")


def map_fields(record: Record, **functions: Callable[[Any], Any]) -> Record:
    """Return a record whose fields of these names have gone through functions, unless they are None."""
    parts = {name: getattr(record, name) for name in functions}
    return replace(record, **{name: functions[name](part) for name, part in parts.items() if part is not None})


@dataclass(frozen=True, kw_only=True)
class ConstantHeadsInput:
    """Constant matrices that some heads of a call use instead of their attention.

    Attributes:
        matrices: One matrix a constant head. Query i is row `first_query + i`, key j is column `first_key + j`.
        heads: The query heads that use them, in order.
        query_shift: Column of each sample's first real query; None if all samples begin at 0. Of packed sequences the
            column of the first query of each query's sequence.
        key_shift: The same of keys.
        gate: Share g of a head that is attention: the weights are g·A + (1 − g)·C. None: C alone.
        normalised: Every row of the matrices sums to one, or is zero, over the keys of this call.
        row_sums: What the weights of each row sum to, row by row of the matrices. None: 1.
        signed: Entries may be negative.
        key_heads: The heads of which a call has keys, in ascending order; those that dynamic heads read are among them.
            None: all.
    """

    matrices: Float[Tensor, "constant position position2"]
    heads: tuple[int, ...]
    first_query: int = 0
    first_key: int = 0
    query_shift: Int[Tensor, " batch"] | Int[Tensor, "batch query"] | None = None
    key_shift: Int[Tensor, " batch"] | Int[Tensor, "batch key"] | None = None
    gate: Float[Tensor, " constant"] | None = None
    normalised: bool = False
    row_sums: Float[Tensor, "constant position"] | None = None
    signed: bool = False
    key_heads: tuple[int, ...] | None = None

    def detach(self) -> ConstantHeadsInput:
        return map_fields(self, matrices=Tensor.detach, gate=Tensor.detach)

    def select_samples(self, samples: slice | Tensor) -> ConstantHeadsInput:
        return map_fields(self, query_shift=lambda shift: shift[samples], key_shift=lambda shift: shift[samples])

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
        top_k: Of these it sees those of its `top_k` largest scores; None: all.
        function: Makes weights of scores and mask instead of `weighting`; only as a whole (`materialised`).
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
    top_k: int | None = None
    function: Callable[[Tensor, Tensor], Tensor] | None = None
    backend: str = "blockwise"

    @classmethod
    def from_spec(cls, spec: AttentionSpec, **tensors: Any) -> Operation:
        """Return the operation of a spec with its learned tensors, and its `shift` if it has one."""
        names = {name: getattr(spec, name) for name in ("weighting", "normalisation", "window", "prefix", "top_k")}
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

    def select_heads(self, heads: slice | list[int]) -> Operation:
        per_head = [name for name, tensor in self.tensors.items() if len(tensor) > 1 or name == "slopes"]
        return map_fields(self, **dict.fromkeys(per_head, lambda tensor: tensor[heads]))

    def detach(self) -> Operation:
        return map_fields(self, **dict.fromkeys(self.tensors, Tensor.detach))


QKV = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention: `weights = softmax(cap(scale · q·k) + bias)` over the keys that a query may see.

    Attributes:
        query: H query heads, which share G key/value heads (H is a multiple of G).
        key: Of all G heads, unless `constant.key_heads` says of which.
        causal: A query sees no key after its own position.
        offset: Position of the first query among the keys.
        keep: Pairs that may meet; None: all.
        scale: 0 where the bias is the whole score, as of a model that computes its scores by itself.
        bias: Added to the scores; for all heads, or for those that are not constant.
        softcap: Scores become `softcap · tanh(score / softcap)`.
        sink: A learned logit a head in the normaliser, without a key; or one of each query.
        query_mask: False at padding, which is computed but not counted.
        key_mask: False at padding, which is never seen.
        starts: Index of each sample's first real key, for `first_mass`. None: 0; negative: a cache has dropped it.
        query_positions: How many real tokens stand before each query, where padding stands between them.
        key_positions: The same of keys, for `first_mass` and `distance`. None: no padding stands between tokens.
        constant: What some heads use instead of their attention.
        operation: What is computed instead of softmax attention.
        keys_are_told: False where `key` may not be what made the scores, as in a sum of products with several.
        is_of_memory: Its values are known to be made of nothing that its queries, or keys, are made of.
    """

    query: Float[Tensor, "batch head query width"]
    key: Float[Tensor, "batch held key width"]
    value: Float[Tensor, "batch group key value_width"]
    scale: float
    causal: bool = False
    offset: int = 0
    keep: Bool[Tensor, "#batch #head #query key"] | None = None
    bias: Float[Tensor, "#batch #biased #query key"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, " head"] | Float[Tensor, "batch head query"] | None = None
    query_mask: Bool[Tensor, "batch query"] | None = None
    key_mask: Bool[Tensor, "batch key"] | None = None
    starts: tuple[int, ...] | None = None
    query_positions: Int[Tensor, "batch query"] | None = None
    key_positions: Int[Tensor, "batch key"] | None = None
    dropout: float = 0.0
    constant: ConstantHeadsInput | None = None
    operation: Operation | None = None
    keys_are_told: bool = True
    is_of_memory: bool = False

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per key/value head."""
        return int(self.query.shape[1] // self.value.shape[1])

    @property
    def sink_logits(self) -> Float[Tensor, "#batch head #query"] | None:
        """The logit of each query beside its keys."""
        return self.sink[None, :, None] if self.sink is not None and self.sink.ndim == 1 else self.sink

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled products, masked by position and padding at most."""
        is_masked = self.keep is not None or self.bias is not None
        return not is_masked and self.softcap is None and self.sink is None and self.operation is None

    @property
    def requires_grad(self) -> bool:
        """Whether the output may need a gradient."""
        learned = () if self.operation is None else self.operation.tensors.values()
        tensors = (self.query, self.key, self.value, self.sink, *learned)
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    @property
    def hides_pairs(self) -> bool:
        """Whether a mask, a window or a prefix decides which keys are seen."""
        limits_keys = self.operation is not None and (self.operation.window is not None or self.operation.prefix > 0)
        return self.keep is not None or limits_keys

    def expand_keys(self) -> AttentionCall:
        """Return the call with keys of all heads, zeros for those that only constant heads would read."""
        if self.constant is None or self.constant.key_heads is None:
            return self
        batch, _, keys, width = self.key.shape
        index = torch.tensor(self.constant.key_heads, device=self.key.device)
        key = self.key.new_zeros(batch, self.value.shape[1], keys, width).index_copy(1, index, self.key)
        return replace(self, key=key, constant=replace(self.constant, key_heads=None))

    def expand_groups(self, tensor: Tensor) -> Tensor:
        """Repeat what key/value heads have, (batch, group, …), for each of their query heads."""
        return tensor.repeat_interleave(self.num_key_value_groups, dim=1)

    def as_step(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> AttentionCall:
        """Return the call of a later token, equal in all else. Where every operation counts it replaces `replace`."""
        call = object.__new__(AttentionCall)
        call.__dict__.update(self.__dict__, query=query, key=key, value=value, offset=offset)
        return call

    def detach(self) -> AttentionCall:
        tensors = (self.query, self.key, self.value, self.bias, self.sink)
        is_detached = self.constant is None and self.operation is None
        if is_detached and not any(tensor is not None and tensor.requires_grad for tensor in tensors):
            return self
        names = (*QKV, "bias", "sink", "constant", "operation")
        return map_fields(self, **dict.fromkeys(names, lambda part: part.detach()))

    def to_acc_dtype(self) -> AttentionCall:
        """Return the call with queries, keys and values of one type, at least float32."""
        dtypes = (self.query.dtype, self.key.dtype, self.value.dtype)
        return self.to_dtype(reduce(torch.promote_types, dtypes, torch.float32))

    def to_dtype(self, dtype: torch.dtype) -> AttentionCall:
        """Return the call with queries, keys and values of a type."""
        if dtype == self.query.dtype == self.key.dtype == self.value.dtype:
            return self
        return map_fields(self, **dict.fromkeys(QKV, lambda tensor: tensor.to(dtype)))

    def select_samples(self, samples: slice | Int[Tensor, " selected"] | Bool[Tensor, " batch"]) -> AttentionCall:
        masks = ("keep", "bias", "query_mask", "key_mask", "query_positions", "key_positions")
        return map_fields(
            self,
            **dict.fromkeys(QKV, lambda tensor: tensor[samples]),
            **dict.fromkeys(masks, lambda tensor: tensor[samples] if len(tensor) > 1 else tensor),
            sink=lambda sink: sink if sink.ndim == 1 else sink[samples],
            starts=lambda starts: tuple(torch.tensor(starts)[samples].tolist()),
            constant=lambda constant: constant.select_samples(samples),
        )

    def select_heads(self, heads: Sequence[int]) -> AttentionCall:
        """Return the call of some heads, each with its own keys and values, none of them constant."""
        index, num_heads = as_slice(heads), self.query.shape[1]
        groups = [head // self.num_key_value_groups for head in heads]
        held = None if self.constant is None else self.constant.key_heads
        key_groups = groups if held is None else [held.index(group) for group in groups]
        return map_fields(
            replace(self, constant=None),
            query=lambda query: query[:, index],
            key=lambda key: key[:, as_slice(key_groups)],
            value=lambda value: value[:, as_slice(groups)],
            **dict.fromkeys(("keep", "bias"), lambda pairs: pairs[:, index] if pairs.shape[1] == num_heads else pairs),
            sink=lambda sink: sink[index] if sink.ndim == 1 else sink[:, index],
            operation=lambda operation: operation.select_heads(index),
        )

    def select_tokens(self, rows: slice, columns: slice) -> AttentionCall:
        """Return the call of some queries and keys."""
        starts = self.starts or (0,) * len(self.query)
        return map_fields(
            replace(self, starts=starts if columns.start else self.starts),
            query=lambda query: query[:, :, rows],
            **dict.fromkeys(("key", "value"), lambda tensor: tensor[:, :, columns]),
            **dict.fromkeys(("keep", "bias"), partial(_cut_pairs, rows, columns)),
            sink=lambda sink: sink if sink.ndim == 1 else sink[:, :, rows],
            **dict.fromkeys(("query_mask", "query_positions"), lambda of_queries: of_queries[:, rows]),
            **dict.fromkeys(("key_mask", "key_positions"), lambda of_keys: of_keys[:, columns]),
            offset=lambda offset: offset + rows.start - columns.start,
            starts=lambda starts: tuple(start - columns.start for start in starts),
        )


def _cut_pairs(rows: slice, columns: slice, pairs: Tensor) -> Tensor:
    pairs = pairs if pairs.shape[2] == 1 else pairs[:, :, rows]
    return pairs if pairs.shape[3] == 1 else pairs[..., columns]


def visible_mask(call: AttentionCall) -> Bool[Tensor, "#batch #head #query key"]:
    """Return which pairs of query and key may meet, by position, operation, mask and padding."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
    if call.causal:
        visible = visible.tril(diagonal=call.offset)
    operation = call.operation
    if operation is not None and operation.window is not None:
        visible = visible & (relative_positions(call) < operation.window)
    if operation is not None and operation.prefix:
        positions = torch.arange(keys, device=visible.device)[None]
        if call.key_mask is not None:
            positions = positions - call.key_mask.int().argmax(-1, keepdim=True)
        visible = visible | (positions < operation.prefix)[:, None, None, :]
    if call.keep is not None:
        visible = visible & call.keep
    if call.key_mask is not None:
        visible = visible & call.key_mask[:, None, None, :]
    return visible


def kept_pairs(mask: Tensor) -> Tensor:
    """Return which pairs may meet, of a mask that is added to scores: half of the least number of its type hides."""
    return mask > torch.finfo(mask.dtype).min / 2


def relative_positions(call: AttentionCall) -> Int[Tensor, "query key"]:
    """Return how many positions each key stands before a query, negative behind it."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    positions = torch.arange(queries, device=call.query.device) + call.offset
    return positions[:, None] - torch.arange(keys, device=call.query.device)


def slices(length: int, step: int) -> Iterator[slice]:
    """Yield the parts of a length, each of `step` entries but the last."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


_INDICES: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Indices by device: made once, for a step of decoding takes as long as few of them."""
MAX_INDICES = 1 << 12
"""Most indices that are kept; a process that replaces ever other heads, as `explore` does, begins anew then."""


def as_tensor(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor that nobody may write to."""
    index = None if is_traced() else _INDICES.get((indices, device))
    if index is None:
        with torch.inference_mode(False):
            index = torch.tensor(indices, dtype=torch.long, device=device)
        if type(index) is Tensor and not is_traced():
            if len(_INDICES) >= MAX_INDICES:
                _INDICES.clear()
            _INDICES[indices, device] = index
    return index


def as_slice(indices: Sequence[int]) -> slice | list[int]:
    """Return consecutive indices as a slice, which copies nothing; others as a list."""
    first, last = indices[0], indices[0] + len(indices)
    return slice(first, last) if list(indices) == list(range(first, last)) else list(indices)


def num_writes(tensor: Tensor) -> int | None:
    """Return how often a tensor has been written to; None in inference mode, where nothing counts it."""
    return None if tensor.is_inference() else tensor._version


def is_same_view(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.device == other.device
    )
