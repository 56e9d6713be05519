"""What a task costs: the work of correcting gradients, and memory of the task at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from regard.attention.flops import flop_counter
from regard.continual import run as running
from regard.continual.costs import FirstStep, TaskCost, _fit_line, measure_flops
from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.methods.baselines import Finetune
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.data.examples import Examples
from regard.data.stream import Stream
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, CLASSES, loaded, stream

ONE = replace(BUDGET, num_epochs=1, num_probing_epochs=1)


def equal_lengths() -> Stream:
    """The first two tasks, every text of six words."""
    made = stream()
    tasks = []
    for task, labels in zip(made.tasks[:2], CLASSES[:2], strict=True):
        parts = {name: replace_texts(task.split(name), labels) for name in ("train", "dev", "test")}  # type: ignore[arg-type]
        tasks.append(replace(task, **parts))
    return replace(made, tasks=tuple(tasks), order=(0, 1))


def replace_texts(given: Any, labels: tuple[str, ...]) -> Examples:
    texts = tuple((f"the a of on . {labels[label]}",) for label in given.labels)
    return Examples(texts=texts, labels=given.labels)


def learnt(name: str, of: Stream | None = None, **config: Any) -> RunState:
    kind = METHODS[name]
    method = kind(kind.Config(**config))
    return run_stream(make_learner(of or equal_lengths(), method, loaded(), ONE, seed=1), method)


def flops(ran: RunState) -> list[float]:
    return [row["flops"] for row in ran.rows["cost"]]


@pytest.mark.every_value
@pytest.mark.parametrize(
    "tokens, work, expected",
    [
        ([1, 2, 3], [5, 7, 9], (2, 3)),
        ([1, 2, 3], [9, 6, 3], (0, 6)),  # not −3 a token
        ([1, 2, 3], [0, 2, 7], (1.5, 0)),  # not 3.5 a token, and −4 a piece
        ([4, 4, 4], [8, 8, 8], (2, 0)),
        ([1, 3], [5, 7], (3, 0)),  # two pieces tell no line from chance
    ],
)
def test_the_work_of_pieces_is_a_line_that_is_nowhere_below_nothing(
    tokens: list[float], work: list[float], expected: tuple[float, float]
) -> None:
    assert _fit_line(np.array(tokens, dtype=float), np.array(work, dtype=float)) == pytest.approx(expected)


def test_a_gradient_of_the_memory_is_counted() -> None:
    """That of a batch as large as the step's own, once there is a memory: twice the work of fine-tuning."""
    plain, corrected = flops(learnt("finetune")), flops(learnt("agem"))
    assert corrected[0] == plain[0]
    assert corrected[1] == pytest.approx(2 * plain[1], rel=1e-9)
    half = flops(learnt("agem", replay_batch_size=2))
    assert half[1] == pytest.approx(1.5 * plain[1], rel=1e-9)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The FLOPs of each training of a phase, as all its steps run."""
    done: list[int] = []
    train = running.training.train

    def counted(*of: Any, **options: Any) -> Any:
        with flop_counter() as counter:
            result = train(*of, **options)
        done.append(counter.get_total_flops())
        return result

    monkeypatch.setattr(running.training, "train", counted)
    return done


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["finetune", "osf", "seekr", "lfpt5"])
def test_the_operations_told_are_those_done(name: str, done: list[int]) -> None:
    """What all steps do, counted as they run: some methods work once a batch, or on stored rows behind the others."""
    sizes = {"batch_size": 8, "micro_batch_size": 3}
    method = METHODS[name](METHODS[name].Config())
    if name == "lfpt5":
        learner = make_learner(
            small_text_tasks.stream(),
            method,
            small_text_tasks.loaded("llama"),
            replace(small_text_tasks.BUDGET, **sizes),
            seed=1,
        )
    else:
        learner = make_learner(stream(), method, loaded(), replace(ONE, **sizes), seed=1)
    assert sum(flops(run_stream(learner, method))) == pytest.approx(sum(done), rel=0.1)


def test_texts_of_several_lengths_and_work_of_a_micro_batch_are_told_as_done(done: list[int]) -> None:
    """The padding of a first batch is not that of the others, and `osf` does as much for a short row as for a long."""
    made, random = stream(), Random(0)

    def uneven(given: Any) -> Examples:
        texts = tuple((" ".join(["cat"] * random.choice([1, 2, 8])),) for _ in given.texts)
        return Examples(texts=texts, labels=given.labels)

    task = made.tasks[0]
    splits = {part: uneven(task.split(part)) for part in ("train", "dev", "test")}  # type: ignore[arg-type]
    one = replace(made, tasks=(replace(task, **splits),), order=(0,))
    micro_batches = {"finetune": 1, "osf": 2}
    for name, size in micro_batches.items():
        done.clear()
        method = METHODS[name](METHODS[name].Config())
        told = flops(
            run_stream(
                make_learner(one, method, loaded(), replace(ONE, batch_size=8, micro_batch_size=size), seed=1), method
            )
        )
        assert told == pytest.approx(done, rel=0.1)


@pytest.mark.exhaustive
def test_counting_changes_nothing(request: pytest.FixtureRequest) -> None:
    """Neither weights nor scores: the first step is the one that it is without a count.

    Where layers are fused with their adapters, a count sees the parts, whose sums are rounded otherwise.
    """
    counted = {name: learnt(name, stream()) for name in ("agem", "migu")}
    assert all(min(flops(found)) > 0 for found in counted.values())
    request.getfixturevalue("without_flops")
    for name, found in counted.items():
        plain = learnt(name, stream())
        assert not any(flops(plain))
        assert found.rows["matrix"] == plain.rows["matrix"]
        for one, other in zip(found.network.parameters(), plain.network.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6 if name == "migu" else 0.0, rtol=0.0)
            assert one.grad is None


def test_memory_is_of_a_task_until_it_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak begins anew before a task, and is read when its method is done; what a run has had is of its whole."""
    told: list[str] = []
    peaks = iter(range(1, 100))

    def peak(_: Any) -> float:
        told.append("read")
        return float(next(peaks))

    class Told(Finetune):
        def before_task(self, learner: Learner, task: int) -> None:
            told.append("prepare")

        def after_task(self, learner: Learner, task: int) -> None:
            told.append("finish")

    monkeypatch.setattr(running, "peak_memory", peak)
    monkeypatch.setattr(running, "reset_peak", lambda _: told.append("reset"))
    method = Told()
    ran = run_stream(make_learner(equal_lengths(), method, loaded(), ONE, seed=1), method)
    assert told == ["reset", "prepare", "finish", "read", "read"] * 2
    assert [row["peak_memory_mib"] for row in ran.rows["cost"]] == [1, 3]
    assert ran.peak_memory == 4


def test_the_peak_of_a_resumed_run_is_that_of_all_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def stop(_: Learner, num_tasks: int) -> None:
        if num_tasks == 2:
            raise Broken

    monkeypatch.setattr(running, "measure_flops", lambda *_: (0.0, 0.0))
    for peak, on_task in ((100.0, stop), (1.0, None)):
        monkeypatch.setattr(running, "peak_memory", lambda _, peak=peak: peak)
        method = Finetune()
        learner = make_learner(stream(), method, loaded(), ONE, seed=1)
        if on_task is not None:
            with pytest.raises(Broken):
                run_stream(learner, method, folder=tmp_path, on_task=on_task)
        else:
            assert run_stream(learner, method, folder=tmp_path, resume=True).peak_memory == 100.0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["finetune", "agem", "osf"])
def test_the_first_step_has_the_flops_of_one_that_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that goes on within a phase, or has several processes, tells the same."""
    method = METHODS[name](METHODS[name].Config())
    learner = make_learner(stream(4), method, loaded(), replace(ONE, batch_size=8, micro_batch_size=3), seed=1)
    told, expected, end = list[Any](), list[Any](), FirstStep.end

    def keep(self: FirstStep) -> Any:
        if (found := end(self)) is not None:
            told.append(found)
        return found

    def measured(cost: TaskCost, batches: Any) -> Any:
        phase = method.phases(learner, learner.task)[0]
        monkeypatch.setattr(FirstStep, "end", end)
        expected.append(measure_flops(learner, method, batches, phase))
        monkeypatch.setattr(FirstStep, "end", keep)
        return count_batches(cost, batches)

    count_batches = TaskCost.count_batches
    monkeypatch.setattr(TaskCost, "count_batches", measured)
    run_stream(learner, method)
    assert expected
    assert list(dict.fromkeys(told)) == list(dict.fromkeys(expected))
    assert all(per_token > 0 for per_token, _ in expected)


def test_an_error_in_the_first_step_leaves_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flops would be counted, and every operation be slow, for the rest of the process."""

    def fail(self: Finetune, learner: Learner, network: Any, rows: Any) -> Any:
        loss(self, learner, network, rows).backward()
        raise KeyboardInterrupt

    loss = Finetune.loss
    monkeypatch.setattr(Finetune, "loss", fail)
    method = METHODS["finetune"]()
    with pytest.raises(KeyboardInterrupt):
        run_stream(make_learner(stream(), method, loaded(), ONE, seed=1), method)
    assert _get_current_dispatch_mode() is None
