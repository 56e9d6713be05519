"""The chunked loss against PyTorch's own, of all logits at once."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.errors import UserError
from regard.models import loss
from regard.models.loss import linear_cross_entropy, logits_cross_entropy


def _case(tokens: int, width: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    return [hidden, weight, labels.masked_fill(torch.rand(tokens, generator=generator) < 0.3, -100)]


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(0, 20),
    width=st.integers(1, 6),
    vocabulary=st.integers(2, 30),
    rows=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_the_sum_and_its_gradients_are_those_of_all_logits_at_once(
    tokens: int, width: int, vocabulary: int, rows: int, seed: int
) -> None:
    hidden, weight, labels = _case(tokens, width, vocabulary, seed)
    expected = cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    gradients = torch.autograd.grad(expected * 3, (hidden, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss.MAX_LOGITS, "cpu", rows * vocabulary)
        found = linear_cross_entropy(hidden, weight, labels)
        own = torch.autograd.grad(found * 3, (hidden, weight))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_no_more_rows_than_asked_for_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.MAX_LOGITS, "cpu", 3 * 16)
    made, losses = [], loss._loss_and_gradient

    def noting(logits: Tensor, labels: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
        made.append(len(logits))
        return losses(logits, labels, exact)

    monkeypatch.setattr(loss, "_loss_and_gradient", noting)
    linear_cross_entropy(*_case(10, 4, 16, 0))
    assert made == [3, 3, 3, 1]


def test_only_what_learns_has_a_gradient() -> None:
    hidden, weight, labels = _case(8, 4, 16, 1)
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)[0]
    alone = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), hidden)[0]
    assert torch.equal(whole, alone)
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), labels).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_logits_that_are_there_give_the_same_a_few_rows_at_a_time(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, labels = _case(10, 4, 16, 3)
    logits = (hidden @ weight.T).detach().to(dtype).requires_grad_()
    exact = torch.promote_types(dtype, torch.float32)
    expected = cross_entropy(logits.to(exact), labels, reduction="sum", ignore_index=-100)
    gradient = torch.autograd.grad(expected, logits)[0]
    monkeypatch.setitem(loss.MAX_LOGITS, "cpu", rows * 16)
    made, log_softmax = [], Tensor.log_softmax

    def noting(x: Tensor, *given: Any, **options: Any) -> Tensor:
        made.append(len(x))
        return log_softmax(x, *given, **options)

    monkeypatch.setattr(Tensor, "log_softmax", noting)
    found = logits_cross_entropy(logits.view(2, 5, 16), labels.view(2, 5))
    assert found.dtype == exact
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], gradient)
    assert max(made) == min(rows, 5)
    assert sum(made) == 10


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters ask for them always: their matrix, the largest of all, would be made in validation."""
    made = []
    monkeypatch.setattr(torch, "mm", lambda *given, **options: made.append("hidden"))
    zeros = torch.zeros_like

    def noting(like: Tensor, **options: Any) -> Tensor:
        made.append("weight")
        return zeros(like, **options)

    monkeypatch.setattr(torch, "zeros_like", noting)
    hidden, weight, labels = _case(8, 4, 16, 1)
    expected = cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    assert made == []
    linear_cross_entropy(hidden, weight, labels)
    assert set(made) == {"hidden", "weight"}


def test_under_autocast_the_sum_is_float32_and_products_are_not() -> None:
    hidden, weight, labels = _case(64, 16, 32, 2, torch.float32)
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels)
        rounded = cross_entropy((hidden @ weight.T).float(), labels, reduction="sum", ignore_index=-100)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rounded, rtol=1e-6, atol=0)
    for one, other in zip(torch.autograd.grad(found, (hidden, weight)), exact, strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_other_negative_labels_are_no_classes() -> None:
    hidden, weight, labels = _case(5, 3, 7, 0)
    labels[2] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    hidden, weight, labels = _case(5, 3, 7, 0)
    with pytest.raises(UserError, match=r"expected no gradient of its gradient \(create_graph\); return_logits=True"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), weight, create_graph=True)
