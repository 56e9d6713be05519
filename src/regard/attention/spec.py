"""Attention by name: what a spec may choose, which backend computes it, and the named specs of the literature."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from regard.attention.positions import POSITIONS
from regard.attention.weightings import FEATURE_MAPS, NORMALISATIONS, WEIGHTINGS
from regard.errors import UserError, warn_user

EXTRAS = ("none", "zero", "sink-logit", "pseudo-scores", "k-bias", "v-bias", "kv-bias")
BACKENDS = ("auto", "materialised", "blockwise", "pointwise", "rowwise", "chunked", "fused", "flex", "sparse")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention: scores s_ij = φ(q_i)·φ(k_j) / √d, their weighting, and what stands around it.

    Attributes:
        weighting: Name in `regard.attention.weightings`, as are those of `feature_map` (φ) and `normalisation`.
        extra: A column beside the keys that every query sees: `zero` (logit and value zero: off-by-one softmax),
            `sink-logit` (a learned logit a head, value zero), `pseudo-scores` (the sum of what StableMask writes over
            the diagonal, value zero), `k-bias` (a learned key k*, value zero) or `kv-bias` (k* and v*). `v-bias`: v*
            is added to the output.
        shared_extra: One k* and v* for all heads.
        log_length: Scores are lowered by log T, T the longest sequence of the model.
        positions: One of `regard.attention.positions.POSITIONS`.
        window: Query i sees keys i−window+1 … i; None: all.
        prefix: So many first tokens see each other and are seen by all.
        top_k: A query sees only the keys of its `top_k` largest scores, and others that score as much as the least.
        sink_token: A learned embedding stands before every sequence.
        gate: The output is multiplied by σ(W_g x).
        gate_per_head: W_g x has one entry a head, not one a feature.
        value_residual: After the first layer values are λ₁ v⁽¹⁾ + λ₂ v, with v⁽¹⁾ those of the first layer.
        differential: Heads stand in pairs; the output is the first's minus λ times the second's, normalized.
        qk_norm: Queries and keys are normalized (RMS) before positions are applied.
        backend: How it is computed; `auto`: the fastest way.

    Raises:
        UserError: A choice is unknown, or the backend cannot compute the others.
    """

    weighting: str = "softmax"
    feature_map: str = "none"
    normalisation: str = "none"
    extra: str = "none"
    shared_extra: bool = False
    log_length: bool = False
    positions: str = "rotary"
    window: int | None = None
    prefix: int = 0
    top_k: int | None = None
    sink_token: bool = False
    gate: bool = False
    gate_per_head: bool = False
    value_residual: bool = False
    differential: bool = False
    qk_norm: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"attention: unknown {name} {value!r}; choose one of {', '.join(choices)}")
        limits = [(name, getattr(self, name), 1) for name in ("window", "top_k") if getattr(self, name) is not None]
        for name, value, minimum in (*limits, ("prefix", self.prefix, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise UserError(f"attention: {name} must be a whole number of at least {minimum}, got {value!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"attention: {name} must be true or false, got {getattr(self, name)!r}")
        if self.weighting in ("softmax", "softpick") and self.normalisation != "none":
            raise UserError(f"attention: {self.weighting} is already normalised; leave normalisation at none")
        if self.gate_per_head and not self.gate:
            raise UserError("attention: gate_per_head needs gate")
        if self.differential and self.extra in ("k-bias", "v-bias", "kv-bias"):
            raise UserError(f"attention: differential joins values of two heads; expected no {self.extra}")
        if self.extra == "pseudo-scores" and (self.weighting != "softmax" or self.prefix):
            got = f"prefix={self.prefix}" if self.weighting == "softmax" else f"weighting={self.weighting}"
            raise UserError(f"attention: pseudo-scores need softmax over no later key, without a prefix; got {got}")
        if self.backend != "auto" and (obstacle := _obstacle(self, self.backend)):
            *others, last = [backend for backend in BACKENDS if backend != "auto" and not _obstacle(self, backend)]
            advice = f"choose {', '.join(others)} or {last}"
            raise UserError(f"attention: backend={self.backend} cannot compute {obstacle}; {advice}")

    @property
    def resolved(self) -> str:
        """The backend that computes whole sequences: as chosen, or the fastest that can."""
        backends = _BY_SPEED if self.backend == "auto" else (self.backend,)
        return next(backend for backend in backends if not _obstacle(self, backend))

    @property
    def learns(self) -> tuple[str, ...]:
        """What is learned beside the projections; empty for a spec that fits any trained model."""
        parts = {
            "feature_map=mlp": self.feature_map == "mlp",
            f"extra={self.extra}": self.extra in ("sink-logit", "k-bias", "v-bias", "kv-bias"),
            f"positions={self.positions}": self.positions in ("learned", "t5"),
            "sink_token": self.sink_token,
            **{name: getattr(self, name) for name in _AROUND},
        }
        return tuple(name for name, is_learned in parts.items() if is_learned)

    @property
    def idle(self) -> tuple[str, ...]:
        """Options that change no output beside the others."""
        has_column = self.extra not in ("none", "v-bias")
        is_normalised = self.weighting in ("softmax", "softpick") or self.normalisation != "none"
        options = {
            "log_length": self.log_length and self.weighting == "softmax" and not has_column,
            "shared_extra": self.shared_extra and self.extra not in ("k-bias", "v-bias", "kv-bias"),
            f"extra={self.extra}": has_column and self.extra != "kv-bias" and not is_normalised,
        }
        return tuple(name for name, is_idle in options.items() if is_idle)

    def changed(self, **changes: Any) -> AttentionSpec:
        """Return the same with some choices changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return every choice by name."""
        return asdict(self)


def split_changes(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of an attention and the changes behind it: of `sigmoid+window=8` sigmoid and window, 8.

    Raises:
        UserError: There is nothing of a change's name that could be changed.
    """
    name, *changes = text.split("+")
    values: dict[str, Any] = {}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in AttentionSpec.__dataclass_fields__:
            known = ", ".join(AttentionSpec.__dataclass_fields__)
            raise UserError(f"attention: unknown change {field!r}; choose from {known}, such as sigmoid+window=8")
        values[field] = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
    return name, values


def warn_of_idle(spec: AttentionSpec, name: str) -> None:
    """Warn of options of an attention, `name` for the reader, that change nothing."""
    if spec.idle:
        warn_user(f"attention: {' and '.join(spec.idle)} of {name} change no output beside {spec.weighting}")


_CHOICES: dict[str, tuple[str, ...]] = {"weighting": tuple(WEIGHTINGS), "feature_map": tuple(FEATURE_MAPS)}
_CHOICES |= {"normalisation": tuple(NORMALISATIONS), "extra": EXTRAS, "positions": POSITIONS, "backend": BACKENDS}
_AROUND = ("gate", "value_residual", "differential", "qk_norm")
_SWITCHES = ("shared_extra", "log_length", "sink_token", "gate_per_head", *_AROUND)
_BY_SPEED = ("fused", "chunked", "pointwise", "rowwise", "sparse", "blockwise")
_IN_SCORES = ("t5", "t5-bucket-number")


def _obstacle(spec: AttentionSpec, backend: str) -> str | None:
    """Return what of a spec a backend cannot compute; None if it can."""
    weighting = WEIGHTINGS[spec.weighting]
    has_column = spec.extra not in ("none", "v-bias")
    if spec.top_k is not None and backend not in ("materialised", "blockwise", "sparse"):
        return "top_k"
    obstacles = {
        "fused": {
            f"weighting={spec.weighting}": spec.weighting != "softmax",
            f"positions={spec.positions}": spec.positions in _IN_SCORES,
            "window with prefix": spec.window is not None and spec.prefix > 0,
            "window with an extra column": spec.window is not None and has_column,
            "window with alibi": spec.window is not None and spec.positions == "alibi",
        },
        "chunked": {
            f"weighting={spec.weighting}": not weighting.linear,
            f"positions={spec.positions}": spec.positions in ("alibi", *_IN_SCORES),
            "a window": spec.window is not None,
            "an extra column": has_column,
            "log_length": spec.log_length,
        },
        "pointwise": {
            f"weighting={spec.weighting}": spec.weighting not in ("sigmoid", "elu"),
            f"normalisation={spec.normalisation}": spec.normalisation == "clamped-sum",
        },
        "rowwise": {f"weighting={spec.weighting}": spec.weighting not in ("softmax", "softpick")},
        "sparse": {
            "all keys without top_k": spec.top_k is None,
            f"positions={spec.positions}": spec.positions in ("alibi", *_IN_SCORES),
        },
        "flex": {
            f"weighting={spec.weighting}": spec.weighting not in ("softmax", "sigmoid", "elu"),
            "an extra column beside weights that are no softmax": has_column and spec.weighting != "softmax",
        },
    }
    return next((name for name, applies in obstacles.get(backend, {}).items() if applies), None)


ATTENTIONS: dict[str, AttentionSpec] = {
    "softmax": AttentionSpec(),
    "sigmoid": AttentionSpec(weighting="sigmoid"),
    "sigmoid-normalised": AttentionSpec(weighting="sigmoid", normalisation="sum"),
    "sigmoid-log-length": AttentionSpec(weighting="sigmoid", log_length=True),
    "elu": AttentionSpec(weighting="elu"),
    "elu-normalised": AttentionSpec(weighting="elu", normalisation="sum"),
    "linear": AttentionSpec(weighting="linear"),
    "linear-normalised": AttentionSpec(weighting="linear", normalisation="clamped-sum"),
    "elu-kernel": AttentionSpec(weighting="linear", feature_map="elu"),
    "elu-kernel-normalised": AttentionSpec(weighting="linear", feature_map="elu", normalisation="sum"),
    "mlp-kernel": AttentionSpec(weighting="linear", feature_map="mlp"),
    "mlp-kernel-normalised": AttentionSpec(weighting="linear", feature_map="mlp", normalisation="clamped-sum"),
    "off-by-one": AttentionSpec(extra="zero"),
    "sink-logit": AttentionSpec(extra="sink-logit"),
    "stable-mask": AttentionSpec(extra="pseudo-scores"),
    "k-bias": AttentionSpec(extra="k-bias"),
    "v-bias": AttentionSpec(extra="v-bias"),
    "kv-bias": AttentionSpec(extra="kv-bias"),
    "k-bias-shared": AttentionSpec(extra="k-bias", shared_extra=True),
    "v-bias-shared": AttentionSpec(extra="v-bias", shared_extra=True),
    "kv-bias-shared": AttentionSpec(extra="kv-bias", shared_extra=True),
    "sink-token": AttentionSpec(sink_token=True),
    "softpick": AttentionSpec(weighting="softpick"),
    "gated": AttentionSpec(gate=True),
    "gated-per-head": AttentionSpec(gate=True, gate_per_head=True),
    "value-residual": AttentionSpec(value_residual=True),
    "differential": AttentionSpec(differential=True),
    "top-8": AttentionSpec(top_k=8),
    "qk-norm": AttentionSpec(qk_norm=True),
}
"""The operations of Gu et al. 2025 (attention operations; K/V biases), and others beside them."""
