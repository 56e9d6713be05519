"""Pointwise attention in tiles is the T×T formula, forward and backward, and never holds anything of that size."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import chunks
from regard.attention import recomputed as module
from regard.attention.call import AttentionCall, Operation
from regard.attention.recomputed import recomputed
from tests.attention.largest import Largest

WEIGH: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda s: 1 / (1 + torch.exp(-s)),
    "elu": lambda s: torch.where(s > 0, s + 1, s.clamp(max=0).exp()),
    "linear": lambda s: s,
}
NORMALISE: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda a: a,
    "sum": lambda a: a / (a.sum(-1, keepdim=True) + 1e-8),
    "clamped-sum": lambda a: a / torch.where(a.sum(-1).abs() > 1, a.sum(-1).abs(), 1.0)[..., None],
}


def plain(call: AttentionCall, operation: Operation) -> Tensor:
    """The definition of Gu et al. 2025, entry by entry of the matrix."""
    heads, length = call.query.shape[1:3]
    at = torch.arange(length)
    gap = at[:, None] - at
    see = (gap >= 0) & (gap < (operation.window or length)) | (at < operation.prefix)
    rows = []
    for head in range(heads):
        group = head // (heads // call.key.shape[1])
        scores = call.query[:, head] @ call.key[:, group].transpose(1, 2) * call.scale + operation.shift
        if operation.slopes is not None:
            scores = scores - operation.slopes[head] * gap.clamp(min=0)
        weights = torch.where(see, WEIGH[operation.weighting](scores), 0.0)
        rows.append(NORMALISE[operation.normalisation](weights) @ call.value[:, group])
    output = torch.stack(rows, dim=1)
    return output if operation.extra_value is None else output + operation.extra_value[:, None]


def made(
    batch: int,
    groups: int,
    shares: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float64,
    width: int = 4,
    seed: int = 0,
) -> AttentionCall:
    """Random queries, keys and values, laid out as a model does, that want gradients; values wider than keys."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, wide: int) -> Tensor:
        drawn = torch.randn(batch, length, heads, wide, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).transpose(1, 2).requires_grad_()

    heads = groups * shares
    query, key, value = draw(heads, width), draw(groups, width), draw(groups, width + 1)
    return AttentionCall(query=query, key=key, value=value, scale=0.7, causal=True)


def both(
    backend: Callable[[AttentionCall, Operation], Tensor], call: AttentionCall, operation: Operation
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and the gradient of a random function of it by everything that wants one."""
    output = backend(call, operation)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(output.dtype)
    wants = [t for t in (call.query, call.key, call.value, *operation.tensors.values()) if t.requires_grad]
    return output, torch.autograd.grad((output * weight).sum(), wants)


@settings(max_examples=25, deadline=None)
@given(
    weighting=st.sampled_from(["sigmoid", "elu"]),
    normalisation=st.sampled_from(["none", "sum"]),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    shares=st.integers(1, 3),
    length=st.integers(1, 45),
    window=st.none() | st.integers(1, 30),
    prefix=st.integers(0, 50),
    alibi=st.booleans(),
    bias=st.booleans(),
    rows=st.sampled_from([4, 7, 64]),
    keys=st.sampled_from([5, 16, 1024]),
    size=st.sampled_from([1, 2048, 1 << 20]),
)
def test_tiles_are_the_whole_matrix(
    weighting: str,
    normalisation: str,
    batch: int,
    groups: int,
    shares: int,
    length: int,
    window: int | None,
    prefix: int,
    alibi: bool,
    bias: bool,
    rows: int,
    keys: int,
    size: int,
) -> None:
    call = made(batch, groups, shares, length)
    heads = groups * shares
    operation = Operation(
        weighting=weighting,
        normalisation=normalisation,
        shift=-1.5 if alibi else 0.0,
        slopes=torch.linspace(0.1, 1, heads, dtype=torch.float64).requires_grad_() if alibi else None,
        extra_value=torch.linspace(-1, 1, 5, dtype=torch.float64).expand(heads, 5).clone().requires_grad_()
        if bias
        else None,
        window=window,
        prefix=prefix,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS", rows)
        patch.setattr(module, "KEYS", keys)
        patch.setattr(chunks, "BYTES", {"cpu": size})
        output, gradients = both(recomputed, call, operation)
    expected, expected_gradients = both(plain, call, operation)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighting", ["sigmoid", "elu"])
@pytest.mark.parametrize("normalisation", ["none", "sum"])
def test_gradients_are_those_of_small_steps(weighting: str, normalisation: str) -> None:
    call = made(1, 2, 2, 6, width=3)
    slopes = torch.tensor([0.1, 0.4, 0.7, 1.0], dtype=torch.float64, requires_grad=True)

    def output(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        of = Operation(weighting=weighting, normalisation=normalisation, slopes=slopes, window=4, prefix=2, shift=0.3)
        return recomputed(AttentionCall(query=query, key=key, value=value, scale=0.6, causal=True), of)

    assert torch.autograd.gradcheck(output, (call.query, call.key, call.value, slopes), fast_mode=True)


@pytest.mark.parametrize("length", [63, 64, 65, 130, 200])
@pytest.mark.parametrize("weighting", ["sigmoid", "elu"])
def test_float32_across_tiles(length: int, weighting: str) -> None:
    operation = Operation(weighting=weighting, normalisation="sum", shift=-math.log(length), window=100, prefix=3)
    exact = made(2, 2, 1, length, width=8)
    output, gradients = both(plain, exact, operation)
    found, found_gradients = both(recomputed, made(2, 2, 1, length, width=8, dtype=torch.float32), operation)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), output, rtol=1e-4, atol=1e-5)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weighting", ["sigmoid", "elu"])
def test_bfloat16_is_close_under_autocast(weighting: str) -> None:
    operation = Operation(weighting=weighting, normalisation="sum")
    call = made(2, 2, 2, 70, width=8, dtype=torch.bfloat16)
    exact = AttentionCall(
        query=call.query.detach().double().requires_grad_(),
        key=call.key.detach().double().requires_grad_(),
        value=call.value.detach().double().requires_grad_(),
        scale=call.scale,
        causal=True,
    )
    expected, expected_gradients = both(plain, exact, operation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, gradients = both(recomputed, call, operation)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=8e-3, atol=1e-3)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def test_autocast_leaves_float32_alone() -> None:
    call, operation = made(1, 2, 1, 40, dtype=torch.float32), Operation(weighting="sigmoid")
    output, gradients = both(recomputed, call, operation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same, same_gradients = both(recomputed, call, operation)
    torch.testing.assert_close(same, output, rtol=0, atol=0)
    torch.testing.assert_close(same_gradients, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("weighting", ["sigmoid", "elu"])
def test_large_scores_overflow_nothing(weighting: str) -> None:
    call = made(1, 1, 1, 20, dtype=torch.float32)
    with torch.no_grad():
        call.query.mul_(1e3)
    output, gradients = both(recomputed, call, Operation(weighting=weighting, normalisation="sum"))
    assert all(t.isfinite().all() for t in (output, *gradients))


def test_slopes_that_are_constants_get_no_gradient() -> None:
    call = made(1, 2, 1, 20)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    both(recomputed, call, Operation(weighting="sigmoid", slopes=slopes))
    assert slopes.grad is None


def test_without_gradients_nothing_is_kept() -> None:
    call = made(1, 2, 1, 20)
    with torch.no_grad():
        assert not recomputed(call, Operation(weighting="elu")).requires_grad


@pytest.mark.parametrize("window, prefix", [(None, 0), (100, 0), (100, 20), (None, 600)])
@pytest.mark.parametrize("alibi", [False, True])
def test_no_matrix_is_made(window: int | None, prefix: int, alibi: bool) -> None:
    call = made(1, 1, 2, 1024, dtype=torch.float32)
    slopes = torch.tensor([0.5, 0.25], requires_grad=True) if alibi else None
    operation = Operation(weighting="sigmoid", normalisation="sum", window=window, prefix=prefix, slopes=slopes)
    with Largest() as largest:
        both(recomputed, call, operation)
    assert 0 < largest.entries <= 1024 * 1024 // 3
