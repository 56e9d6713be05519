"""A run as the hooks of methods see it: rows, losses, seeds, and the network in evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.continual.learner import IGNORE_INDEX, Learner, group_by_length
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.continual.training_phase import ExampleRef, count_warmup_steps
from regard.data.examples import Examples
from regard.errors import UserError
from tests.continual.small_tasks import BUDGET, loaded, stream


def learner(**options: Any) -> Learner:
    given = {"stream": stream(), "method": METHODS["finetune"](), "loaded": loaded(), "budget": BUDGET, "seed": 1}
    return make_learner(**{**given, **options})


def test_rows_are_the_texts() -> None:
    """Of several tasks together, padded to the longest of them, labeled among the classes of the stream."""
    one = learner()
    items = [ExampleRef(2, 7), ExampleRef(0, 3), ExampleRef(1, 14), ExampleRef(0, 0)]
    rows = one.rows(items)
    texts = [one.stream.tasks[item.task].train.texts[item.row][0] for item in items]
    expected = [one.tokenizer(text)["input_ids"][:9] for text in texts]
    for ids, mask, ours in zip(rows["input_ids"], rows["attention_mask"], expected, strict=True):
        kept = ids[mask].tolist()
        assert kept[: len(ours)] == ours
        assert kept[-1] == 3
        assert set(ids[~mask].tolist()) <= {0}
    assert rows["input_ids"].shape[1] == int(rows["attention_mask"].sum(1).max())
    names = [one.stream.classes[label] for label in rows["labels"].tolist()]
    assert names == ["sit", "cat", "green", "cat"]
    assert rows["tasks"].tolist() == [2, 0, 1, 0]
    assert rows["rows"].tolist() == [7, 3, 14, 0]


def test_rows_that_fill_up_count_for_nothing() -> None:
    one, items = learner(), [ExampleRef(0, 1), ExampleRef(0, 9)]
    whole, filled = one.rows(items), one.rows(items, size=5)
    assert filled["labels"].tolist() == [*whole["labels"].tolist(), IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert torch.equal(filled["input_ids"][2:], whole["input_ids"][[0, 1, 0]])
    logits = torch.randn(5, 7)
    assert float(one.cross_entropy(logits, filled)) == pytest.approx(float(one.cross_entropy(logits[:2], whole)))


def test_the_loss_is_over_the_classes_of_each_row_s_task() -> None:
    one = learner()
    rows = {"tasks": torch.tensor([0, 1, 1]), "labels": torch.tensor([1, 2, IGNORE_INDEX])}
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    found = one.cross_entropy(logits, rows)
    first = logits[0, :2].exp().sum().log() - logits[0, 1]
    second = logits[1, 2:5].exp().sum().log() - logits[1, 2]
    assert found.item() == pytest.approx((first + second).item(), rel=1e-14)
    (gradient,) = torch.autograd.grad(found, logits)
    reached = gradient != 0
    assert reached.tolist() == [[True] * 2 + [False] * 5, [False] * 2 + [True] * 3 + [False] * 2, [False] * 7]


def test_with_the_words_of_labels_a_row_is_held_against_all_that_was_seen() -> None:
    """At the second task: rows of both against classes 0 to 4, one of the third against its own as well."""
    one = learner(head="labels")
    assert (one.loss_classes, learner().loss_classes) == ("seen", "task")
    one.task = 1
    rows = {"tasks": torch.tensor([0, 1, 2, 1]), "labels": torch.tensor([1, 2, 6, IGNORE_INDEX])}
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    found = one.cross_entropy(logits, rows)
    first = logits[0, :5].exp().sum().log() - logits[0, 1]
    second = logits[1, :5].exp().sum().log() - logits[1, 2]
    third = logits[2].exp().sum().log() - logits[2, 6]
    assert found.item() == pytest.approx((first + second + third).item(), rel=1e-14)
    found.backward()
    assert logits.grad is not None
    assert (logits.grad[:2, 5:] == 0).all()
    one.task = 0
    alone = logits[0, :2].exp().sum().log() - logits[0, 1]
    only = {name: value[:1] for name, value in rows.items()}
    assert one.cross_entropy(logits[:1], only).item() == pytest.approx(alone.item(), rel=1e-14)
    assert one.contrast_mask(torch.tensor([0])).tolist() == [[True, True, *[False] * 5]]


def test_classes_seen_so_far() -> None:
    one = learner()
    assert one.seen_classes(0).tolist() == [True] * 2 + [False] * 5
    assert one.seen_classes(1).tolist() == [True] * 5 + [False] * 2
    assert one.seen_classes(2).all()


def test_classes_of_the_same_name_are_the_same() -> None:
    first, second, third = stream().tasks
    train = replace(third, labels=("dog", "red"))
    one = learner(stream=replace(stream(), tasks=(first, second, train)))
    assert one.stream.classes == ("cat", "dog", "red", "blue", "green")
    assert one.task_classes[2].tolist() == [False, True, True, False, False]
    assert set(one.rows(one.items(2))["labels"].tolist()) == {1, 2}


def test_an_epoch_has_each_row_once() -> None:
    one = learner()
    one.task = 1
    stage = one.fine_tuning_phase()
    batches = one.epoch_batches(one.items(1), stage)
    assert (batches.steps, batches.size) == (2 * 5, 4)
    for epoch in range(2):
        drawn = [batches.rows(5 * epoch + place) for place in range(5)]
        counted = [row for rows in drawn for row in rows["rows"][rows["labels"] != IGNORE_INDEX].tolist()]
        assert sorted(counted) == list(range(18))
        assert all(len(rows["labels"]) == 4 for rows in drawn)


def test_all_tasks_together_have_the_least_number_of_steps_of_each_and_no_limit() -> None:
    """An epoch has 11 steps, of 42 rows, and 3 of the last task alone."""
    budget = replace(BUDGET, num_epochs=1, min_steps=7, default_max_steps=9)
    for name, expected in (("joint", 3 * 7), ("finetune", 7)):
        method = METHODS[name]()
        one = make_learner(stream(), method, loaded(), budget, seed=1)
        one.task = 2
        (phase,) = method.phases(one, 2)
        assert len(one.items(2)) == 12
        assert method.batches(one, 2, phase).steps == expected


def test_a_task_of_fewer_rows_than_a_batch_may_have_computes_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--batch-size 1000` made each step of a task of 18 rows compute 1000."""
    one = learner(budget=replace(BUDGET, batch_size=1000))
    one.task = 1
    batches = one.epoch_batches(one.items(1), one.fine_tuning_phase())
    assert (batches.steps, batches.size) == (2, 18)
    assert sorted(batches.rows(1)["rows"].tolist()) == list(range(18))
    assert (batches.rows(1)["labels"] != IGNORE_INDEX).all()
    monkeypatch.setattr("regard.continual.learner.num_processes", lambda: 4)
    few = one.epoch_batches(one.items(1)[:3], one.fine_tuning_phase())
    assert few.size == 4
    assert (few.rows(0)["labels"] != IGNORE_INDEX).tolist() == [True] * 3 + [False]


def test_stages_have_the_budget_s_rates() -> None:
    one = learner()
    tuning, probing = one.fine_tuning_phase(), one.probing_phase(num_epochs=7)
    assert (tuning.num_epochs, tuning.learning_rate, tuning.trains) == (2, 5e-3, "all")
    assert (probing.num_epochs, probing.learning_rate, probing.trains) == (7, 5e-2, "head")


@pytest.mark.parametrize("steps, expected", [(1, 1), (16, 1), (17, 2), (100, 6)])
def test_warm_up(steps: int, expected: int) -> None:
    assert count_warmup_steps(replace(BUDGET, warmup_ratio=0.06), steps) == expected


def test_seeds_are_of_names() -> None:
    one, other = learner(), learner(seed=2)
    names = [("batches", 0, "fine-tuning"), ("batches", 1, "fine-tuning"), ("stage", 0, "fine-tuning")]
    seeds = [each.seed_for(*name) for each in (one, other) for name in names]
    assert len(set(seeds)) == 6
    assert one.seed_for(*names[0]) == learner().seed_for(*names[0])
    assert all(0 <= seed < 2**48 for seed in seeds)


def test_rows_that_are_sampled() -> None:
    one = learner()
    drawn = one.sample_examples(1, "dev", 4)
    assert len(set(drawn)) == 4
    assert drawn == one.sample_examples(1, "dev", 4) == sorted(drawn)
    assert set(drawn) <= set(one.sample_examples(1, "dev", 6))
    assert one.sample_examples(1, "dev", 100) == [ExampleRef(1, row) for row in range(9)]


def test_in_evaluation_and_back() -> None:
    one = learner()
    one.network.train()
    one.network.classifier.encoder.eval()
    before = {name: module.training for name, module in one.network.named_modules()}
    with one.evaluation_mode() as network:
        assert not any(module.training for module in network.modules())
    assert {name: module.training for name, module in one.network.named_modules()} == before


def test_each_row_in_its_order() -> None:
    one, items = learner(), [ExampleRef(0, row) for row in (5, 1, 4, 0, 2)]
    parts = list(one.iterate_batches(items, size=2))
    assert [len(part["labels"]) for part in parts] == [2, 2, 1]
    assert [row for part in parts for row in part["rows"].tolist()] == [5, 1, 4, 0, 2]


def test_batches_by_length_have_each_row_once_and_the_shortest_first() -> None:
    one = learner()
    items = [ExampleRef(task, row) for task in (0, 1) for row in range(len(one.encoded[task, "dev"]))]
    parts = list(one.batches_by_length(items, "dev"))
    seen = [item for part in parts for item in zip(part["tasks"].tolist(), part["rows"].tolist(), strict=True)]
    assert sorted(seen) == sorted((item.task, item.row) for item in items)
    lengths = [length for part in parts for length in part["attention_mask"].sum(1).tolist()]
    assert lengths == sorted(lengths)
    for part in parts:
        pairs = zip(part["tasks"].tolist(), part["rows"].tolist(), strict=True)
        whole = one.rows([ExampleRef(*pair) for pair in pairs], split="dev")
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    assert list(one.batches_by_length([])) == []


@pytest.mark.parametrize(
    "lengths, most, sizes",
    [
        ([], 4, []),
        ([5] * 9, 4, [4, 4, 1]),
        ([10] * 8 + [11], 64, [9]),  # 99 numbers for 91 tokens
        ([10] * 8 + [12], 64, [8, 1]),  # 108 for 92 would be 17 % more
        ([10] * 8 + [20], 64, [8, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 99], 64, [8]),  # few rows stay together
    ],
)
def test_groups_by_length_have_little_padding(lengths: list[int], most: int, sizes: list[int]) -> None:
    assert group_by_length(lengths, most) == sizes


def test_texts_that_are_too_long_lose_their_end() -> None:
    first, *others = stream().tasks
    long = Examples(texts=tuple((("the " * 30 + "cat"),) for _ in first.train.texts), labels=first.train.labels)
    one = learner(stream=replace(stream(), tasks=(replace(first, train=long), *others)))
    assert one.encoded[0, "train"].truncated == 12
    with pytest.raises(UserError, match="length: expected at most 16 tokens, which this model takes, got a text of 33"):
        learner(stream=one.stream, budget=replace(BUDGET, length=40))
    assert one.length(ExampleRef(0, 0)) == 10
