"""Pairs of the largest scores, weighed one by one, are the formulas, forward and backward; equal scores count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.attention import blockwise as by_blocks
from regard.attention import reference
from regard.attention import sparse as module
from regard.attention.blockwise import blockwise
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import compute_output, select_backend
from regard.attention.sparse import sparse, supports_sparse
from regard.attention.spec import ATTENTIONS, EXTRAS, AttentionSpec
from tests.attention import formulas
from tests.attention.largest import Largest
from tests.attention.test_operation import (
    assert_like_formulas,
    call_of,
    choices,
    column_beside,
    gradients,
    leaves,
    parts,
)
from tests.attention.test_pointwise import both, made
from tests.processes import run_python


@settings(max_examples=40, deadline=None)
@given(
    weighting=st.sampled_from(["softmax", "sigmoid", "elu", "softpick", "linear"]),
    extra=st.sampled_from(EXTRAS),
    shared=st.booleans(),
    window=st.none() | st.integers(1, 12),
    prefix=st.sampled_from([0, 1, 3, 20]),
    top_k=st.integers(1, 14),
    log_length=st.booleans(),
    length=st.integers(1, 17),
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shares=st.integers(1, 2),
    rows=st.sampled_from([1, 5, 8]),
    seed=st.integers(0, 1000),
)
def test_pairs_are_the_formulas(
    weighting: str,
    extra: str,
    shared: bool,
    window: int | None,
    prefix: int,
    top_k: int,
    log_length: bool,
    length: int,
    batch: int,
    groups: int,
    shares: int,
    rows: int,
    seed: int,
) -> None:
    spec = AttentionSpec(
        weighting=weighting,
        extra=column_beside(extra, weighting, prefix),
        shared_extra=shared,
        window=window,
        prefix=prefix,
        top_k=top_k,
        log_length=log_length,
        backend="sparse",
    )
    tensors = leaves(parts(spec, batch=batch, groups=groups, shares=shares, length=length, seed=seed))
    call = call_of(spec, tensors, length=length)
    assert call.operation is not None
    expected = formulas.output(**tensors, **choices(spec, length), scale=0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(by_blocks.ROWS, "cpu", (1, rows))
        assert_like_formulas(sparse(call, call.operation), expected, tensors)


def test_gradients_are_those_of_small_steps() -> None:
    call = made(2, 2, 2, 9, width=3)
    extra_key, extra_value = (
        torch.randn(4, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64).requires_grad_()
        for width in (3, 4)
    )

    def output(query: Tensor, key: Tensor, value: Tensor, extra_key: Tensor, extra_value: Tensor) -> Tensor:
        operation = Operation(top_k=2, shift=0.3, extra_key=extra_key, extra_value=extra_value)
        return sparse(AttentionCall(query=query, key=key, value=value, scale=0.6, causal=True), operation)

    wanted = (call.query, call.key, call.value, extra_key, extra_value)
    assert torch.autograd.gradcheck(output, wanted, fast_mode=True)


def with_equals(length: int, every: int) -> AttentionCall:
    """Whole numbers, whose products are exact, and keys of which each stands `every` tokens later again."""
    call = made(1, 2, 1, length, width=4)
    with torch.no_grad():
        call.query.mul_(9).round_()
        call.key.mul_(9).round_()
        call.key.copy_(call.key[:, :, :every].repeat(1, 1, -(-length // every), 1)[:, :, :length])
    return call


@pytest.mark.parametrize("every, top_k", [(20, 4), (20, 3), (11, 3)])
def test_all_scores_that_equal_the_least_are_weighed(every: int, top_k: int) -> None:
    call, operation = with_equals(40, every), Operation(top_k=top_k)
    assert module._largest(replace(call, operation=operation), operation) is not None
    scores = call.query[:, :, -1:] @ call.key.mT
    assert bool((scores.topk(top_k + 1).values.diff() == 0).any())
    expected, expected_gradients = both(materialised, call, operation)
    output, found = both(sparse, call, operation)
    torch.testing.assert_close(output, expected)
    for one, other in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(one, other)


def materialised(call: AttentionCall, operation: Operation) -> Tensor:
    return reference.operation_output(call, operation)


def test_many_equal_scores_are_computed_by_blocks() -> None:
    call, operation = with_equals(40, 2), Operation(top_k=2)
    assert module._largest(replace(call, operation=operation), operation) is None
    torch.testing.assert_close(sparse(call, operation), reference.operation_output(call, operation))


@pytest.mark.parametrize("width", [8, 64, 128, 129, 1024])
@pytest.mark.parametrize("number", [1, 2, 9, 16])
def test_the_largest_of_a_row_are_those_of_the_sorted_row(width: int, number: int) -> None:
    scores = torch.randn(3, 2, 5, width, generator=torch.Generator().manual_seed(width)).mul(4).round()
    scores[0, 0, 0, width // 2 :] = float("-inf")
    scores[1] = float("-inf")
    number = min(number, width)
    found, at = module._topk(scores, number)
    assert torch.equal(found, scores.sort(-1, descending=True).values[..., :number])
    assert torch.equal(scores.gather(-1, at), found)
    assert at.sort(-1).values.diff().ne(0).all()


@pytest.mark.parametrize("causal, left", [(True, 3), (True, 0), (False, 2)])
def test_padding_and_masks_hide_their_keys(causal: bool, left: int) -> None:
    call = made(2, 2, 2, 30, width=4)
    real = torch.ones(2, 30, dtype=torch.bool)
    real[1, :left] = real[0, 27:] = False
    keep = torch.rand(2, 1, 30, 30, generator=torch.Generator().manual_seed(0)) < 0.8
    call = replace(call, key_mask=real, keep=keep, causal=causal)
    operation = Operation(top_k=3, window=9 if causal else None, prefix=2 if causal else 0, backend="sparse")
    assert select_backend(call, operation) == "sparse"
    q, k = call.query.detach(), call.key.detach().repeat_interleave(2, 1)
    at = torch.arange(30)
    gap = at[:, None] - at
    first = real.int().argmax(-1)[:, None, None, None]
    see = keep & real[:, None, None]
    if causal:
        see = see & (((gap >= 0) & (gap < 9)) | (at - first < 2))
    scores = (q @ k.mT * call.scale).masked_fill(~see, -torch.inf)
    scores = scores.masked_fill(scores < scores.topk(3).values[..., -1:], -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ call.value.repeat_interleave(2, 1)
    torch.testing.assert_close(compute_output(replace(call, operation=operation)), expected)
    assert bool((~see).all(-1).any()) == causal  # some queries see nothing


@pytest.mark.parametrize("backend", [sparse, blockwise, reference.operation_output])
@pytest.mark.parametrize("name", ["query", "key"])
def test_what_is_no_number_is_not_left_out(name: str, backend: Any) -> None:
    """As in softmax without `top_k`: a query alone, a key in all queries that see it."""
    call = made(1, 1, 1, 32)
    broken = getattr(call, name).detach().clone()
    broken[0, 0, 5] = float("nan")
    output = backend(replace(call, **{name: broken}), Operation(top_k=3))
    is_broken = output.isnan().any(-1)[0, 0].tolist()
    assert is_broken == [at == 5 if name == "query" else at >= 5 for at in range(32)]


def test_low_precision_is_computed_in_float32() -> None:
    call, operation = made(1, 2, 2, 64, width=8, dtype=torch.float32), Operation(top_k=4)
    half = replace(call, **{name: getattr(call, name).detach().bfloat16() for name in ("query", "key", "value")})
    wide = half.to_acc_dtype()
    expected = sparse(wide, operation).bfloat16()
    assert torch.equal(sparse(half, operation), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sparse(wide, operation), sparse(wide, operation).float())
        torch.testing.assert_close(sparse(wide, operation), blockwise(wide, operation))


def test_dropout_has_the_gradient_of_what_it_drew() -> None:
    """The output is linear in the values: their gradient times them is its sum."""
    call, operation = made(1, 1, 1, 64, width=4), Operation(top_k=4)
    torch.manual_seed(0)
    outputs = [sparse(replace(call, dropout=0.5), operation) for _ in range(2)]
    assert not torch.equal(*outputs)
    (gradient,) = torch.autograd.grad(outputs[0].sum(), call.value)
    torch.testing.assert_close((gradient * call.value).sum(), outputs[0].sum())
    many = torch.stack([sparse(replace(call, dropout=0.5), operation).detach() for _ in range(100)]).mean(0)
    plain = sparse(call, operation)
    assert (many - plain).norm() <= 0.2 * plain.norm()


def test_inference_mode_has_the_output_of_a_forward_without_gradients() -> None:
    call = made(1, 2, 2, 64, width=8)
    expected = reference.operation_output(call, Operation(top_k=4)).detach()
    with torch.inference_mode():
        torch.testing.assert_close(sparse(call, Operation(top_k=4)), expected)


def test_checkpointing_computes_again_in_the_backward_pass_alone() -> None:
    call, operation, runs = made(1, 2, 2, 64, width=8), Operation(top_k=4), []

    def output(query: Tensor) -> Tensor:
        runs.append(torch._C._current_graph_task_id())  # −1 outside of backward passes
        return sparse(replace(call, query=query * 1.0), operation)

    (found,) = torch.autograd.grad(checkpoint(output, call.query, use_reentrant=False).sum(), call.query)
    (expected,) = torch.autograd.grad(reference.operation_output(call, operation).sum(), call.query)
    torch.testing.assert_close(found, expected)
    assert [run >= 0 for run in runs] == [False, True]


def test_gradients_of_several_outputs_at_once_are_those_of_each() -> None:
    call, operation = made(1, 2, 2, 24, width=4), Operation(top_k=3)
    directions = torch.randn(3, 1, 4, 24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = (call.query, call.key, call.value)
    found = torch.autograd.grad(sparse(call, operation), inputs, directions, is_grads_batched=True)
    for index, direction in enumerate(directions):
        expected = torch.autograd.grad(reference.operation_output(call, operation), inputs, direction)
        for several, one in zip(found, expected, strict=True):
            torch.testing.assert_close(several[index], one)


def test_no_matrix_is_made() -> None:
    call = made(1, 1, 2, 1024, dtype=torch.float32)
    with Largest() as largest:
        both(sparse, call, Operation(top_k=4))
    assert 0 < largest.entries <= 2 * 128 * 1024


def test_few_pairs_on_a_cpu_are_weighed_one_by_one() -> None:
    call = made(1, 2, 1, 64)
    of: dict[str, Any] = {"top_k": 8, "backend": "sparse"}
    assert select_backend(call, Operation(**of)) == "sparse"
    assert select_backend(call, Operation(**of | {"top_k": 9})) == "blockwise"
    last = replace(call, query=call.query[:, :, -1:], offset=63)
    assert select_backend(last, Operation(**of)) == "blockwise"
    assert select_backend(replace(call, softcap=2.0), Operation(**of)) == "blockwise"
    assert select_backend(replace(call, bias=torch.zeros(1, 1, 64, 64)), Operation(**of)) == "blockwise"
    assert select_backend(replace(call, scale=0.0), Operation(**of)) == "blockwise"
    assert select_backend(call, Operation(**of, slopes=torch.ones(2))) == "blockwise"
    assert select_backend(call, Operation(**of, distance=torch.ones(1, 64))) == "blockwise"
    assert not supports_sparse(call, Operation(window=4))
    seen = []
    torch.func.vmap(lambda query: seen.append(select_backend(replace(call, query=query), Operation(**of))) or query)(
        call.query[None]
    )
    assert seen == ["blockwise"]


def test_a_model_with_learned_sinks_or_alibi_has_its_backend() -> None:
    assert ATTENTIONS["top-8"].resolved == "sparse"
    assert AttentionSpec(top_k=8, positions="alibi").resolved == "blockwise"
    assert AttentionSpec(top_k=8, positions="t5").resolved == "blockwise"
    assert AttentionSpec(top_k=8, extra="kv-bias", weighting="sigmoid").resolved == "sparse"
    call = made(1, 2, 1, 64)
    assert len(gradients(sparse(call, Operation(top_k=2)), {"q": call.query, "k": call.key})) == 2


def check_compiled_step() -> None:
    call, operation = made(1, 2, 1, 64), Operation(top_k=8, backend="sparse")
    expected, expected_gradients = both(reference.operation_output, call, operation)
    taken, plain = [], module._largest
    module._largest = lambda *of: taken.append(of) or plain(*of)  # type: ignore[assignment,func-returns-value]

    def step(call: AttentionCall, operation: Operation) -> Tensor:
        return compute_output(replace(call, operation=operation))

    found, found_gradients = both(torch.compile(step, backend="aot_eager"), call, operation)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, expected_gradients)
    assert len(taken) == 1
    with torch.no_grad():  # a forward without gradients stays one graph
        torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(call, operation), expected)
    assert len(taken) == 1


@pytest.mark.exhaustive
def test_a_compiled_step_weighs_pairs_one_by_one() -> None:
    """In a process of its own, for no graph may hold checks of shapes."""
    answer = run_python(["-c", f"from {__name__} import check_compiled_step; check_compiled_step()"])
    assert answer.returncode == 0, answer.stderr
