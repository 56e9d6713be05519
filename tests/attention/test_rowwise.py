"""Softmax and softpick in tiles of whole rows are the formulas, forward and backward, and never make a matrix."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import chunks
from regard.attention import recomputed as module
from regard.attention.blockwise import blockwise
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import select_backend
from regard.attention.recomputed import recomputed
from regard.attention.spec import EXTRAS, AttentionSpec
from tests.attention import formulas
from tests.attention.largest import Largest
from tests.attention.test_operation import assert_like_formulas, call_of, choices, column_beside, leaves, parts
from tests.attention.test_pointwise import both, made

ROWWISE = ("softmax", "softpick")


@settings(max_examples=15, deadline=None)
@given(
    weighting=st.sampled_from(ROWWISE),
    extra=st.sampled_from(EXTRAS),
    shared=st.booleans(),
    positions=st.sampled_from(["none", "alibi", "t5"]),
    window=st.none() | st.integers(1, 12),
    prefix=st.sampled_from([0, 1, 3, 20]),
    log_length=st.booleans(),
    length=st.integers(1, 13),
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shares=st.integers(1, 2),
    rows=st.sampled_from([2, 5, 64]),
    size=st.sampled_from([1, 2048, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_tiles_are_the_formulas(
    weighting: str,
    extra: str,
    shared: bool,
    positions: str,
    window: int | None,
    prefix: int,
    log_length: bool,
    length: int,
    batch: int,
    groups: int,
    shares: int,
    rows: int,
    size: int,
    seed: int,
) -> None:
    spec = AttentionSpec(
        weighting=weighting,
        extra=column_beside(extra, weighting, prefix),
        shared_extra=shared,
        positions=positions,
        window=window,
        prefix=prefix,
        log_length=log_length,
        backend="rowwise",
    )
    tensors = leaves(parts(spec, batch=batch, groups=groups, shares=shares, length=length, seed=seed))
    call = call_of(spec, tensors, length=length)
    assert call.operation is not None
    expected = formulas.output(**tensors, **choices(spec, length), scale=0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS", rows)
        patch.setattr(chunks, "BYTES", {"cpu": size})
        assert_like_formulas(recomputed(call, call.operation), expected, tensors)


@pytest.mark.parametrize("weighting", ROWWISE)
def test_gradients_are_those_of_small_steps(weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 4)
    call = made(1, 2, 2, 6, width=3)
    generator = torch.Generator().manual_seed(1)
    distance, extra, slopes = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((1, 8), (4, 3), (4,))
    )

    def output(query: Tensor, key: Tensor, value: Tensor, distance: Tensor, extra: Tensor, slopes: Tensor) -> Tensor:
        learned: dict[str, Any] = {"distance": distance, "extra_key": extra, "slopes": slopes}
        of = Operation(weighting=weighting, window=4, prefix=1, shift=0.3, **learned)
        return recomputed(AttentionCall(query=query, key=key, value=value, scale=0.6, causal=True), of)

    wanted = (call.query, call.key, call.value, distance, extra, slopes)
    assert torch.autograd.gradcheck(output, wanted, fast_mode=True)


@pytest.mark.parametrize("weighting", ROWWISE)
@pytest.mark.parametrize("length, window, prefix", [(64, None, 0), (65, 30, 3), (150, 20, 3), (130, None, 70)])
def test_float32_across_tiles(weighting: str, length: int, window: int | None, prefix: int) -> None:
    learned = torch.linspace(-1, 1, 4 * length).sin().view(4, length)
    exact = Operation(weighting=weighting, window=window, prefix=prefix, distance=learned.double().requires_grad_())
    near = Operation(weighting=weighting, window=window, prefix=prefix, distance=learned.requires_grad_())
    output, gradients = both(blockwise, made(2, 2, 2, length, width=8), exact)
    found, found_gradients = both(recomputed, made(2, 2, 2, length, width=8, dtype=torch.float32), near)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), output, rtol=1e-4, atol=1e-4)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("weighting", ROWWISE)
def test_bfloat16_is_close_under_autocast(weighting: str) -> None:
    distance = torch.linspace(-1, 1, 70)[None].requires_grad_()
    operation = Operation(weighting=weighting, distance=distance)
    call = made(2, 2, 2, 70, width=8, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]
    wide = AttentionCall(query=exact[0], key=exact[1], value=exact[2], scale=call.scale, causal=True)
    of = Operation(weighting=weighting, distance=distance.detach().double().requires_grad_())
    expected, expected_gradients = both(blockwise, wide, of)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, gradients = both(recomputed, call, operation)
    assert output.dtype == torch.bfloat16
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 3 + [torch.float32]
    torch.testing.assert_close(output.double(), expected, rtol=8e-3, atol=1e-3)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("weighting", ROWWISE)
def test_large_scores_overflow_nothing(weighting: str) -> None:
    call = made(1, 1, 1, 20, dtype=torch.float32)
    with torch.no_grad():
        call.query.mul_(1e3)
    output, gradients = both(recomputed, call, Operation(weighting=weighting))
    assert all(t.isfinite().all() for t in (output, *gradients))
    expected, expected_gradients = both(blockwise, call, Operation(weighting=weighting))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    rounding = 1e-5 * float(call.query.detach().abs().max())
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert (found - wanted).norm() <= 1e-3 * wanted.norm() + rounding


def test_softpick_of_scores_that_are_all_zero_gives_nothing() -> None:
    call = made(1, 1, 1, 5)
    with torch.no_grad():
        call.query.zero_()
    output, (of_query, _, of_value) = both(recomputed, call, Operation(weighting="softpick"))
    assert not output.any()
    assert not of_value.any()
    assert not of_query.any()


def test_a_table_that_is_a_constant_gets_no_gradient() -> None:
    call, distance = made(1, 2, 1, 20), torch.arange(30, dtype=torch.float64)[None]
    both(recomputed, call, Operation(distance=distance))
    assert distance.grad is None


@pytest.mark.parametrize("weighting", ROWWISE)
@pytest.mark.parametrize("window, prefix", [(None, 0), (100, 20)])
def test_no_matrix_is_made(weighting: str, window: int | None, prefix: int) -> None:
    call, distance = made(1, 1, 2, 1024, dtype=torch.float32), torch.zeros(2, 1024, requires_grad=True)
    operation = Operation(weighting=weighting, window=window, prefix=prefix, distance=distance)
    with Largest() as largest:
        both(recomputed, call, operation)
    assert 0 < largest.entries <= 1024 * 1024 // 3


def test_whole_sequences_alone_go_in_tiles() -> None:
    call, operation = made(1, 1, 1, 8), Operation(distance=torch.zeros(1, 8), backend="rowwise")
    assert select_backend(call, operation) == "rowwise"
    padded = AttentionCall(
        query=call.query,
        key=call.key,
        value=call.value,
        scale=1.0,
        causal=True,
        key_mask=torch.ones(1, 8, dtype=torch.bool),
    )
    assert select_backend(padded, operation) == "blockwise"
