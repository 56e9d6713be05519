"""Every backend of attention against the whole matrix in float64."""

import dataclasses
import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.attention import reference, spectral
from regard.attention.call import AttentionCall, Operation
from regard.attention.lse import supports_lse
from regard.attention.onepass import one_pass
from regard.attention.operator import attend
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense
from regard.attention.spectral import HELD_KEYS
from regard.attention.tiles import BYTES, ROWS

EVERYTHING = ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS), num_first_keys=3)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """The parts of random calls: shapes, grouped heads, causality, padding on either side, masks, bias, cap, sink."""
    batch, groups, shares = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys, queries = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    width, value_width = draw(st.sampled_from([1, 4, 7])), draw(st.sampled_from([2, 7]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    causal = draw(st.booleans())
    offset = draw(st.sampled_from([0, keys - queries, -2])) if causal else 0
    real = torch.ones(batch, keys, dtype=torch.bool)
    starts = [0] * batch
    if draw(st.booleans()):
        for b in range(batch):
            cut = draw(st.integers(0, keys - 1))
            if draw(st.booleans()):
                real[b, :cut], starts[b] = False, cut
            else:
                real[b, keys - cut :] = False
    query_mask = torch.rand(batch, queries, generator=generator) < 0.8 if draw(st.booleans()) else None
    keep = torch.rand(batch, 1, queries, keys, generator=generator) < 0.7 if draw(st.booleans()) else None
    return {
        "query": normal(batch, queries, groups * shares, width).transpose(1, 2),
        "key": normal(batch, keys, groups, width).transpose(1, 2),
        "value": normal(batch, groups, keys, value_width),
        "scale": draw(st.sampled_from([1.0, 0.3, 5.0])),
        "causal": causal,
        "offset": offset,
        "keep": keep,
        "bias": normal(1, groups * shares, queries, keys) if draw(st.booleans()) else None,
        "softcap": draw(st.sampled_from([None, 2.0])),
        "sink": draw(st.sampled_from([None, normal(groups * shares), normal(batch, groups * shares, queries)])),
        "query_mask": query_mask,
        "key_mask": None if real.all() else real,
        "starts": tuple(starts),
    }


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=150, deadline=None)
@given(case=cases(), size=st.sampled_from([1, 1 << 14, 2 << 20]))
def test_one_pass_equals_the_whole_matrix(case: dict[str, object], size: int) -> None:
    """In one tile, and in many over samples and heads."""
    call = AttentionCall(**case)
    wanted = dataclasses.replace(EVERYTHING, names=frozenset(WEIGHT_REDUCTIONS) - {"spectral_bound"})
    with patch.dict(BYTES, {"cpu": size}):
        output, found = one_pass(call, wanted, output=True)
    torch.testing.assert_close(output, reference.attend(call), rtol=1e-9, atol=1e-9)
    assert_same(found, reduce_dense(call, wanted), 1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_a_logit_of_each_query_is_a_column_beside_its_keys(causal: bool, learns: bool) -> None:
    """Against softmax over the keys and one more column without a value, written out, with its gradients."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    sink = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    tensors = [tensor.requires_grad_(learns) for tensor in (query, key, value, sink)]
    scores = (query @ key.mT * 0.5).masked_fill(torch.ones(9, 9).triu(1).bool() & torch.tensor(causal), -math.inf)
    expected = torch.cat([scores, sink[..., None]], dim=-1).softmax(-1)[..., :-1]
    call = AttentionCall(query=query, key=key, value=value, scale=0.5, causal=causal, sink=sink)
    output, found = attend(call, ReductionRequest(names=frozenset({"column_mass", "virtual_sink_mass"})))
    torch.testing.assert_close(output, expected @ value)
    torch.testing.assert_close(found["column_mass"], expected.detach().sum(-2))
    torch.testing.assert_close(found["virtual_sink_mass"], 1 - expected.detach().sum(-1))
    part = call.select_heads([2]).select_samples(slice(1, 2))
    torch.testing.assert_close(attend(part, ReductionRequest())[0], (expected @ value)[1:, 2:3])
    if learns:
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        wanted = torch.autograd.grad((expected @ value * weight).sum(), tensors)
        torch.testing.assert_close(torch.autograd.grad((output * weight).sum(), tensors), wanted)


@settings(max_examples=40, deadline=None)
@given(case=cases(), held=st.booleans(), size=st.sampled_from([1, 2 << 20]))
def test_spectral_bound_equals_the_largest_singular_value(case: dict[str, object], held: bool, size: int) -> None:
    """Whether matrices are held, or passed over tile by tile in each step, as those of many keys are."""
    call = AttentionCall(**case)
    if call.query_mask is not None and not call.query_mask.any(-1).all():
        return
    wanted = ReductionRequest(names=frozenset({"spectral_bound"}), max_iterations=150)
    with patch.dict(HELD_KEYS, {} if held else {"cpu": 0}), patch.dict(BYTES, {"cpu": size}):
        assert_same(attend(call, wanted)[1], reduce_dense(call, wanted), 1e-5)


@pytest.mark.parametrize("keys, is_held", [(8, True), (9, False)])
def test_matrices_of_many_heads_of_one_key_head_are_passed_over(keys: int, is_held: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, keys, 4, generator=generator) for heads in (4, 1))
    call = AttentionCall(query=query, key=key, value=key, scale=0.5, causal=True)
    with patch.object(spectral, "HELD_ENTRIES", 4 * 8 * 8), patch.object(spectral, "_multiply_tiles") as passes:
        passes.side_effect = RuntimeError("passed over")
        with nullcontext() if is_held else pytest.raises(RuntimeError, match="passed over"):
            spectral.spectral_bound(call, 20)


def test_the_spectral_bound_of_nan_is_nan() -> None:
    query = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    key = query.clone()
    key[0, 1, 2] = math.nan
    call = AttentionCall(query=query, key=key, value=query, scale=0.5, causal=True)
    bound = spectral.spectral_bound(call, 20)
    assert bound.isnan().tolist() == [[False, True]]


@settings(max_examples=60, deadline=None)
@given(case=cases(), first=st.integers(1, 5))
def test_first_mass_by_log_sum_exp_equals_the_whole_matrix(case: dict[str, object], first: int) -> None:
    call = AttentionCall(**case)
    width = call.query.shape[-1]
    value = call.value[..., :1].repeat(1, 1, 1, width)
    call = dataclasses.replace(call, keep=None, bias=None, softcap=None, sink=None, offset=0, value=value)
    wanted = ReductionRequest(names=frozenset({"first_mass", "lse"}), num_first_keys=first)
    assert supports_lse(call, wanted)
    output, found = attend(call, wanted)
    expected = reduce_dense(call, wanted)
    assert_same(found, expected, 1e-9)
    sees = expected["lse"] > -math.inf
    torch.testing.assert_close(output[sees], reference.attend(call)[sees], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_reduced_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 200, 16, generator=generator).to(dtype) for _ in range(3))
    call = AttentionCall(query=query, key=key, value=value, scale=0.25, causal=True)
    exact = dataclasses.replace(call, query=query.double(), key=key.double(), value=value.double())
    names = frozenset({"column_mass", "column_square", "entropy", "distance", "lse"})
    output, found = attend(call, ReductionRequest(names=names))
    assert output.dtype == dtype
    for name, tensor in reduce_dense(exact, ReductionRequest(names=names)).items():
        assert found[name].dtype == (torch.float64 if name == "column_square" else torch.float32)
        torch.testing.assert_close(found[name].double(), tensor, rtol=2e-5, atol=2e-5)


def nearly_uniform(heads: int = 2, groups: int = 2, **fields: Any) -> AttentionCall:
    """A float32 call of 300 queries whose weights in a column differ by some per cent."""
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(2, n, 300, 8, generator=generator) for n in (heads, groups, groups))
    return AttentionCall(query=query, key=key, value=value, scale=0.02, **fields)


PADDED = torch.arange(300) >= torch.tensor([[0], [37]])
BOTH_SUMS = ReductionRequest(names=frozenset({"column_sum", "column_square"}))


def column_scatter(found: dict[str, torch.Tensor], call: AttentionCall) -> torch.Tensor:
    rows = call.query.shape[2] if call.query_mask is None else call.query_mask.sum(-1)[:, None, None]
    return found["column_square"] - found["column_sum"].square() / rows


@pytest.mark.parametrize("operation", [None, Operation(weighting="softmax", shift=0.1)], ids=["tiles", "rows"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
def test_the_scatter_of_columns_of_equal_weights_is_exact(
    mask: torch.Tensor | None, causal: bool, operation: Operation | None
) -> None:
    """Σ(a − d)² is some 10⁻⁵ of Σa²; only the rounding of weights, not that of the sums, may be seen in it."""
    call = nearly_uniform(causal=causal, query_mask=mask, key_mask=mask, operation=operation)
    exact = dataclasses.replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    matrix = reference.weights(exact)
    counted = torch.ones(2, 300, dtype=torch.bool) if mask is None else mask
    for sample, real in enumerate(counted):
        rows = matrix[sample][:, real]
        expected = (rows - rows.mean(1, keepdim=True)).square().sum(1)
        found = column_scatter(attend(call, BOTH_SUMS)[1], call)[sample]
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-12)


def test_uniform_causal_attention_puts_the_harmonic_mean_on_the_first_token() -> None:
    zeros = torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    call = AttentionCall(query=zeros, key=zeros, value=zeros, scale=1.0, causal=True)
    _, found = attend(call, ReductionRequest(names=frozenset({"column_mass"})))
    harmonic = sum(1 / i for i in range(1, 65))
    assert found["column_mass"][0, 0, 0].item() == pytest.approx(harmonic)
    assert harmonic / 64 == pytest.approx(0.074, abs=5e-4)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    query = torch.tensor([[[[300.0], [-300.0]]]])
    call = AttentionCall(query=query, key=query, value=query, scale=10.0)
    output, found = attend(call, ReductionRequest(names=frozenset({"entropy", "column_mass", "column_square", "lse"})))
    assert output.flatten().tolist() == [300.0, -300.0]
    assert found["column_mass"].flatten().tolist() == [1.0, 1.0]
    assert found["entropy"].flatten().tolist() == [0.0, 0.0]
    assert found["lse"].flatten().tolist() == pytest.approx([900_000.0] * 2)


def test_gradient_flows_through_an_observed_call() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    for extra in ({}, {"softcap": 3.0}, {"sink": torch.ones(2, dtype=torch.float64)}):
        call = AttentionCall(query=query, key=query, value=query, scale=0.5, causal=True, **extra)
        output, found = attend(call, ReductionRequest(names=frozenset({"column_mass"})))
        (gradient,) = torch.autograd.grad(output.square().sum(), query)
        (expected,) = torch.autograd.grad(reference.attend(call).square().sum(), query)
        torch.testing.assert_close(gradient, expected)
        assert not found["column_mass"].requires_grad


def test_memory_is_linear_in_the_number_of_keys() -> None:
    """The largest tensor of a pass at T keys holds at most two tiles: 2 × rows × keys, not keys × keys."""
    query = torch.zeros(1, 1, 4096, 4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        attend(
            AttentionCall(query=query, key=query, value=query, scale=1.0, causal=True),
            ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS) - {"weights", "spectral_bound"}),
        )
    assert largest <= 2 * ROWS["cpu"] * 4096 * 4


@pytest.mark.parametrize("causal", [True, False])
def test_first_keys_outside_of_a_call_have_no_mass(causal: bool) -> None:
    """A sample may begin before the keys, whose first a cache has dropped, or less than three keys before their end."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    call = AttentionCall(query=query, key=key, value=value, scale=0.5, causal=causal, starts=(-2, 0, 4))
    request = ReductionRequest(names=frozenset({"first_mass"}), num_first_keys=3)
    assert supports_lse(call, request)
    mass = attend(call, request)[1]["first_mass"]
    matrix = reference.weights(call)
    expected = torch.zeros(3, 2, 6, 3, dtype=torch.float64)
    expected[0, ..., 2], expected[1], expected[2, ..., :2] = matrix[0, ..., 0], matrix[1, ..., :3], matrix[2, ..., 4:]
    torch.testing.assert_close(mass, expected, rtol=1e-9, atol=1e-9)
    assert_same(reduce_dense(call, request), {"first_mass": expected}, 1e-9)


def test_dropout_of_the_whole_matrix_zeroes_weights_and_scales_the_others() -> None:
    """Values are rows of the identity, so that the output is the matrix itself."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 12, 4, generator=generator, dtype=torch.float64)
    value = torch.eye(12, dtype=torch.float64).expand(1, 2, 12, 12)
    call = AttentionCall(query=query, key=query, value=value, scale=0.5, causal=True)
    expected = reference.weights(call) / 0.75
    torch.manual_seed(0)
    dropped = reference.attend(dataclasses.replace(call, dropout=0.25))
    zeros = (dropped == 0) & (expected > 0)
    assert 10 < zeros.sum() < 60  # of 156 visible pairs
    torch.testing.assert_close(dropped, expected.masked_fill(zeros, 0.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_padding_that_is_not_finite_leaves_the_mean_matrix_of_others(value: float) -> None:
    """Of the samples without padding alone, whatever stands at padded queries."""
    generator = torch.Generator().manual_seed(0)
    query, key, states = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3))
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    query[1, :, :2] = value
    call = AttentionCall(
        query=query, key=key, value=states, scale=0.3, causal=True, key_mask=real, query_mask=real, starts=(0, 2)
    )
    wanted = ReductionRequest(names=frozenset({"weights"}))
    found = one_pass(call, wanted, output=False)[1]["weights"]
    torch.testing.assert_close(found, reduce_dense(call, wanted)["weights"])
    assert found.isfinite().all()


def test_first_mass_of_rows_before_a_padded_sample_begins() -> None:
    """Blocks of rows end where their queries do, which may be before the first key of a sample."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 400, 8, dtype=torch.float64) for _ in range(3))
    starts, keep = (0, 300), torch.ones(2, 400, dtype=torch.bool)
    keep[1, :300] = False
    tensors = {"query": query, "key": key, "value": value, "key_mask": keep, "query_mask": keep}
    call = AttentionCall(**tensors, scale=0.3, causal=True, starts=starts)
    call = dataclasses.replace(call, operation=Operation(weighting="sigmoid"))
    request = ReductionRequest(names=frozenset({"first_mass"}), num_first_keys=4)
    assert_same(attend(call, request)[1], reduce_dense(call, request), 1e-9)
