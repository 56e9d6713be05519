"""Heads against their definitions written out token by token, in float64; and that padding never counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import UserError
from regard.models.heads import (
    HEADS,
    LABEL_SCALE,
    POOLINGS,
    LabelTextHead,
    LinearHead,
    PreScalingHead,
    make_head,
    pool_states,
    split_label,
)

ROWS, TOKENS, WIDTH, CLASSES = 3, 7, 5, 4
COUNTS = (7, 4, 1)
"""Real tokens of each row."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real() -> Tensor:
    return torch.arange(TOKENS) < torch.tensor(COUNTS)[:, None]


def common() -> Tensor:
    """Tokens 1 and 3 of the first row, 0 of the second, and of the third row one that is padding."""
    found = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    found[0, [1, 3]] = found[1, 0] = found[2, 5] = True
    return found


def scaling(kind: Any = "full", *, dropout: float = 0.0) -> PreScalingHead:
    """A head in float64, its vectors, bias and key map of ordinary sizes."""
    head = PreScalingHead(WIDTH, CLASSES, kind=kind, dropout=dropout).double()
    with torch.no_grad():
        head.vectors.copy_(numbers(CLASSES, WIDTH, seed=1))
        head.bias.copy_(numbers(CLASSES, seed=2))
        if head.key is not None:
            head.key.copy_(numbers(WIDTH, WIDTH, seed=3))
    return head


def any_head(name: Any, *, pooling: Any, dropout: float) -> Any:
    """A new head of that name; one that reads labels has vectors for them."""
    torch.manual_seed(0)
    head = make_head(name, WIDTH, CLASSES, pooling=pooling, dropout=dropout)
    if isinstance(head, LabelTextHead):
        head.vectors = numbers(CLASSES, WIDTH, seed=1).float()
    return head


def written_out(
    states: Tensor, weighed: Tensor, vectors: Tensor, bias: Tensor, weight: Tensor | None, shift: Tensor
) -> Tensor:
    """The paper's scores, a row, a class and a token at a time; f(h) = W h + shift, or no f for equal weights."""
    rows = []
    for hidden, allowed in zip(states, weighed, strict=True):
        tokens = [token for token in range(len(hidden)) if allowed[token]]
        scores = []
        for vector, constant in zip(vectors, bias, strict=True):
            if weight is None:
                raw = torch.stack([vector.sum() * 0 for _ in tokens])
            else:
                keys = [weight @ hidden[token] + shift for token in tokens]
                raw = torch.stack([vector.dot(key) for key in keys]) / math.sqrt(WIDTH)
            exact = torch.exp(raw) / torch.exp(raw).sum()
            mixed = sum(share * hidden[token] for share, token in zip(exact, tokens, strict=True))
            scores.append(vector.dot(mixed) + constant)
        rows.append(torch.stack(scores))
    return torch.stack(rows)


def weighed_by(kind: str) -> Tensor:
    """Which tokens a head of that kind weighs: the third row has no common token that is real."""
    if kind != "sink":
        return real()
    found = common()
    found[2] = real()[2]
    return found


@pytest.mark.parametrize("kind", ["full", "uniform", "sink"])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_pre_scaling_is_what_the_paper_says(kind: str, shift: float) -> None:
    """Whatever the bias of f is: the head has none, since the softmax does not see it."""
    head, states = scaling(kind), numbers(ROWS, TOKENS, WIDTH, seed=4).requires_grad_()
    weights = numbers(ROWS, CLASSES, seed=5)
    found = head(states, real(), common())
    (found * weights).sum().backward()

    leaves = [one.detach().clone().requires_grad_() for one in (states, head.vectors, head.bias)]
    key = None if head.key is None else head.key.detach().clone().requires_grad_()
    expected = written_out(leaves[0], weighed_by(kind), *leaves[1:], key, shift * numbers(WIDTH, seed=6))
    (expected * weights).sum().backward()

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip((states, head.vectors, head.bias, head.key), (*leaves, key), strict=True):
        if mine is not None and theirs is not None:
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "uniform", "sink"])
def test_scales(kind: Any) -> None:
    found = scaling(kind).scales(numbers(ROWS, TOKENS, WIDTH, seed=4), real(), common())
    assert found.shape == (ROWS, CLASSES, TOKENS)
    torch.testing.assert_close(found.sum(-1), torch.ones(ROWS, CLASSES).double(), rtol=0, atol=1e-12)
    assert bool(((found > 0) == weighed_by(kind)[:, None]).all())
    alike = found[0].max(-1).values - found[0].where(found[0] > 0, 1.0).min(-1).values < 1e-6
    assert alike.tolist() == [kind == "uniform"] * CLASSES


def test_a_new_head_weighs_all_tokens_the_same() -> None:
    """To the bit, and gives what the head that always does gives."""
    states = numbers(ROWS, TOKENS, WIDTH).float()
    torch.manual_seed(0)
    full = make_head("full", WIDTH, CLASSES, pooling="first", dropout=0.1).eval()
    torch.manual_seed(0)
    uniform = make_head("uniform", WIDTH, CLASSES, pooling="first", dropout=0.1).eval()
    assert isinstance(full, PreScalingHead)
    scales = full.scales(states, real())
    for row, count in enumerate(COUNTS):
        assert scales[row].eq(torch.tensor(1 / count)).sum().item() == CLASSES * count
    torch.testing.assert_close(full(states, real()), uniform(states, real()), rtol=0, atol=1e-7)
    assert full.key is not None
    assert not full.key.any()
    assert float(full.vectors.detach().std()) == pytest.approx(0.02, rel=0.5)


def test_the_first_step_reaches_the_key_map() -> None:
    """Though it is zero, it has a gradient where vectors are not."""
    head = PreScalingHead(WIDTH, CLASSES).double().eval()
    head(numbers(ROWS, TOKENS, WIDTH), real()).square().sum().backward()
    assert head.key is not None
    assert head.key.grad is not None
    assert bool(head.key.grad.any())


def test_dropout_is_of_the_weights() -> None:
    """In training each weight is dropped or grows by 1 / (1 − p); in evaluation none is."""
    head, states = scaling("uniform", dropout=0.5), numbers(1, 4, WIDTH)
    whole = torch.ones(1, 4, dtype=torch.bool)
    read = (head.vectors @ states[0].T).detach()
    torch.manual_seed(0)
    found = (head.train()(states, whole) - head.bias).detach()[0]
    possible = [
        sum(2 * read[:, token] / 4 * bool(kept & (1 << token)) for token in range(4)) + torch.zeros(CLASSES)
        for kept in range(16)
    ]
    assert all(any(bool((one[c] - found[c]).abs() < 1e-12) for one in possible) for c in range(CLASSES))
    assert not torch.allclose(found, read.mean(1))
    torch.testing.assert_close(head.eval()(states, whole)[0], read.mean(1) + head.bias, rtol=0, atol=1e-12)


def test_sinks_need_to_be_known() -> None:
    with pytest.raises(UserError, match="head: sink scaling needs to know which tokens are common, got none"):
        scaling("sink")(numbers(ROWS, TOKENS, WIDTH), real())


@given(
    name=st.sampled_from(HEADS),
    pooling=st.sampled_from(POOLINGS),
    count=st.integers(1, 5),
    before=st.integers(0, 4),
    behind=st.integers(0, 4),
    size=st.floats(0, 1e4),
)
def test_padding_never_counts(name: Any, pooling: Any, count: int, before: int, behind: int, size: float) -> None:
    """However much of it there is, on whichever side, and whatever stands in it."""
    head = any_head(name, pooling=pooling, dropout=0.5).double().eval()
    states, marked = numbers(1, count, WIDTH, seed=count), torch.arange(count) % 2 == 1
    whole = torch.ones(1, count, dtype=torch.bool)
    expected = head(states, whole, marked[None])
    junk = size * numbers(1, before + behind, WIDTH, seed=9)
    padded = torch.cat([junk[:, :before], states, junk[:, before:]], dim=1)
    inside = torch.arange(before + count + behind)
    mask = ((inside >= before) & (inside < before + count))[None]
    spread = torch.ones_like(mask)
    spread[:, before : before + count] = marked
    torch.testing.assert_close(head(padded, mask, spread), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "pooling, columns",
    [("first", ([2], [0], [3])), ("last", ([4], [1], [3])), ("mean", ([2, 3, 4], [0, 1], [3]))],
)
def test_what_a_linear_head_reads(pooling: Any, columns: tuple[list[int], ...]) -> None:
    """Padding on the left, on the right, and on both sides."""
    states = numbers(3, 5, WIDTH)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
    head = LinearHead(WIDTH, CLASSES, pooling=pooling, dropout=0.5).double().eval()
    with torch.no_grad():
        head.bias.copy_(numbers(CLASSES, seed=2))
    for row, chosen in enumerate(columns):
        one = states[row, chosen].mean(0)
        torch.testing.assert_close(pool_states(states, mask, pooling)[row], one, rtol=0, atol=1e-12)
        by_hand = torch.stack([vector.dot(one) for vector in head.vectors]) + head.bias
        torch.testing.assert_close(head(states, mask)[row], by_hand, rtol=0, atol=1e-12)


def test_dropout_of_a_linear_head_is_of_what_it_reads() -> None:
    head = LinearHead(WIDTH, WIDTH, dropout=0.5).double()
    with torch.no_grad():
        head.vectors.copy_(torch.eye(WIDTH))
    states = numbers(1, 2, WIDTH)
    torch.manual_seed(1)
    found = head.train()(states, torch.ones(1, 2, dtype=torch.bool)).detach()[0] / states[0, 0]
    assert {round(one, 6) for one in found.tolist()} == {0.0, 2.0}


def test_a_head_that_is_not_known() -> None:
    with pytest.raises(UserError, match="head: expected one of linear, full, uniform, sink, labels, got 'mean'"):
        make_head("mean", WIDTH, CLASSES, pooling="first", dropout=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16(name: Any) -> None:
    """Heads take what autocast makes of states, and softmax is of float32."""
    head = any_head(name, pooling="mean", dropout=0.0)
    states = numbers(ROWS, TOKENS, WIDTH)
    whole = head(states.float(), real(), common())
    with torch.autocast("cpu", torch.bfloat16):
        low = head(states.bfloat16(), real(), common())
    torch.testing.assert_close(low.float(), whole, rtol=0, atol=0.01 * float(whole.detach().abs().max()))


# -- the words of labels --------------------------------------------------------------------------------


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.sqrt(sum(a * a for a in one) * sum(b * b for b in other))


@pytest.mark.parametrize("scale", [LABEL_SCALE, 3.0])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_logits_are_scaled_cosines(pooling: Any, scale: float) -> None:
    """Of a text's state with that of each label, written out number by number; vectors of any length."""
    states, vectors = numbers(ROWS, TOKENS, WIDTH, seed=4), 7 * numbers(CLASSES, WIDTH, seed=1)
    head = LabelTextHead(WIDTH, CLASSES, pooling=pooling, scale=scale).double()
    head.vectors.copy_(vectors)
    found = head(states, real())
    assert found.dtype == torch.float64
    for row, count in enumerate(COUNTS):
        tokens = {"first": [0], "last": [count - 1], "mean": list(range(count))}[pooling]
        read = [sum(float(states[row, token, one]) for token in tokens) / len(tokens) for one in range(WIDTH)]
        for number, vector in enumerate(vectors.tolist()):
            assert float(found[row, number]) == pytest.approx(scale * cosine(read, vector), abs=1e-12)


def test_a_head_that_reads_labels_has_nothing_to_train() -> None:
    """Its vectors are saved all the same, and nothing of what it reads is dropped out."""
    head = any_head("labels", pooling="mean", dropout=0.5)
    assert list(head.parameters()) == []
    assert list(head.state_dict()) == ["vectors", "others"]
    assert not head.vectors.requires_grad
    states = numbers(ROWS, TOKENS, WIDTH).float()
    assert torch.equal(head.train()(states, real()), head.eval()(states, real()))


def test_states_have_the_gradient_of_the_cosines() -> None:
    head = any_head("labels", pooling="mean", dropout=0.0).double()
    states = numbers(ROWS, TOKENS, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: head(given, real()), (states,))


def test_cosines_are_of_float32_whatever_the_states_are() -> None:
    head, states = any_head("labels", pooling="mean", dropout=0.0), numbers(ROWS, TOKENS, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = head(states, real())
    assert found.dtype == torch.float32
    assert torch.equal(found, head(states.float(), real()))


def test_labels_without_vectors_and_states_without_direction() -> None:
    head, states = LabelTextHead(WIDTH, CLASSES), numbers(ROWS, TOKENS, WIDTH).float()
    assert bool(head(states, real()).isnan().all())
    assert not any_head("labels", pooling="mean", dropout=0.0)(0 * states, real()).any()


@pytest.mark.parametrize(
    "label, words",
    [
        ("EducationalInstitution", "Educational Institution"),
        ("not_entailment", "not entailment"),
        ("very negative", "very negative"),
        ("Sci/Tech", "Sci/Tech"),
        ("NLPTask", "NLP Task"),
        ("TV", "TV"),
        ("top10List", "top10 List"),
        ("__two__words ", "two words"),
        ("straßeÜber", "straße Über"),
        ("A", "A"),
    ],
)
def test_the_words_of_a_label(label: str, words: str) -> None:
    assert split_label(label) == words


def test_other_words_are_one_more_class_in_training() -> None:
    head = LabelTextHead(4, 2, scale=3.0, words=5).double()
    random = torch.Generator().manual_seed(0)
    head.vectors, head.others = (torch.randn(rows, 4, generator=random, dtype=torch.float64) for rows in (2, 5))
    states, real = torch.randn(3, 6, 4, generator=random, dtype=torch.float64), torch.ones(3, 6, dtype=torch.bool)
    every = torch.cat([head.vectors, head.others])
    cosines = torch.stack(
        [torch.stack([torch.cosine_similarity(row.mean(0), one, dim=0) for one in every]) for row in states]
    )
    whole = (3 * cosines).log_softmax(-1)
    found = head.train()(states, real)
    assert found.shape == (3, 3)
    assert torch.allclose(found.log_softmax(-1)[:, :2], whole[:, :2])
    assert torch.allclose(head.eval()(states, real), 3 * cosines[:, :2])
