"""What one layer asks of attention, and what may be asked of the weights on the way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Float
from torch import Tensor

PER_KEY = frozenset({"column_mass", "column_square"})
PER_QUERY = frozenset({"lse", "entropy", "distance", "row_sum", "virtual_sink_mass", "first_mass"})
PER_SAMPLE = frozenset({"spectral_bound"})
PER_CALL = frozenset({"weights"})
REDUCTIONS = PER_KEY | PER_QUERY | PER_SAMPLE | PER_CALL


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
    bias: Float[Tensor, "#batch #head #query key"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, " head"] | None = None
    query_real: Bool[Tensor, "batch query"] | None = None
    key_real: Bool[Tensor, "batch key"] | None = None
    starts: tuple[int, ...] | None = None
    """Where each sample's first real key stands, for `first_mass`: 0 if None, negative if a cache has dropped it."""
    dropout: float = 0.0

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
        return replace(self, **{p: t.detach() for p in parts if (t := getattr(self, p)) is not None})


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
