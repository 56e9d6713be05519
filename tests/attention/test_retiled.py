"""Output and gradients of masked, soft-capped softmax with sinks against autograd through the whole matrix."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from regard.attention import tiles
from regard.attention.call import QKV, AttentionCall
from regard.attention.operator import attend, compute_output
from regard.attention.reduction import ReductionRequest
from regard.attention.retiled import is_mostly_hidden, retiled, supports_retiled

BATCH, HEADS, GROUPS, QUERIES, KEYS = 3, 4, 2, 10, 12


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.ROWS, "cpu", 4)


@pytest.fixture(params=[64, 1 << 11, 1 << 22], ids=["a head at a time", "some samples", "one tile"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.BYTES, "cpu", request.param)


def make_call(**options: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = random(BATCH, HEADS, QUERIES, 4), random(BATCH, GROUPS, KEYS, 4), random(BATCH, GROUPS, KEYS, 6)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    return AttentionCall(query=query, key=key, value=value, scale=0.7, **options)


def dense(call: AttentionCall) -> Tensor:
    """Return the output from the definition: a row that sees neither key nor sink is zero."""
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (call.key, call.value))
    scores = call.query @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias
    keep = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if call.causal:
        keep = torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + call.offset
    if call.keep is not None:
        keep = keep & call.keep
    if call.key_mask is not None:
        keep = keep & call.key_mask[:, None, None]
    exps = torch.where(keep, scores, -torch.inf).exp()
    total = exps.sum(-1, keepdim=True)
    if call.sink is not None:
        sink = call.sink[None, :, None] if call.sink.ndim == 1 else call.sink
        total = total + sink.exp()[..., None]
    return torch.where(total > 0, exps / torch.where(total > 0, total, 1.0), 0.0) @ value


def window(size: int) -> Tensor:
    distance = torch.arange(QUERIES)[:, None] + 2 - torch.arange(KEYS)
    return ((distance >= 0) & (distance < size))[None, None]


def random_mask(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5


CASES: dict[str, dict[str, Any]] = {
    "window": {"keep": window(3)},
    "causal, soft cap": {"causal": True, "offset": 2, "softcap": 0.8},
    "window, soft cap": {"keep": window(5), "softcap": 0.5},
    "sink": {"causal": True, "offset": 2, "sink": torch.randn(HEADS, dtype=torch.float64)},
    "sink, window": {"keep": window(4), "sink": torch.randn(HEADS, dtype=torch.float64)},
    "sink of each query": {"keep": window(4), "sink": torch.randn(BATCH, HEADS, QUERIES, dtype=torch.float64)},
    "padding": {"key_mask": random_mask(BATCH, KEYS), "softcap": 2.0},
    "mask of samples": {"keep": random_mask(BATCH, 1, QUERIES, KEYS), "softcap": 0.4},
    "mask of heads": {"keep": random_mask(1, HEADS, QUERIES, KEYS), "sink": torch.zeros(HEADS, dtype=torch.float64)},
    "bias": {"bias": torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64), "keep": window(6)},
    "blind rows": {"keep": window(3) & (torch.arange(QUERIES) > 4)[:, None], "softcap": 1.0},
}


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_sizes")
def test_output_and_gradients(case: str) -> None:
    call = make_call(**CASES[case])
    learned = [call.query, call.key, call.value]
    if call.sink is not None:
        sink = call.sink.clone().requires_grad_()
        call = replace(call, sink=sink)
        learned.append(sink)
    assert supports_retiled(call)
    output, expected = retiled(call), dense(call)
    torch.testing.assert_close(output, expected)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((output * weights).sum(), learned)
    for found, right in zip(grads, torch.autograd.grad((expected * weights).sum(), learned), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("logit", [-torch.inf, torch.finfo(torch.float64).min])
def test_a_sink_that_is_none_has_no_gradient_beside_rows_that_see_no_key(logit: float) -> None:
    """It was no number: the logit, less the normalizer of nothing."""
    sink = torch.full((HEADS,), logit, dtype=torch.float64, requires_grad=True)
    call = make_call(sink=sink, **CASES["blind rows"])
    (grad,) = torch.autograd.grad(retiled(call).sum(), sink)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_a_call_that_is_trained_takes_this_way() -> None:
    call = make_call(keep=window(3), softcap=1.0)
    assert "_Retiled" in type(compute_output(call).grad_fn).__name__
    for options in ({"dropout": 0.5}, {"bias": torch.zeros(1, 1, QUERIES, KEYS)}):
        other = replace(call, **options)
        assert not supports_retiled(other)
        assert "_Retiled" not in type(compute_output(other).grad_fn).__name__


@pytest.mark.parametrize("sink", [False, True], ids=["window", "sink"])
def test_a_bias_that_is_trained_has_its_gradient(sink: bool) -> None:
    """Tiles have none for masks: such a call takes another way, though its mask hides most."""
    bias = torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    call = make_call(keep=window(2), bias=bias, sink=torch.zeros(HEADS, dtype=torch.float64) if sink else None)
    (grad,) = torch.autograd.grad(compute_output(call).square().sum(), bias)
    torch.testing.assert_close(grad, torch.autograd.grad(dense(call).square().sum(), bias)[0])


def test_logits_of_a_sink_in_half_precision_are_not_rounded_again() -> None:
    """A logit of 20 is 28.85 to base 2, which bfloat16 has as 28.75: 7 % less of the sink in its own gradient."""
    sink = torch.full((HEADS,), 20.0, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.full((1, 1, 1, KEYS), 20.0, dtype=torch.float32)
    call = replace(make_call(keep=window(4), bias=bias).to_dtype(torch.float32), sink=sink)
    exact = sink.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(retiled(call).sum(), sink)
    expected = torch.autograd.grad(dense(make_call(keep=window(4), bias=bias.double(), sink=exact)).sum(), exact)[0]
    torch.testing.assert_close(grad.double(), expected, atol=0, rtol=2**-8)


def test_a_mask_that_hides_most_takes_this_way() -> None:
    """Of the whole matrix PyTorch's attention is quicker, and in half precision, under autocast and with dropout."""
    call = make_call(keep=window(2))
    assert "_Retiled" in type(compute_output(call).grad_fn).__name__
    torch.testing.assert_close(compute_output(call), dense(call))
    with torch.no_grad():
        assert is_mostly_hidden(call)
        torch.testing.assert_close(compute_output(call), dense(call))
    others = (
        replace(call, dropout=0.5),
        replace(call, keep=window(12)),
        replace(call, keep=None),
        call.to_dtype(torch.bfloat16),
    )
    for other in others:
        assert not is_mostly_hidden(other)
        assert "_Retiled" not in type(compute_output(other).grad_fn).__name__
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_mostly_hidden(call)


def test_no_rows_have_no_gradients_of_their_own() -> None:
    call = make_call(keep=window(3), softcap=1.0)
    empty = replace(call, **{name: getattr(call, name)[:0] for name in QKV})
    assert not supports_retiled(empty)
    output = compute_output(empty)
    assert output.shape == (0, HEADS, QUERIES, 6)
    output.sum().backward()
    assert call.query.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    exact = make_call(keep=window(4), softcap=0.8)
    call = exact.to_dtype(dtype)
    output, _ = attend(call, ReductionRequest(names=frozenset({"column_mass"})))
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(output.double(), dense(exact), atol=tolerance, rtol=tolerance)
    names = [getattr(exact, name) for name in QKV]
    grads = torch.autograd.grad(output.double().square().sum(), names)
    for found, right in zip(grads, torch.autograd.grad(dense(exact).square().sum(), names), strict=True):
        torch.testing.assert_close(found, right, atol=30 * tolerance, rtol=30 * tolerance)


def test_autocast_does_not_round() -> None:
    exact = make_call(keep=window(4), softcap=0.8)
    call = exact.to_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = retiled(call)
        (grad,) = torch.autograd.grad(output.square().sum(), exact.query)
    (right,) = torch.autograd.grad(dense(exact).square().sum(), exact.query)
    torch.testing.assert_close(output.double(), dense(exact), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, right, atol=1e-4, rtol=1e-4)


def test_a_mask_that_is_written_to_is_an_error() -> None:
    keep = window(4).clone()
    output = retiled(make_call(keep=keep, softcap=1.0))
    keep.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_mask_of_inference_mode_may_be_trained_under() -> None:
    """It ended in an error of PyTorch, which keeps no such tensor for a backward pass."""
    call = make_call(keep=window(3), softcap=1.0)
    with torch.inference_mode():
        keep = window(3)
    output = compute_output(replace(call, keep=keep))
    assert "_Retiled" in type(output.grad_fn).__name__
    names = [call.query, call.key, call.value]
    grads = torch.autograd.grad(output.square().sum(), names)
    for found, right in zip(grads, torch.autograd.grad(dense(call).square().sum(), names), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}], ids=["window", "soft cap"])
def test_a_transform_of_other_tensors(options: dict[str, Any]) -> None:
    """It ended in PyTorch's words on autograd.Function: the tensors of the call are no part of the transform."""
    call, factor = make_call(keep=window(2), **options), torch.ones(6, dtype=torch.float64)
    found = torch.func.grad(lambda factor: (compute_output(call) * factor).sum())(factor)
    torch.testing.assert_close(found, dense(call).sum((0, 1, 2)))


@pytest.mark.usefixtures("_sizes")
def test_several_gradients_at_once() -> None:
    """As `torch.autograd.functional.jacobian` computes them: a map over the backward pass."""
    call = make_call(keep=window(3), softcap=1.0)
    output, exact, names = retiled(call), dense(call), [call.query, call.key, call.value]
    weights = torch.randn(2, *output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    expected = torch.autograd.grad(exact, names, weights, is_grads_batched=True)
    found = torch.autograd.grad(output, names, weights, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, expected)
    found = torch.func.vmap(lambda grad: torch.autograd.grad(output, names, grad))(weights)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}], ids=["window", "soft cap"])
def test_a_graph_of_make_fx_serves_other_masks(options: dict[str, Any]) -> None:
    """It had the ranges of the mask that it was made with, so that other masks gave wrong outputs."""
    call, other = make_call(keep=window(2), **options), window(10)
    assert call.keep is not None
    graph = make_fx(lambda keep: compute_output(replace(call, keep=keep)))(call.keep)
    torch.testing.assert_close(graph(other), dense(replace(call, keep=other)))
