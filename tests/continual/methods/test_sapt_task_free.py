"""SAPT without a task id: what comes again is recognised, its block trained on, and nothing else of it changed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.novelty import novelty
from regard.continual import run as running
from regard.continual.gate import find_closed_gates, measure_gate
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig
from regard.continual.methods.sapt_task_free import SaptTaskFree, SaptTaskFreeConfig, TaskFreeNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState, collect_tensors
from regard.data.stream import ClassificationTask, Stream
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, CLASSES, examples, learnt_router, loaded, stream

ROWS = 12
SMALL: dict[str, Any] = {**learnt_router(), "r": 2, "router_warmup_steps": 60, "memory_size": 10}
AGAIN = 2
"""The portion that has the classes of the first one."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))


def recurring(rows: int = ROWS) -> Stream:
    """Three portions, the third of which has new rows of the first one's classes under another name."""
    first, second = stream(rows).tasks[:2]
    drawn, labels = random.Random(77), CLASSES[0]
    again = ClassificationTask(
        name="again",
        labels=labels,
        train=examples(labels, rows, drawn),
        dev=examples(labels, 3, drawn),
        test=examples(labels, 4, drawn),
        sha256={"train": "again"},
    )
    return Stream(name="recurring", tasks=(first, second, again), order=(0, 1, 2), seed=0)


def longer() -> Stream:
    """The same and a fourth portion, which is new."""
    of = recurring()
    return replace(of, tasks=(*of.tasks, stream(ROWS).tasks[2]), order=(0, 1, 2, 3))


def begun(of: Stream, **config: Any) -> tuple[Learner, SaptTaskFree]:
    method = SaptTaskFree(SaptTaskFreeConfig(**{**SMALL, **config}))
    return make_learner(of, method, loaded(dropout=0.0), BUDGET, seed=1), method


def test_a_shut_gate_is_measured_by_the_blocks_that_there_are() -> None:
    """Of two blocks an equal share is a half, however many portions came."""
    place = {"after_task": 20, "task_index": 3, "task": "again"}
    weights = {1: 0.9, 2: 0.1}
    rows = [{**place, "statistic": "weight", "adapter": block, "value": value} for block, value in weights.items()]
    rows.append({**place, "statistic": "own_adapter_weight", "adapter": 2, "value": 0.1})
    assert find_closed_gates(rows, 20, newest_only=False) == {"again": 0.1}
    assert find_closed_gates([*rows[:2], {**rows[2], "value": 0.3}], 20, newest_only=False) == {}


@cache
def learnt() -> tuple[RunState, SaptTaskFree, tuple[dict[str, Tensor], ...], tuple[dict[str, Tensor], ...]]:
    """The stream learnt; the weights after each portion, and what was kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
        learner, method = begun(recurring())
        after, kept = list[dict[str, Tensor]](), list[dict[str, Tensor]]()

        def look(learner: Learner, _: int) -> None:
            after.append({name: value.clone() for name, value in collect_tensors(learner.network).items()})
            kept.append({name: value.clone() for name, value in method.state.tensors.items()})

        return run_stream(learner, method, on_task=look), method, tuple(after), tuple(kept)


def decided(method: SaptTaskFree, portions: int = 3) -> list[int]:
    return [method.state.values[f"portion/{number}"]["block"] for number in range(portions)]


# -- what is decided ------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_what_comes_again_is_recognised_and_gets_no_new_block() -> None:
    ran, method, *_ = learnt()
    network = ran.learner.network_as(TaskFreeNetwork)
    assert decided(method) == [0, 1, 0]
    assert [method.state.values[f"portion/{number}"]["new"] for number in range(3)] == [True, True, False]
    assert [network.adapter_of(number) for number in range(3)] == [0, 1, 0]
    assert int(network.count) == int(network.router.count) == 2
    assert {name for name in method.state.tensors if name.startswith("target/")} == {"target/0", "target/1"}
    rows = network.weights(ran.learner.rows(ran.learner.items(1)[:4]))
    assert rows is not None
    assert rows.shape == (4, 2)


def test_what_was_decided_by_is_written_down_and_is_the_test_s() -> None:
    ran, method, _, kept = learnt()
    told = method.state.values["portion/1"]
    vectors = method._training_vectors(ran.learner, 1)
    found = novelty(vectors, kept[0]["vectors/0"], seed=ran.learner.seed_for("novelty", 1, 0))
    assert len(vectors) < method.config.novelty_samples  # all of them were compared
    assert told == {"block": 1, "new": True, "statistic": [found.statistic], "p": [found.p]}
    assert found.p <= method.config.false_alarm_rate
    again = method.state.values["portion/2"]
    assert again["p"][0] > method.config.false_alarm_rate >= again["p"][1]
    assert again["statistic"][0] < again["statistic"][1]


def test_at_most_so_many_rows_are_compared() -> None:
    learner, method = begun(recurring(), novelty_samples=5)
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.after_task(learner, 0)
    told, vectors = method._decide(learner, 1), method._training_vectors(learner, 1)
    chosen = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(learner.seed_for("compared", 1)))[:5]
    found = novelty(vectors[chosen], method.state.tensors["vectors/0"], seed=learner.seed_for("novelty", 1, 0))
    assert told["p"] == [found.p]


@pytest.mark.exhaustive
def test_where_all_is_new_it_is_sapt() -> None:
    learner, method = begun(stream(ROWS))
    ours = run_stream(learner, method)
    told = Sapt(SaptConfig(**SMALL))
    theirs = run_stream(make_learner(stream(ROWS), told, loaded(dropout=0.0), BUDGET, seed=1), told)
    assert decided(method) == [0, 1, 2]
    found, expected = collect_tensors(ours.network), collect_tensors(theirs.network)
    assert found.keys() - expected.keys() == {"given"}
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert method.state.tensors.keys() == told.state.tensors.keys()
    assert all(torch.equal(value, method.state.tensors[name]) for name, value in told.state.tensors.items())
    assert ours.rows["matrix"] == theirs.rows["matrix"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config, blocks", [({"false_alarm_rate": 1.0}, [0, 1, 2]), ({"reuse_threshold": 0.01}, [0, 0, 0])]
)
def test_one_may_always_take_a_new_block_or_reuse_one_that_is_a_little_alike(
    config: dict[str, Any], blocks: list[int]
) -> None:
    learner, method = begun(recurring(), **config)
    for task in range(3):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        method.after_task(learner, task)
    assert decided(method) == blocks
    assert int(learner.network_as(TaskFreeNetwork).count) == max(blocks) + 1


@pytest.mark.exhaustive
def test_after_a_recurrence_a_new_portion_gets_the_next_block_which_begins_as_new_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins = list[tuple[int, int]]()
    monkeypatch.setattr(LoraAdapterPool, "copy", lambda _, block, other: begins.append((block, other)))
    learner, method = begun(longer())
    for task in range(4):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        method.after_task(learner, task)
    assert decided(method, 4) == [0, 1, 0, 2]
    assert begins == [(1, 0), (2, 1)]
    assert learner.network_as(TaskFreeNetwork).current_adapter == 2
    assert [one.target.shape for one in method.past_tasks(learner, 3)] == [(2,), (2,)]
    assert method.reflection_strength(3) == 2 * method.config.router_loss_weight


# -- what is trained, and what is kept --------------------------------------------------------------------


def test_only_the_block_that_is_known_is_trained_again() -> None:
    ran, _, after, _ = learnt()
    before, now = after[1], after[2]
    moved = {name for name, value in now.items() if not torch.equal(value, before[name])} - {"given"}
    blocks = {name for name in moved if ".adapters." in name}
    assert blocks
    assert all(name.endswith((".A.0", ".B.0")) for name in blocks)
    assert {name for name in moved if ".keys." in name} == {"router.keys.0"}
    assert {"router.down", "router.up"} <= moved
    assert all(
        not part.any() for layer in ran.learner.network_as(TaskFreeNetwork).pool.adapters for part in layer.B[2:]
    )


def test_the_others_are_reflected_on_and_the_own_weight_is_asked_for() -> None:
    learner, method = begun(recurring(), router_loss_weight=2.0)
    for task in range(2):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        method.after_task(learner, task)
    learner.task = AGAIN
    method.before_task(learner, AGAIN)
    method.place_adapter(learner, AGAIN)
    network, rows = learner.network_as(TaskFreeNetwork).eval(), learner.rows(learner.items(AGAIN)[:3], size=4)
    mixed = network.weights(rows)
    assert mixed is not None
    target, stored = method.state.tensors["target/1"], method.state.tensors["vectors/1"]
    apart = (target * (target.log() - network.router(stored).log())).sum(1).mean()
    expected = learner.cross_entropy(network(rows), rows) - 2.0 * mixed[:3, 0].log().sum() + 3 * 2.0 * apart
    assert torch.allclose(method.loss(learner, network, rows), expected, rtol=1e-5)
    network.train()
    network.config = replace(network.config, joint_training=False)
    alone = network.weights(rows)
    assert alone is not None
    assert torch.equal(alone, torch.tensor([[1.0, 0.0]] * 4))


def test_a_block_stands_for_all_of_its_rows() -> None:
    ran, method, _, kept = learnt()
    learner, attention = ran.learner, ran.learner.network_as(TaskFreeNetwork).router
    old, new = kept[1]["vectors/0"], method._training_vectors(learner, AGAIN)
    with torch.no_grad():
        expected = (attention(old).mean(0) + attention(new).mean(0)) / 2  # as many rows of each portion
    torch.testing.assert_close(method.state.tensors["target/0"], expected)
    assert torch.equal(method.state.tensors["target/1"], kept[1]["target/1"])
    assert method.state.values["seen/0"] == 2 * 2 * ROWS
    merged = method.state.tensors["vectors/0"]
    of_old, of_new = (sum(bool((row == other).all(1).any()) for row in merged) for other in (old, new))
    assert len(merged) == SMALL["memory_size"]
    assert of_old >= 5
    assert of_new >= 5


def test_what_a_block_is_held_to_goes_by_the_rows_of_its_portions() -> None:
    learner, method = begun(recurring())
    network = learner.network_as(TaskFreeNetwork)
    network.start_adapter(1)
    network.given[AGAIN] = 0
    stored = method._training_vectors(learner, 0)[:5].clone()
    method.state.tensors["vectors/0"], method.state.values["seen/0"] = stored, 72
    method.after_task(learner, AGAIN)
    found = method._training_vectors(learner, AGAIN)
    with torch.no_grad():
        expected = (24 * network.router(found).mean(0) + 72 * network.router(stored).mean(0)) / 96
        even = (network.router(found).mean(0) + network.router(stored).mean(0)) / 2
    assert len(found) == 24
    torch.testing.assert_close(method.state.tensors["target/0"], expected)
    assert not torch.allclose(expected, even)


def test_what_is_kept_of_portions_goes_by_their_rows() -> None:
    learner, method = begun(recurring(), memory_size=8)
    found = torch.arange(30.0)[:, None]
    for seen, new in ((10, 6), (30, 4), (1000, 1)):
        merged = method._merge_vectors(learner, AGAIN, -torch.arange(1.0, 9.0)[:, None], seen, found)
        assert (len(merged), int((merged >= 0).sum()), len(merged.unique())) == (8, new, 8)


def test_the_gate_is_looked_at_by_the_blocks_that_were_given() -> None:
    ran, method, *_ = learnt()
    rows = measure_gate(ran.learner, method, 3)
    by = {(row["task_index"], row["statistic"], row["adapter"]): row["value"] for row in rows}
    for place, block in ((1, 1), (2, 2), (3, 1)):
        assert by[place, "own_adapter_weight", block] == by[place, "weight", block] > 0.5
        assert (place, "own_adapter_score", block) in by
        assert (place, "last_adapter_score", 3 - block) in by
        assert by[place, "reflection", None] >= 0
    assert {row["adapter"] for row in rows} == {1, 2, None}


# -- runs that go on --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_run_that_was_broken_off_decides_the_same(stopped: int, tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def stop(_: Learner, done: int) -> None:
        if done == stopped:
            raise Broken

    learner, method = begun(recurring())
    if stopped < 3:
        with pytest.raises(Broken):
            run_stream(learner, method, folder=tmp_path, on_task=stop)
    else:
        run_stream(learner, method, folder=tmp_path)
    learner, method = begun(recurring())
    ran = run_stream(learner, method, folder=tmp_path, resume=True)
    expected, before, after, _ = learnt()
    assert method.state.values == before.state.values
    assert all(torch.equal(value, collect_tensors(ran.network)[name]) for name, value in after[-1].items())
    assert ran.rows["matrix"] == expected.rows["matrix"]
    assert measure_gate(learner, method, 3, scored_tasks=()) == measure_gate(
        expected.learner, before, 3, scored_tasks=()
    )


@pytest.mark.exhaustive
def test_texts_are_learnt_as_well() -> None:
    method = SaptTaskFree(
        SaptTaskFreeConfig(**learnt_router(r=2, router_warmup_steps=20, memory_size=8, false_alarm_rate=0.05))
    )
    learner = make_learner(
        small_text_tasks.stream(2, 2), method, small_text_tasks.lively("t5"), small_text_tasks.BUDGET, seed=1
    )
    run_stream(learner, method)
    assert decided(method, len(learner.stream))[0] == 0
    assert len(method.state.values["portion/1"]["p"]) == 1


# -- what cannot be -----------------------------------------------------------------------------------------


def test_rows_that_are_too_few_to_tell_are_refused() -> None:
    learner, method = begun(recurring(1), false_alarm_rate=0.001)
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.after_task(learner, 0)
    told = r"false_alarm_rate: 0.001 is less than what 3 rows of 'red-blue-green' and 2 that were kept can tell"
    with pytest.raises(UserError, match=told):
        method.place_adapter(learner, 1)


@pytest.mark.parametrize(
    "config, told",
    [
        ({"reflection": "density"}, "reflection: expected 'real', got 'density'"),
        (
            {"false_alarm_rate": 0.0005},
            "false_alarm_rate: expected a number of at least 0.001 and at most 1, got 0.0005",
        ),
        ({"reuse_threshold": 1.5}, "reuse_threshold: expected a number of at least 0 and at most 1, got 1.5"),
        ({"memory_size": 1}, "memory_size: expected a whole number of at least 2, got 1"),
        ({"novelty_samples": 0}, "novelty_samples: expected a whole number of at least 2, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        SaptTaskFreeConfig(**learnt_router(**config))
