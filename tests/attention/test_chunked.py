"""Linear attention in chunks is the T×T formula, forward and backward, in memory that grows with T alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import chunked as module
from regard.attention import chunks
from regard.attention.call import AttentionCall, Operation
from regard.attention.chunked import chunked
from tests.attention.largest import Largest
from tests.attention.test_pointwise import both, made, plain

NORMALISATIONS = ["none", "sum", "clamped-sum"]


def mapped(call: AttentionCall, normalisation: str) -> AttentionCall:
    """The call with features that are positive, where their sum must not come near zero."""
    if normalisation != "sum":
        return call
    query, key = ((torch.nn.functional.elu(t.detach()) + 1).requires_grad_() for t in (call.query, call.key))
    return replace(call, query=query, key=key)


@settings(max_examples=25, deadline=None)
@given(
    normalisation=st.sampled_from(NORMALISATIONS),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    shares=st.integers(1, 3),
    length=st.integers(1, 45),
    prefix=st.integers(0, 50),
    bias=st.booleans(),
    chunk=st.sampled_from([4, 7, 64]),
    size=st.sampled_from([1, 2048, 1 << 20]),
)
def test_chunks_are_the_whole_matrix(
    normalisation: str,
    batch: int,
    groups: int,
    shares: int,
    length: int,
    prefix: int,
    bias: bool,
    chunk: int,
    size: int,
) -> None:
    call = mapped(made(batch, groups, shares, length), normalisation)
    extra = torch.linspace(-1, 1, 5, dtype=torch.float64)[None].clone().requires_grad_() if bias else None
    operation = Operation(weighting="linear", normalisation=normalisation, prefix=prefix, extra_value=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(chunks, "BYTES", {"cpu": size})
        output, gradients = both(chunked, call, operation)
    expected, expected_gradients = both(plain, call, operation)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("prefix", [0, 2])
def test_gradients_are_those_of_small_steps(normalisation: str, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    call = mapped(made(1, 2, 2, 8, width=3), normalisation)
    operation = Operation(weighting="linear", normalisation=normalisation, prefix=prefix)

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return chunked(AttentionCall(query=query, key=key, value=value, scale=0.6, causal=True), operation)

    assert torch.autograd.gradcheck(output, (call.query, call.key, call.value), fast_mode=True)


@pytest.mark.parametrize("length", [63, 64, 65, 200])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_float32_across_chunks(length: int, normalisation: str) -> None:
    operation = Operation(weighting="linear", normalisation=normalisation)
    exact = mapped(made(2, 2, 1, length, width=8), normalisation)
    parts = {name: getattr(exact, name).detach().float().requires_grad_() for name in ("query", "key", "value")}
    output, gradients = both(plain, exact, operation)
    found, found_gradients = both(chunked, replace(exact, **parts), operation)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), output, rtol=1e-3, atol=1e-3)
    for one, other in zip(found_gradients, gradients, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_bfloat16_is_summed_in_float32_under_autocast(normalisation: str) -> None:
    operation = Operation(weighting="linear", normalisation=normalisation)
    call = mapped(made(2, 2, 2, 150, width=8, dtype=torch.bfloat16), normalisation)
    parts = {name: getattr(call, name).detach().double().requires_grad_() for name in ("query", "key", "value")}
    expected, expected_gradients = both(plain, replace(call, **parts), operation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, gradients = both(chunked, call, operation)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=8e-3, atol=1e-3)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


def test_a_later_token_changes_nothing_before_it() -> None:
    call, operation = made(1, 2, 1, 100), Operation(weighting="linear", normalisation="clamped-sum", prefix=3)
    before = chunked(call, operation)
    with torch.no_grad():
        for tensor in (call.query, call.key, call.value):
            tensor[:, :, 70] += 5
    after = chunked(call, operation)
    torch.testing.assert_close(after[:, :, :70], before[:, :, :70], rtol=0, atol=0)
    assert not torch.allclose(after[:, :, 70:], before[:, :, 70:])


@pytest.mark.parametrize("prefix", [0, 600])
def test_memory_grows_with_the_length_alone(prefix: int) -> None:
    call = made(1, 1, 2, 1024, dtype=torch.float32, width=16)
    with Largest() as largest:
        both(chunked, call, Operation(weighting="linear", normalisation="clamped-sum", prefix=prefix))
    assert 0 < largest.entries <= 2 * 1024 * 64
