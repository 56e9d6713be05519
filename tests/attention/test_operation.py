"""Every named attention, by every backend that can compute it, against the formulas of the papers."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import reference
from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation, visible_mask
from regard.attention.operator import BACKENDS, attend, compute_output, reduce, select_backend, simplify
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense
from regard.attention.spec import ATTENTIONS, AttentionSpec
from tests.attention import formulas

NOTHING = ReductionRequest()
FAST = ("materialised", "blockwise", "pointwise", "rowwise", "chunked", "fused", "sparse")
MORE = {
    "alibi": AttentionSpec(positions="alibi"),
    "alibi-sink": AttentionSpec(positions="alibi", extra="sink-logit"),
    "alibi-kv": AttentionSpec(positions="alibi", extra="kv-bias"),
    "t5": AttentionSpec(positions="t5"),
    "window": AttentionSpec(window=5),
    "prefix": AttentionSpec(prefix=4),
    "prefix-kv": AttentionSpec(prefix=4, extra="kv-bias"),
    "prefix-alibi": AttentionSpec(prefix=3, positions="alibi"),
    "window-prefix": AttentionSpec(window=4, prefix=3),
    "window-sink": AttentionSpec(window=4, extra="sink-logit"),
    "sigmoid-window": AttentionSpec(weighting="sigmoid", window=6),
    "sigmoid-kv": AttentionSpec(weighting="sigmoid", extra="kv-bias"),
    "sigmoid-alibi-prefix": AttentionSpec(weighting="sigmoid", positions="alibi", prefix=4, log_length=True),
    "elu-normalised-window-prefix": AttentionSpec(weighting="elu", normalisation="sum", window=3, prefix=2),
    "linear-prefix": AttentionSpec(weighting="linear", normalisation="clamped-sum", prefix=5),
    "t5-window-prefix-kv": AttentionSpec(positions="t5", window=2, prefix=2, extra="kv-bias"),
    "sigmoid-t5": AttentionSpec(weighting="sigmoid", positions="t5", log_length=True),
    "elu-normalised-kv": AttentionSpec(weighting="elu", normalisation="sum", extra="kv-bias", log_length=True),
    "softpick-t5-kv": AttentionSpec(weighting="softpick", positions="t5", extra="kv-bias", window=3, prefix=1),
    "softpick-zero": AttentionSpec(weighting="softpick", extra="zero"),
    "stable-mask-alibi": AttentionSpec(positions="alibi", extra="pseudo-scores"),
    "stable-mask-top-3": AttentionSpec(top_k=3, extra="pseudo-scores", window=5),
    "top-3-sink": AttentionSpec(top_k=3, extra="sink-logit"),
    "sigmoid-top-2-window-prefix": AttentionSpec(weighting="sigmoid", top_k=2, window=4, prefix=2),
    "linear-top-3-t5": AttentionSpec(weighting="linear", top_k=3, positions="t5"),
    "softmax-log-length-sink": AttentionSpec(log_length=True, extra="sink-logit"),
}
EVERY = ATTENTIONS | MORE


def column_beside(extra: str, weighting: str, prefix: int) -> str:
    """The column that was drawn, or a learned logit where pseudo-scores do not go with the rest."""
    return "sink-logit" if extra == "pseudo-scores" and (weighting != "softmax" or prefix) else extra


def able(spec: AttentionSpec, backend: str) -> bool:
    try:
        spec.changed(backend=backend)
    except ValueError:
        return False
    return True


def parts(
    spec: AttentionSpec, *, batch: int = 1, groups: int = 2, shares: int = 2, length: int = 7, seed: int = 0
) -> dict[str, Any]:
    """The tensors of a call of one spec, float64: leaves that take gradients, by the names of `formulas.output`."""
    generator = torch.Generator().manual_seed(seed)
    width, value_width, heads = 4, 4, groups * shares

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    map_ = {"elu": lambda x: torch.where(x > 0, x + 1, x.exp()), "mlp": lambda x: x.relu()}.get(spec.feature_map)
    q, k = normal(batch, heads, length, width), normal(batch, groups, length, width)
    found = {"q": q, "k": k, "v": normal(batch, groups, length, value_width)}
    if map_ is not None:
        found |= {"q": map_(q), "k": map_(k)}
    own = 1 if spec.shared_extra else heads
    if spec.extra in ("k-bias", "kv-bias"):
        found["extra_key"] = normal(own, width)
    if spec.extra in ("v-bias", "kv-bias"):
        found["extra_value"] = normal(own, value_width)
    if spec.extra == "sink-logit":
        found["logit"] = normal(heads)
    if spec.extra == "pseudo-scores":  # of rows of StableMask that are longer than the sequence
        decay = [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
        sums = [[sum(math.exp(-g * j) for j in range(i + 1, length + 4)) for i in range(length)] for g in decay]
        found["logit"] = torch.tensor(sums, dtype=torch.float64).log().expand(batch, -1, -1)
    if spec.extra == "zero":
        found["logit"] = torch.zeros(heads, dtype=torch.float64)
    if spec.positions == "alibi":
        found["slopes"] = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
    if spec.positions == "t5":
        found["distance"] = normal(heads, length)
    return found


def choices(spec: AttentionSpec, length: int = 7) -> dict[str, Any]:
    return {
        "weighting": spec.weighting,
        "normalisation": spec.normalisation,
        "shift": -math.log(length) if spec.log_length else 0.0,
        "window": spec.window,
        "prefix": spec.prefix,
        "top_k": spec.top_k,
    }


def call_of(spec: AttentionSpec, tensors: dict[str, Tensor], *, length: int = 7, **options: Any) -> AttentionCall:
    learned = {name: tensors[name] for name in ("extra_key", "extra_value", "distance", "slopes") if name in tensors}
    operation = Operation.from_spec(spec, shift=choices(spec, length)["shift"], **learned)
    q, k, v = (tensors[name] for name in "qkv")
    defaults = {"scale": 0.7, "causal": True, "sink": tensors.get("logit"), "operation": operation}
    return AttentionCall(query=q, key=k, value=v, **(defaults | options))


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as leaves of a graph: all but slopes, and a logit that is constantly zero."""
    return {name: t.clone().requires_grad_(name != "slopes" and bool(t.any())) for name, t in tensors.items()}


def gradients(output: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    onto = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    asked = {name: t for name, t in tensors.items() if t.requires_grad}
    return dict(zip(asked, torch.autograd.grad(output, list(asked.values()), onto), strict=True))


def assert_like_formulas(found: Tensor, expected: Tensor, tensors: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    """The same output and the same gradients; to be called once, as the graphs are gone afterwards."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if not tensors:
        return
    got, right = gradients(found, tensors), gradients(expected, tensors)
    for name, gradient in right.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


CASES = [(name, backend) for name, spec in EVERY.items() for backend in FAST if able(spec, backend)]


@pytest.mark.every_value
@pytest.mark.parametrize("name, backend", CASES)
def test_every_attention_by_every_backend_has_the_output_and_gradients_of_the_papers(name: str, backend: str) -> None:
    spec = EVERY[name].changed(backend=backend)
    tensors = leaves(parts(spec))
    call = call_of(spec, tensors)
    assert call.operation is not None
    expected = formulas.output(**tensors, **choices(spec), scale=0.7)
    assert_like_formulas(BACKENDS[backend](call, call.operation), expected, tensors)


@pytest.mark.every_value
@pytest.mark.parametrize("name", EVERY)
def test_attend_takes_the_backend_of_the_spec_and_has_the_output_of_the_papers(name: str) -> None:
    spec = EVERY[name]
    tensors = leaves(parts(spec, shares=1))
    call = call_of(spec, tensors)
    expected = formulas.output(**tensors, **choices(spec), scale=0.7)
    output, found = attend(call, NOTHING)
    assert not found
    assert_like_formulas(output, expected, tensors)
    simple = simplify(call)[0]
    if simple.operation is not None:
        has_few_keys = spec.top_k is not None  # more than one in eight of them is among the largest
        assert select_backend(simple, simple.operation) == ("blockwise" if has_few_keys else spec.resolved)


@pytest.mark.parametrize("backend, window", [("blockwise", None), ("blockwise", 2), ("fused", None), ("rowwise", 2)])
def test_a_prefix_opens_what_is_to_come_and_nothing_that_the_caller_hides(backend: str, window: int | None) -> None:
    """Entries that `keep` hides, two of them in the prefix, weigh nothing; all others are as without it."""
    spec = AttentionSpec(prefix=3, window=window, backend=backend)
    tensors = parts(spec, length=5)
    call = call_of(spec, tensors, length=5)
    keep = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    keep[..., 0, 2] = keep[..., 4, 1] = keep[..., 4, 4] = False
    last = 5 if window is None else window
    see = torch.tensor([[j < 3 or 0 <= i - j < last for j in range(5)] for i in range(5)]) & keep
    assert torch.equal(visible_mask(replace(call, keep=keep)), see)
    q, k, v = (tensors[name] for name in "qkv")
    expected = (0.7 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~see, -torch.inf).softmax(-1)
    expected = expected @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(compute_output(replace(call, keep=keep)), expected)
    assert not torch.equal(visible_mask(call).expand_as(see), see)


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionSpec, dict[str, Tensor], dict[str, Any]]:
    """A random spec with what it learns, and the options of a call: cached, padded on either side, or whole."""
    weighting = draw(st.sampled_from(["softmax", "sigmoid", "elu", "linear", "softpick"]))
    own = weighting in ("softmax", "softpick")
    spec = AttentionSpec(
        weighting=weighting,
        normalisation="none"
        if own
        else draw(st.sampled_from(["none", "clamped-sum"] + ["sum"] * (weighting != "linear"))),
        extra=draw(st.sampled_from(["none", "zero", "sink-logit", "k-bias", "v-bias", "kv-bias"])),
        shared_extra=draw(st.booleans()),
        positions=draw(st.sampled_from(["rotary", "alibi", "t5"])),
        window=draw(st.one_of(st.none(), st.integers(1, 12))),
        prefix=draw(st.sampled_from([0, 0, 1, 3, 20])),
        log_length=draw(st.booleans()),
    )
    length = draw(st.integers(1, 10))
    sizes = {"batch": draw(st.integers(1, 2)), "groups": draw(st.integers(1, 2)), "shares": draw(st.integers(1, 2))}
    tensors = parts(spec, length=length, seed=draw(st.integers(0, 1000)), **sizes)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        cut = draw(st.integers(0, length - 1))
        tensors["q"] = tensors["q"][:, :, cut:]
        options["offset"] = cut
    if draw(st.booleans()):
        real = torch.ones(sizes["batch"], length, dtype=torch.bool)
        for b in range(sizes["batch"]):
            at = draw(st.integers(0, length - 1))
            real[b, slice(0, at) if draw(st.booleans()) else slice(at + 1, None)] = False
        options["key_mask"] = real
    return spec, tensors, options


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_any_call_of_any_spec_has_the_output_and_gradients_of_the_papers(
    case: tuple[AttentionSpec, dict[str, Tensor], dict[str, Any]],
) -> None:
    spec, tensors, options = case
    tensors = leaves(tensors)
    length = tensors["k"].shape[2]
    expected = formulas.output(**tensors, **choices(spec, length), **options, scale=0.7)
    output = compute_output(call_of(spec, tensors, length=length, **options))
    used = {name: t for name, t in tensors.items() if t.requires_grad and _reaches(expected, t)}
    assert_like_formulas(output, expected, used)


def _reaches(output: Tensor, leaf: Tensor) -> bool:
    """Whether an output depends on a leaf: not where no query sees anything."""
    if not output.requires_grad:
        return False
    return torch.autograd.grad(output.sum(), leaf, retain_graph=True, allow_unused=True)[0] is not None


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_reductions_by_rows_are_those_of_the_whole_matrix(
    case: tuple[AttentionSpec, dict[str, Tensor], dict[str, Any]],
) -> None:
    spec, tensors, options = case
    call = call_of(spec, tensors, length=tensors["k"].shape[2], **options)
    wanted = ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS), num_first_keys=2)
    output, found = attend(call, wanted)
    expected = reduce_dense(call, wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        near = 1e-5 if name == "spectral_bound" else 1e-9
        torch.testing.assert_close(found[name], tensor, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(output, reference.attend(call), rtol=1e-9, atol=1e-9)


def test_the_virtual_sink_is_the_mass_on_the_column() -> None:
    """Scores are zero: of two keys and a column of logit log 2, the last query gives the column 2 of 4 parts."""
    zeros = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    column = torch.tensor([math.log(2)], dtype=torch.float64)
    call = AttentionCall(
        query=zeros, key=zeros, value=zeros, scale=1.0, causal=True, sink=column, operation=Operation()
    )
    found = reduce(call, ReductionRequest(names=frozenset({"virtual_sink_mass", "first_mass"})))
    torch.testing.assert_close(found["virtual_sink_mass"][0, 0], torch.tensor([2 / 3, 1 / 2], dtype=torch.float64))
    torch.testing.assert_close(found["first_mass"][0, 0, :, 0], torch.tensor([1 / 3, 1 / 4], dtype=torch.float64))


def test_what_softpick_leaves_out_of_a_row_is_no_virtual_sink() -> None:
    """Scores log 3 and −log 2: relu(eˢ − 1) are 2 and 0 of an absolute sum of 2.5; nothing stands beside the keys."""
    query = torch.tensor([[[[1.0], [1.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[math.log(3)], [-math.log(2)]]]], dtype=torch.float64)
    call = AttentionCall(
        query=query, key=key, value=key, scale=1.0, causal=True, operation=Operation(weighting="softpick")
    )
    found = reduce(call, ReductionRequest(names=frozenset({"row_sum", "virtual_sink_mass"})))
    assert found["row_sum"][0, 0].tolist() == pytest.approx([1.0, 0.8])
    assert found["virtual_sink_mass"][0, 0].tolist() == [0.0, 0.0]


def test_weights_of_either_sign_are_measured_by_their_share_of_the_absolute_sum() -> None:
    """The last query has scores 3 and −1: shares of 3/4 and 1/4; its weights sum to 2."""
    query = torch.tensor([[[[1.0], [1.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[3.0], [-1.0]]]], dtype=torch.float64)
    call = AttentionCall(
        query=query, key=key, value=key, scale=1.0, causal=True, operation=Operation(weighting="linear")
    )
    names = frozenset({"first_mass", "row_sum", "lse", "weights"})
    found = reduce(call, ReductionRequest(names=names))
    assert found["first_mass"][0, 0, :, 0].tolist() == pytest.approx([1.0, 0.75])
    assert found["row_sum"][0, 0].tolist() == [3.0, 2.0]
    assert found["lse"][0, 0].tolist() == pytest.approx([math.log(3), math.log(4)])
    assert found["weights"][0].flatten().tolist() == pytest.approx([1.0, 0.0, 0.75, 0.25])


@pytest.mark.parametrize("name", ["softmax", "v-bias", "v-bias-shared", "sink-logit", "off-by-one", "qk-norm"])
def test_softmax_with_no_more_than_a_logit_is_no_operation(name: str) -> None:
    call, added = simplify(call_of(ATTENTIONS[name], parts(ATTENTIONS[name])))
    assert call.operation is None
    assert (added is None) != name.startswith("v-bias")


@pytest.mark.parametrize("name", ["sigmoid", "kv-bias", "alibi", "v-bias", "softpick", "sigmoid-kv", "elu-normalised"])
@pytest.mark.parametrize("gated", [False, True])
def test_constant_heads_stand_beside_an_operation(name: str, gated: bool) -> None:
    spec = EVERY[name]
    tensors = leaves(parts(spec))
    length = tensors["q"].shape[2]
    matrices = torch.rand(2, length, length, dtype=torch.float64).tril() + torch.eye(length, dtype=torch.float64)
    gate = torch.tensor([0.25, 0.5], dtype=torch.float64) if gated else None
    call = dataclasses.replace(
        call_of(spec, tensors), constant=ConstantHeadsInput(matrices=matrices, heads=(0, 3), gate=gate)
    )
    wanted = ReductionRequest(names=frozenset({"column_mass", "virtual_sink_mass"}))
    output, found = attend(call, wanted)
    own = formulas.output(**tensors, **choices(spec), scale=0.7)
    fixed = (matrices / matrices.sum(-1, keepdim=True)) @ tensors["v"]
    if spec.extra == "v-bias":
        fixed = fixed + tensors["extra_value"][[0, 3]][:, None]
    share = torch.zeros(2, dtype=torch.float64) if gate is None else gate
    expected = own.clone()
    expected[:, [0, 3]] = share[:, None, None] * own[:, [0, 3]] + (1 - share[:, None, None]) * fixed
    assert_like_formulas(output, expected, tensors)
    torch.testing.assert_close(output, reference.attend(call), rtol=1e-9, atol=1e-9)
    total = found["column_mass"].sum(-1) + found["virtual_sink_mass"].sum(-1)
    if name != "softpick":
        torch.testing.assert_close(total, torch.full_like(total, length), rtol=1e-6, atol=1e-6)


def test_a_learned_logit_without_an_operation_has_the_gradients_of_the_papers() -> None:
    for length in (1, 2, 9):
        tensors = leaves(parts(ATTENTIONS["sink-logit"], length=length))
        call = dataclasses.replace(call_of(ATTENTIONS["sink-logit"], tensors), operation=None)
        output, found = attend(call, ReductionRequest(names=frozenset({"virtual_sink_mass"})))
        assert_like_formulas(output, formulas.output(**tensors, scale=0.7), tensors)
        torch.testing.assert_close(
            found["virtual_sink_mass"],
            reduce_dense(call, ReductionRequest(names=frozenset(found)))["virtual_sink_mass"],
        )


def test_softpick_has_a_gradient_where_a_hidden_score_is_beyond_all_floats() -> None:
    query = torch.tensor([[[[1.0], [1.0]]]], requires_grad=True)
    key = torch.tensor([[[[1.0], [1000.0]]]])
    call = AttentionCall(
        query=query, key=key, value=key, scale=1.0, causal=True, operation=Operation(weighting="softpick")
    )
    (gradient,) = torch.autograd.grad(compute_output(call).sum(), query)
    assert torch.isfinite(gradient).all()
