"""Operations by blocks of rows: as the definition, in linear memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import blockwise, reference
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import BACKENDS, attend, compute_output
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense
from regard.attention.spec import ATTENTIONS, AttentionSpec
from tests.attention.largest import Largest, largest
from tests.attention.test_operation import MORE, assert_like_formulas, call_of, parts

EVERY = ATTENTIONS | MORE


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blockwise.ROWS, "cpu", (1, 5))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """The parts of calls with what only blocks take: masks, biases, caps, padding, caches, keys that none sees yet."""
    length, queries = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def perhaps(x: Any) -> Any:
        return x if draw(st.booleans()) else None

    real = torch.rand(2, length, generator=generator) < 0.7
    causal = draw(st.booleans())
    operation = {
        "weighting": draw(st.sampled_from(["softmax", "sigmoid", "softpick"])),
        "window": draw(st.sampled_from([None, 1, 7])),
        "prefix": draw(st.sampled_from([0, 0, 3])),
        "slopes": perhaps(torch.rand(4, generator=generator, dtype=torch.float64)),
        "distance": perhaps(normal(4, length + queries)),
        "extra_key": perhaps(normal(1, 3)),
        "extra_value": perhaps(normal(4, 5)),
    }
    return {
        "query": normal(2, 4, queries, 3),
        "key": normal(2, 2, length, 3),
        "value": normal(2, 2, length, 5),
        "scale": 0.7,
        "causal": causal,
        "offset": draw(st.sampled_from([0, length - queries, -2])) if causal else 0,
        "keep": perhaps(torch.rand(1, 1, queries, length, generator=generator) < 0.8),
        "bias": perhaps(normal(1, 4, queries, length)),
        "softcap": perhaps(2.0),
        "sink": perhaps(normal(4)),
        "query_mask": perhaps(torch.rand(2, queries, generator=generator) < 0.8),
        "key_mask": perhaps(real),
        "starts": perhaps((1, 0)),
        "operation": operation,
    }


@settings(max_examples=50, deadline=None)
@given(case=calls())
def test_blocks_give_what_the_whole_matrix_gives(case: dict[str, Any]) -> None:
    call = AttentionCall(**case | {"operation": Operation(**case["operation"])})
    assert call.operation is not None
    learned = call.operation.tensors
    tensors = {"q": call.query, "k": call.key, "v": call.value, **{n: learned[n] for n in learned}}
    if call.sink is not None and "extra_key" not in learned:
        tensors["sink"] = call.sink
    for tensor in tensors.values():
        tensor.requires_grad_()
    expected = reference.operation_output(call, call.operation)
    assert_like_formulas(blockwise.blockwise(call, call.operation), expected, tensors)


@settings(max_examples=30, deadline=None)
@given(case=calls())
def test_reductions_of_blocks_are_those_of_the_whole_matrix(case: dict[str, Any]) -> None:
    call = AttentionCall(**case | {"operation": Operation(**case["operation"])})
    names = frozenset(WEIGHT_REDUCTIONS) - ({"spectral_bound"} if call.query_mask is not None else set())
    wanted = ReductionRequest(names=names, num_first_keys=2)
    found, expected = blockwise.reduce_by_rows(call, wanted), reduce_dense(call, wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("weighting", ["softmax", "sigmoid", "elu", "linear", "softpick"])
def test_a_bias_that_hides_all_keys_of_a_query_leaves_zeros_and_no_gradient(weighting: str) -> None:
    query = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.zeros(1, 1, 3, 3)
    bias[0, 0, 1] = torch.finfo(torch.float32).min
    operation = Operation(weighting=weighting, prefix=1)
    call = AttentionCall(query=query, key=query, value=query, scale=0.5, bias=bias, operation=operation)
    output = compute_output(call)
    (gradient,) = torch.autograd.grad(output[:, :, 1].sum(), query, retain_graph=True)
    assert not output[:, :, 1].any()
    assert not gradient.any()
    assert torch.isfinite(torch.autograd.grad(output.sum(), query)[0]).all()


@pytest.mark.exhaustive
def test_dropout_leaves_the_mean_and_has_the_gradient_of_what_it_drew() -> None:
    """Values are one, so that a weight's share survives in the output; a step along the gradient is exact in v."""
    query = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = torch.ones(1, 1, 12, 2, dtype=torch.float64, requires_grad=True)
    call = AttentionCall(
        query=query, key=query, value=value, scale=0.5, causal=True, dropout=0.5, operation=Operation(window=9)
    )
    torch.manual_seed(3)
    outputs = [compute_output(call) for _ in range(120)]
    mean = torch.stack(outputs).detach().mean(0)
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=0.4, atol=0.4)
    assert not torch.equal(outputs[0], outputs[1])
    (gradient,) = torch.autograd.grad(outputs[0].sum(), value)
    assert (gradient * value).sum().item() == pytest.approx(outputs[0].sum().item())


def test_autocast_computes_blocks_in_float32() -> None:
    tensors = {name: t.float() for name, t in parts(MORE["sigmoid-kv"], length=20).items()}
    call = call_of(MORE["sigmoid-kv"], tensors, length=20)
    assert call.operation is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = blockwise.blockwise(call, call.operation)
    torch.testing.assert_close(found, reference.operation_output(call, call.operation), rtol=1e-5, atol=1e-5)
    half = replace(call, query=call.query.bfloat16(), key=call.key.bfloat16(), value=call.value.bfloat16())
    assert blockwise.blockwise(half, call.operation).dtype == torch.bfloat16


LENGTH = 1024
BACKEND_OF_EACH = [
    (name, backend)
    for name, spec in EVERY.items()
    for backend in ("blockwise", spec.resolved)
    if name in MORE or backend != "blockwise"
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name, backend", sorted(set(BACKEND_OF_EACH)))
def test_no_tensor_is_as_large_as_the_matrix(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blockwise.ROWS, "cpu", (16, 64))
    spec = EVERY[name]
    tensors = {n: t.float() for n, t in parts(spec, groups=1, shares=1, length=LENGTH).items()}
    tensors["q"].requires_grad_()
    call = call_of(spec, tensors, length=LENGTH)
    assert call.operation is not None
    entries = largest(lambda: BACKENDS[backend](call, call.operation))
    assert entries <= LENGTH * LENGTH // 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sigmoid", "softpick", "kv-bias", "t5", "window"])
def test_no_tensor_of_the_reductions_is_as_large_as_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blockwise.ROWS, "cpu", (16, 64))
    spec = EVERY[name]
    call = call_of(spec, parts(spec, groups=1, shares=1, length=LENGTH), length=LENGTH)
    with Largest() as watch:
        attend(call, ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS) - {"weights", "spectral_bound"}))
    assert watch.entries <= LENGTH * LENGTH // 4


def test_a_query_of_a_cache_reads_no_key_before_its_window() -> None:
    spec = AttentionSpec(window=8, positions="alibi")
    call = call_of(spec, parts(spec, length=500), length=500)
    call = replace(call, query=call.query[:, :, -1:], offset=499)
    ((part, seen),) = blockwise.blocks(call)
    assert (seen.start, seen.stop, part.key.shape[2], part.offset) == (492, 500, 8, 7)
    assert call.operation is not None
    torch.testing.assert_close(compute_output(call), reference.operation_output(call, call.operation))
