"""IDBR: k-means by brute force, halves and replays by hand, the loss against its formula, and what is kept."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.methods.idbr import (
    HalvesMaker,
    Idbr,
    IdbrConfig,
    IdbrNetwork,
    ReplaySchedule,
    kmeans,
    select_representatives,
    squared_distances,
)
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import Epochs, ExampleRef
from regard.errors import UserError
from tests.continual.small_tasks import BUDGET, loaded, stream

CLS, SEP, UNK = 2, 3, 1
HALVING = HalvesMaker(frozenset({0, CLS, SEP, 4}), SEP, length=10, pad=0)


def begun(*, dropout: float = 0.0, **config: Any) -> tuple[Learner, Idbr]:
    replay = {"memory_fraction": 0.25, "replay_interval": 3} if config.get("replay", True) else {}
    method = Idbr(IdbrConfig(**{**replay, "hidden_size": 5, **config}))
    return make_learner(stream(), method, loaded(dropout=dropout), BUDGET, seed=1), method


def test_what_fewer_tasks_have_does_not_depend_on_how_many_there_are() -> None:
    """A run that goes on with more tasks is one over all of them."""
    states = []
    for one in (dataclasses.replace(stream(), tasks=stream().tasks[:2], order=(0, 1)), stream()):
        learner = make_learner(one, Idbr(IdbrConfig(hidden_size=5)), loaded(), BUDGET, seed=1)
        states.append(learner.network.state_dict())
    fewer, more = states
    assert fewer["tasks.bias"].shape == (2,)
    assert more["tasks.bias"].shape == (len(stream().tasks),)
    for name in [name for name in fewer if name.startswith(("tasks", "orders", "classifier.head"))]:
        assert torch.equal(more[name][: len(fewer[name])], fewer[name]), name


# -- k-means --------------------------------------------------------------------------------------------


def spread(points: Tensor, groups: tuple[int, ...]) -> float:
    """The sum of squared distances of points to the means of their groups."""
    chosen = torch.tensor(groups)
    parts = [points[chosen == group] for group in set(groups)]
    return sum(float((part - part.mean(0)).square().sum()) for part in parts)


def test_kmeans_finds_what_trying_all_groupings_finds() -> None:
    draw = torch.Generator().manual_seed(3)
    centers = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    points = centers.repeat_interleave(3, 0)[:8] + torch.randn(8, 2, generator=draw, dtype=torch.float64)
    best = min(spread(points, groups) for groups in itertools.product(range(3), repeat=8) if len(set(groups)) == 3)
    for seed in range(5):
        found = kmeans(points, 3, seed=seed)[1]
        assert spread(points, tuple(found.tolist())) == pytest.approx(best)


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 99))
def test_kmeans_ends_where_nothing_moves(count: int, centers: int, seed: int) -> None:
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found, groups = kmeans(points, centers, seed=seed)
    assert len(found) == min(count, centers)
    for number, point in enumerate(points):
        assert groups[number] == (found - point).square().sum(1).argmin()
    for number, center in enumerate(found):
        if (groups == number).any():
            assert torch.allclose(center, points[groups == number].mean(0))


def test_representatives_are_the_nearest_to_each_mean() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0], [20.0], [21.0], [21.5]])
    # means 2 and 20.8333
    assert select_representatives(points, 2, seed=0) == [1, 4]
    assert select_representatives(points, 6, seed=0) == [0, 1, 2, 3, 4, 5]
    assert select_representatives(points[:1].repeat(4, 1), 3, seed=0) == [0]


def test_distances_are_squared() -> None:
    assert squared_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).tolist() == [[25.0]]


# -- halves ---------------------------------------------------------------------------------------------


class First:
    """A random generator that always draws the same place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def integers(self, low: int, high: int) -> int:
        assert low <= self.place < high
        return self.place


def test_halves_by_hand() -> None:
    written, exchanged = HALVING.cut([CLS, 7, 8, 9, SEP], First(1))  # type: ignore[arg-type]
    assert written == [CLS, 7, SEP, 8, 9, SEP]
    assert exchanged == [CLS, 8, 9, SEP, 7, SEP]
    # of two texts the separator between them goes
    assert HALVING.cut([CLS, 7, SEP, 8, 9, SEP], First(2))[0] == [CLS, 7, 8, SEP, 9, SEP]  # type: ignore[arg-type]
    # a full row makes room; an unknown token is text
    full = [CLS, *range(5, 13), SEP]
    assert HALVING.cut(full, First(3))[0] == [CLS, 5, 6, 7, SEP, 8, 9, 10, 11, SEP]  # type: ignore[arg-type]
    assert HALVING.cut([CLS, UNK, SEP], First(1))[0] == [CLS, UNK, SEP, SEP]  # type: ignore[arg-type]
    assert HALVING.cut([CLS, SEP], First(1)) == ([CLS, SEP], [CLS, SEP])  # type: ignore[arg-type]
    # a causal model's text, with nothing around it
    assert HALVING.cut([7, 8], First(1)) == ([7, SEP, 8], [8, SEP, 7])  # type: ignore[arg-type]


def test_rows_in_halves() -> None:
    rows = {
        "input_ids": torch.tensor([[CLS, 7, 8, SEP, 0], [CLS, 7, 8, 9, SEP]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool(),
        "token_type_ids": torch.zeros(2, 5, dtype=torch.long),
        "labels": torch.tensor([1, 0]),
    }
    found = HALVING.split_rows(rows, First(1))  # type: ignore[arg-type]
    assert found["input_ids"].tolist() == [[CLS, 7, SEP, 8, SEP, 0], [CLS, 7, SEP, 8, 9, SEP]]
    assert found["halves"].tolist() == [[CLS, 8, SEP, 7, SEP, 0], [CLS, 8, 9, SEP, 7, SEP]]
    assert found["attention_mask"].tolist() == [[True] * 5 + [False], [True] * 6]
    assert found["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert found["halves_types"].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert found["labels"].tolist() == [1, 0]


def test_a_tokenizer_needs_a_separator() -> None:
    tokenizer = loaded().tokenizer
    assert HalvesMaker.from_tokenizer(tokenizer, length=8, pad=0) == HalvesMaker(frozenset({0, 2, 3, 4}), SEP, 8, 0)
    tokenizer.sep_token = None
    with pytest.raises(UserError, match="separator"):
        HalvesMaker.from_tokenizer(tokenizer, length=8, pad=0)


# -- replays --------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(0, 3), st.integers(1, 5))
def test_replays(count: int, tasks: int, interval: int) -> None:
    """Each new example is seen as often as without; each interval-th batch is mixed with all memories."""
    items = [ExampleRef(tasks, row) for row in range(count)]
    new = Epochs(items, [1] * count, size=4, epochs=2, seed=0)
    old = [[ExampleRef(task, row) for row in range(2 + 3 * task)] for task in range(tasks)]
    plan = ReplaySchedule(new, old, interval=interval, seed=0)
    found = [plan.at(step) for step in range(plan.steps)]
    replaying = [here for here, replays in found if replays]
    assert all(0 < len(here) <= 4 for here, _ in found)
    assert sorted(item for here, _ in found for item in here if item.task == tasks) == sorted(2 * items)
    rounds = new.steps // interval if tasks else 0
    assert len(replaying) == rounds * (tasks + 1)
    for number, memory in enumerate(old):
        drawn = [item for here in replaying for item in here if item.task == number]
        assert len(drawn) == rounds * min(4, len(memory))
    assert [plan.at(step) for step in range(plan.steps)] == found


def test_a_round_by_hand() -> None:
    new = Epochs([ExampleRef(1, row) for row in range(6)], [1] * 6, size=2, epochs=1, seed=0)
    plan = ReplaySchedule(new, [[ExampleRef(0, 0), ExampleRef(0, 1), ExampleRef(0, 2)]], interval=2, seed=0)
    assert plan.steps == 4
    assert plan.at(0) == (new.at(0), False)
    mixed = [*plan.at(1)[0], *plan.at(2)[0]]
    assert plan.at(1)[1]
    assert plan.at(2)[1]
    assert {item for item in mixed if item.task} == set(new.at(1))
    assert len({item for item in mixed if not item.task}) == 2
    assert plan.at(3) == (new.at(2), False)


# -- the loss -------------------------------------------------------------------------------------------


def entropy(logits: Tensor, number: int) -> float:
    return float(logits.double().logsumexp(0) - logits.double()[number])


def test_the_loss_is_its_formula() -> None:
    learner, method = begun(nsp_weight=0.7, task_weight=0.3, generic_reg_weight=0.2, specific_reg_weight=0.9)
    run_first(learner, method)
    network: Any = learner.network
    batches = method.batches(learner, 1, learner.fine_tuning_phase())
    with torch.no_grad():
        network.head.generic[0].weight.mul_(1.1)
        for step in range(batches.steps):
            rows = batches.rows(step)
            assert by_hand(learner, method, rows) == pytest.approx(
                float(method.loss(learner, network.eval(), rows)), rel=1e-5
            )


def test_a_model_in_float64_has_its_loss_in_float64() -> None:
    method = Idbr(IdbrConfig(memory_fraction=0.25, replay_interval=1, hidden_size=5))
    learner = make_learner(stream(), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1)
    run_first(learner, method)
    rows = method.batches(learner, 1, learner.fine_tuning_phase()).rows(0)
    with torch.no_grad():
        loss = method.loss(learner, learner.network.eval(), rows)
        by_hand_loss = by_hand(learner, method, rows, nsp=1.0, task_weight=1.0, generic_weight=0.5, specific_weight=0.5)
    assert loss.dtype == torch.float64
    assert by_hand_loss == pytest.approx(float(loss), rel=1e-12)


def run_first(learner: Learner, method: Idbr) -> None:
    """The first task is over, untrained, and the second begins."""
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    learner.task = 1
    method.before_task(learner, 1)


def by_hand(
    learner: Learner,
    method: Idbr,
    rows: dict[str, Tensor],
    nsp: float = 0.7,
    task_weight: float = 0.3,
    generic_weight: float = 0.2,
    specific_weight: float = 0.9,
) -> float:
    """Each row on its own, in both orders, without padding."""
    network, chosen, total = learner.network, method.config, 0.0
    assert isinstance(network, IdbrNetwork)
    for number, label in enumerate(rows["labels"].tolist()):
        if label == IGNORE_INDEX:
            continue
        real, task, row = (rows[name][number] for name in ("attention_mask", "tasks", "rows"))
        own = learner.stream.class_indices(int(task))
        for order, name in enumerate(("input_ids", "halves")):
            ids = rows[name][number][real][None]
            one = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            space = network.spaces(one)
            generic, specific = space[0, :5], space[0, 5:]
            total += entropy(network.head.classes(space)[0, list(own)], own.index(label)) / 2
            total += nsp * entropy(network.orders(generic), order) / 2
            if rows["replays"][number]:
                total += task_weight * entropy(network.tasks(specific)[:2], int(task)) / 2
            if order == 0:
                before = method.previous_spaces[ExampleRef(int(task), int(row))]
                weight = chosen.replay_reg_scale if rows["replays"][number] else chosen.new_reg_scale
                moved = (space[0] - before).square()
                total += weight * float(generic_weight * moved[:5].mean() + specific_weight * moved[5:].mean())
    return total


def test_the_loss_of_a_batch_is_that_of_its_parts() -> None:
    learner, method = begun()
    run_first(learner, method)
    batches = method.batches(learner, 1, learner.fine_tuning_phase())
    rows = next(rows for step in range(batches.steps) if (rows := batches.rows(step))["replays"].all())
    learner.network.eval()
    parts = [{name: value[part] for name, value in rows.items()} for part in (slice(0, 1), slice(1, 4))]
    with torch.no_grad():
        whole, *losses = (float(method.loss(learner, learner.network, part)) for part in (rows, *parts))
    assert sum(losses) == pytest.approx(whole, rel=1e-5)


def test_what_was_noted_is_where_the_spaces_were() -> None:
    learner, method = begun(dropout=0.5)
    run_first(learner, method)
    network: Any = learner.network.eval()
    assert set(method.previous_spaces) == {*learner.items(1), *method.state.examples}
    with torch.no_grad():
        for item in (ExampleRef(1, 3), method.state.examples[0]):
            assert torch.allclose(network.spaces(learner.rows([item])), method.previous_spaces[item], atol=1e-6)


def test_rows_as_they_are_have_the_plain_loss() -> None:
    learner, method = begun()
    rows = learner.rows(learner.items(0)[:3])
    network = learner.network.eval()
    expected = learner.cross_entropy(network(rows), rows)
    assert torch.equal(method.loss(learner, network, rows), expected)


# -- the whole ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_it_learns_and_keeps_its_share() -> None:
    budget = dataclasses.replace(BUDGET, num_epochs=6, learning_rate=3e-3, batch_size=8)
    method = Idbr(IdbrConfig(memory_fraction=0.1, replay_interval=5, hidden_size=16))
    ran = run_stream(make_learner(stream(24), method, loaded(dropout=0.0), budget, seed=1), method)
    assert [row["memory_examples"] for row in ran.rows["cost"]] == [4, 4 + 7, 4 + 7 + 4]
    assert method.memory_size == 2000
    assert [item.task for item in method.state.examples] == [0] * 4 + [1] * 7 + [2] * 4
    # 36 batches of the first task; 54 and 36 of the others, with 1 and 2 steps more for each fifth
    assert [row["steps"] for row in ran.rows["cost"]] == [6 * 6, 6 * 9 + 10, 6 * 6 + 2 * 7]
    last = [row["score"] for row in ran.rows["matrix"] if row["after_task"] == 3 and row["scenario"] == "til"]
    assert sum(last) / 3 > 70


def test_the_memory_is_shared_out_among_tasks() -> None:
    learner, method = begun(memory_fraction=0.9, memory_size=8)
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    assert (len(method.state.examples), method.memory_size) == (2, 8)
    with pytest.raises(UserError, match=r"^memory_size: expected an example of each of 3 tasks"):
        begun(memory_size=2)


def test_a_tokenizer_without_separator_is_refused_before_the_run() -> None:
    model = loaded()
    model.tokenizer.sep_token = None
    with pytest.raises(UserError, match=r"^tokenizer: expected a separator or an end of text"):
        make_learner(stream(), Idbr(), model, BUDGET, seed=1)


def test_without_replay_nothing_is_kept() -> None:
    learner, method = begun(replay=False)
    run_stream(learner, method)
    assert method.state.examples == []
    assert method.memory_size == 0
    batches = method.batches(learner, 2, learner.fine_tuning_phase())
    assert not any(batches.rows(step)["replays"].any() for step in range(batches.steps))
    assert set(method.previous_spaces) == set(learner.items(2))


@pytest.mark.exhaustive
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Any) -> None:
    learner, method = begun(dropout=0.1)
    whole = run_stream(learner, method)

    def stop(_: Learner, learnt: int) -> None:
        if learnt == 1:
            raise KeyboardInterrupt

    learner, method = begun(dropout=0.1)
    with pytest.raises(KeyboardInterrupt):
        run_stream(learner, method, folder=tmp_path, on_task=stop)
    learner, method = begun(dropout=0.1)
    again = run_stream(learner, method, folder=tmp_path, resume=True)
    assert again.rows["matrix"] == whole.rows["matrix"]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


@pytest.mark.parametrize(
    "name, value",
    [
        ("memory_fraction", 1.5),
        ("replay_interval", 0),
        ("replay_interval", 1.5),
        ("hidden_size", 0),
        ("generic_reg_weight", -1.0),
        ("replay", "yes"),
    ],
)
def test_settings_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}: expected"):
        IdbrConfig(**{name: value})


@pytest.mark.exhaustive
def test_classes_of_later_tasks_are_what_they_were_at_the_start() -> None:
    """Weight decay has moved them: before each task those without a task so far are as in a run that goes on."""
    (learner, method), seen = begun(), list[bool]()

    def look(current: Any, task: int) -> list[dict[str, Any]]:
        unseen = ~current.task_classes[:task].any(0)
        head, start = current.network.classifier.head, current.start
        names = ("vectors", "bias")
        seen.append(all(torch.equal(getattr(head, n)[unseen], start[f"classifier.head.{n}"][unseen]) for n in names))
        return []

    run_stream(learner, method, diagnose=look)  # before and after each task
    assert seen == [True, False] * 3
