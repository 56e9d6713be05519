"""What an AttentionSpec accepts, and which backend computes it."""

import dataclasses
import json

import pytest

from regard.attention.call import Operation
from regard.attention.spec import ATTENTIONS, BACKENDS, EXTRAS, AttentionSpec
from regard.errors import UserError

pytestmark = pytest.mark.every_value

REFUSED = {
    "weighting": ({"weighting": "relu"}, "unknown weighting 'relu'; choose one of softmax, sigmoid, elu"),
    "feature_map": ({"feature_map": "exp"}, "unknown feature_map 'exp'; choose one of none, elu, mlp"),
    "normalisation": ({"normalisation": "l2"}, "unknown normalisation 'l2'; choose one of none, sum, clamped-sum"),
    "extra": ({"extra": "q-bias"}, f"unknown extra 'q-bias'; choose one of {', '.join(EXTRAS)}"),
    "positions": ({"positions": "xpos"}, "unknown positions 'xpos'; choose one of rotary, none, sinusoidal"),
    "backend": ({"backend": "quick"}, f"unknown backend 'quick'; choose one of {', '.join(BACKENDS)}"),
    "window": ({"window": 0}, "window must be a whole number of at least 1, got 0"),
    "a window that is true": ({"window": True}, "window must be a whole number of at least 1, got True"),
    "a window in parts": ({"window": 2.5}, "window must be a whole number of at least 1, got 2.5"),
    "prefix": ({"prefix": -1}, "prefix must be a whole number of at least 0, got -1"),
    "no prefix": ({"prefix": None}, "prefix must be a whole number of at least 0, got None"),
    "gate": ({"gate": "yes"}, "gate must be true or false, got 'yes'"),
    "top_k": ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
    "a gate a head and none": ({"gate_per_head": True}, "gate_per_head needs gate"),
    "values of two heads": ({"differential": True, "extra": "kv-bias"}, "expected no kv-bias"),
    "one key of two heads": ({"differential": True, "extra": "k-bias"}, "expected no k-bias"),
    "later keys of a sigmoid": (
        {"weighting": "sigmoid", "extra": "pseudo-scores"},
        "pseudo-scores need softmax over no later key, without a prefix; got weighting=sigmoid",
    ),
    "later keys that are seen": ({"prefix": 2, "extra": "pseudo-scores"}, "without a prefix; got prefix=2"),
    "softmax twice": ({"normalisation": "sum"}, "softmax is already normalised; leave normalisation at none"),
    "softpick twice": ({"weighting": "softpick", "normalisation": "sum"}, "softpick is already normalised"),
}
NOT_BY_BACKEND = {
    ("fused", "weighting=sigmoid"): {"weighting": "sigmoid"},
    ("fused", "positions=t5"): {"positions": "t5"},
    ("fused", "window with prefix"): {"window": 4, "prefix": 2},
    ("fused", "window with an extra column"): {"window": 4, "extra": "k-bias"},
    ("fused", "window with alibi"): {"window": 4, "positions": "alibi"},
    ("chunked", "weighting=softmax"): {},
    ("chunked", "a window"): {"weighting": "linear", "window": 4},
    ("chunked", "positions=alibi"): {"weighting": "linear", "positions": "alibi"},
    ("chunked", "an extra column"): {"weighting": "linear", "extra": "zero"},
    ("chunked", "log_length"): {"weighting": "linear", "log_length": True},
    ("pointwise", "weighting=softmax"): {},
    ("pointwise", "normalisation=clamped-sum"): {"weighting": "elu", "normalisation": "clamped-sum"},
    ("fused", "top_k"): {"top_k": 3},
    ("chunked", "top_k"): {"weighting": "linear", "top_k": 3},
    ("rowwise", "weighting=sigmoid"): {"weighting": "sigmoid"},
    ("sparse", "all keys without top_k"): {"weighting": "sigmoid"},
    ("sparse", "positions=alibi"): {"top_k": 8, "positions": "alibi"},
    ("flex", "weighting=linear"): {"weighting": "linear"},
    ("flex", "an extra column beside weights that are no softmax"): {"weighting": "sigmoid", "extra": "k-bias"},
}
RESOLVED = {
    "softmax": "fused",
    "sink-logit": "fused",
    "stable-mask": "fused",
    "kv-bias": "fused",
    "v-bias": "fused",
    "sigmoid-log-length": "pointwise",
    "elu-normalised": "pointwise",
    "linear-normalised": "chunked",
    "elu-kernel": "chunked",
    "mlp-kernel-normalised": "chunked",
    "softpick": "rowwise",
    "top-8": "sparse",
    "differential": "fused",
}


def unchecked(**choice: object) -> AttentionSpec:
    """A spec as it is before its checks: those of the tests' types would come first, which users do not have."""
    spec = object.__new__(AttentionSpec)
    vars(spec).update(AttentionSpec().to_dict() | choice)
    return spec


@pytest.mark.parametrize("name", REFUSED)
def test_a_choice_that_is_none_is_refused_with_what_is_allowed(name: str) -> None:
    choice, message = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        unchecked(**choice).__post_init__()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("backend, what", NOT_BY_BACKEND)
def test_a_backend_that_cannot_is_refused_with_those_that_can(backend: str, what: str) -> None:
    choice = NOT_BY_BACKEND[backend, what]
    with pytest.raises(UserError) as refusal:
        AttentionSpec(backend=backend, **choice)
    able = str(refusal.value).split("; choose ")[1].replace(" or ", ", ").split(", ")
    assert f"backend={backend} cannot compute {what}; " in str(refusal.value)
    assert "blockwise" in able
    assert backend not in able
    for other in able:
        assert AttentionSpec(backend=other, **choice).resolved == other


@pytest.mark.parametrize("name", RESOLVED)
def test_the_fastest_backend_is_taken(name: str) -> None:
    assert ATTENTIONS[name].resolved == RESOLVED[name]


def test_what_the_fused_kernels_cannot_is_computed_in_tiles() -> None:
    assert AttentionSpec(positions="t5").resolved == "rowwise"
    assert AttentionSpec(window=4, prefix=2, extra="kv-bias").resolved == "rowwise"
    assert AttentionSpec(weighting="sigmoid", positions="t5", extra="k-bias").resolved == "pointwise"
    assert AttentionSpec(weighting="elu", normalisation="clamped-sum").resolved == "blockwise"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_spec_survives_a_file(name: str) -> None:
    spec = ATTENTIONS[name]
    assert AttentionSpec(**json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_is_frozen_and_checked_again_when_it_is_changed() -> None:
    spec = ATTENTIONS["sigmoid"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.window = 3  # type: ignore[misc]
    with pytest.raises(UserError):
        spec.changed(window=-3)
    assert spec.changed(window=3).window == 3
    assert spec.window is None


def test_what_is_learned_is_named() -> None:
    named = {name: spec.learns for name, spec in ATTENTIONS.items()}
    assert named["softmax"] == named["off-by-one"] == named["sigmoid-log-length"] == named["elu-kernel"] == ()
    assert named["mlp-kernel"] == ("feature_map=mlp",)
    assert named["differential"] == ("differential",)
    assert named["value-residual"] == ("value_residual",)
    assert named["gated-per-head"] == ("gate",)
    assert named["top-8"] == named["stable-mask"] == ()
    assert named["k-bias"] == ("extra=k-bias",)
    assert AttentionSpec(extra="sink-logit", positions="t5", gate=True).learns == (
        "extra=sink-logit",
        "positions=t5",
        "gate",
    )


def test_an_operation_takes_the_choices_of_its_spec() -> None:
    spec = AttentionSpec(weighting="elu", normalisation="sum", window=5, prefix=2)
    operation = Operation.from_spec(spec, shift=-1.5)
    assert operation == Operation(
        weighting="elu", normalisation="sum", window=5, prefix=2, shift=-1.5, backend="pointwise"
    )
