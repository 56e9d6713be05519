"""Which attention: a frozen choice by names, checked when it is made, and the named ones of the literature."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from regard.attention.positions import POSITIONS
from regard.attention.weightings import FEATURE_MAPS, NORMALISATIONS, WEIGHTINGS
from regard.errors import UserError

EXTRAS = ("none", "zero", "sink-logit", "k-bias", "v-bias", "kv-bias")
BACKENDS = ("auto", "materialised", "blockwise", "pointwise", "rowwise", "chunked", "fused", "flex")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention: scores s_ij = φ(q_i)·φ(k_j) / √d, their weighting, and what stands around it.

    `weighting`, `normalisation`, `feature_map`: names out of `regard.attention.weightings`. `extra`: a column beside
    the keys that every query sees: `zero` (logit and value zero: off-by-one softmax), `sink-logit` (a learned logit a
    head, value zero), `k-bias` (a learned key k*, value zero), `kv-bias` (k* and v*); or `v-bias`, v* added to the
    output. `shared_extra`: one k*, v* for all heads. `log_length`: the score is lowered by log T, T the longest
    sequence of the model. `positions`: out of `regard.attention.positions.POSITIONS`. `window`: query i sees keys
    i−window+1 … i. `prefix`: so many first tokens see each other and are seen by all. `sink_token`: a learned embedding
    stands in front of every sequence. `gate`: the output is multiplied by σ(W_g x). `qk_norm`: queries and keys are
    normalised (RMS) before their positions are put in. `form`: how it is computed; `auto` takes the fastest.

    Raises UserError where a choice is unknown, or cannot be computed in the form that is asked for.
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
    sink_token: bool = False
    gate: bool = False
    qk_norm: bool = False
    form: str = "auto"

    def __post_init__(self) -> None:
        """Check every choice, and that the form can compute them all."""
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"attention: {name} is one of {', '.join(known)}, got {value!r}")
        for name, least in (("window", 1), ("prefix", 0)):
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"attention: {name} is a whole number of at least {least}, got {value!r}")
        for name in ("shared_extra", "log_length", "sink_token", "gate", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"attention: {name} is true or false, got {getattr(self, name)!r}")
        if self.weighting in ("softmax", "softpick") and self.normalisation != "none":
            raise UserError(f"attention: {self.weighting} is normalised by itself; leave normalisation at none")
        if self.form != "auto" and (why := _obstacle(self, self.form)):
            raise UserError(f"attention: the form {self.form} cannot compute {why}; {_possible(self)} can")

    @property
    def resolved(self) -> str:
        """The form that computes whole sequences: the one asked for, or the first that can in order of speed."""
        return self.form if self.form != "auto" else next(form for form in _PREFERRED if not _obstacle(self, form))

    @property
    def learns(self) -> tuple[str, ...]:
        """What in it is learned beside the projections, by name: empty for one that fits any trained model."""
        parts = {
            "feature_map=mlp": self.feature_map == "mlp",
            f"extra={self.extra}": self.extra in ("sink-logit", "k-bias", "v-bias", "kv-bias"),
            f"positions={self.positions}": self.positions in ("learned", "t5"),
            "sink_token": self.sink_token,
            "gate": self.gate,
            "qk_norm": self.qk_norm,
        }
        return tuple(name for name, there in parts.items() if there)

    def with_(self, **changes: Any) -> AttentionSpec:
        """The same with some choices changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every choice by name, for a file."""
        return asdict(self)


_KNOWN: dict[str, Any] = {
    "weighting": tuple(WEIGHTINGS),
    "feature_map": tuple(FEATURE_MAPS),
    "normalisation": tuple(NORMALISATIONS),
    "extra": EXTRAS,
    "positions": POSITIONS,
    "form": BACKENDS,
}
_PREFERRED = ("fused", "chunked", "pointwise", "rowwise", "blockwise")
_IN_SCORES = ("t5", "t5-bucket-number")


def _obstacle(spec: AttentionSpec, form: str) -> str | None:
    """What of a spec a form cannot compute; None if it can."""
    weighting = WEIGHTINGS[spec.weighting]
    column = spec.extra not in ("none", "v-bias")
    obstacles = {
        "fused": {
            f"weighting={spec.weighting}": spec.weighting != "softmax",
            f"positions={spec.positions}": spec.positions in _IN_SCORES,
            "window with prefix": spec.window is not None and spec.prefix > 0,
            "window with an extra column": spec.window is not None and column,
            "window with alibi": spec.window is not None and spec.positions == "alibi",
        },
        "chunked": {
            f"weighting={spec.weighting}": not weighting.linear,
            f"positions={spec.positions}": spec.positions in ("alibi", *_IN_SCORES),
            "a window": spec.window is not None,
            "an extra column": column,
            "log_length": spec.log_length,
        },
        "pointwise": {
            f"weighting={spec.weighting}": spec.weighting not in ("sigmoid", "elu"),
            f"normalisation={spec.normalisation}": spec.normalisation == "clamped-sum",
        },
        "rowwise": {
            f"weighting={spec.weighting}": spec.weighting not in ("softmax", "softpick"),
        },
        "flex": {
            f"weighting={spec.weighting}": spec.weighting not in ("softmax", "sigmoid", "elu"),
            "an extra column beside weights that are no softmax": column and spec.weighting != "softmax",
        },
    }
    return next((what for what, there in obstacles.get(form, {}).items() if there), None)


def _possible(spec: AttentionSpec) -> str:
    return ", ".join(form for form in BACKENDS if form != "auto" and not _obstacle(spec, form))


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
    "k-bias": AttentionSpec(extra="k-bias"),
    "v-bias": AttentionSpec(extra="v-bias"),
    "kv-bias": AttentionSpec(extra="kv-bias"),
    "k-bias-shared": AttentionSpec(extra="k-bias", shared_extra=True),
    "v-bias-shared": AttentionSpec(extra="v-bias", shared_extra=True),
    "kv-bias-shared": AttentionSpec(extra="kv-bias", shared_extra=True),
    "sink-token": AttentionSpec(sink_token=True),
    "softpick": AttentionSpec(weighting="softpick"),
    "gated": AttentionSpec(gate=True),
    "qk-norm": AttentionSpec(qk_norm=True),
}
"""The operations of Gu et al. 2025 (attention operations; K/V biases), and those that stand beside them."""
