"""Rows whose adapters and weights stayed as they were are not answered again, and their scores stay the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from regard.adapters.discriminant import DiscriminantRouter
from regard.continual.gate import measure_gate
from regard.continual.known_answers import TOLERANCE, Answering, KnownAnswers, digest
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig, SaptNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent, RunState
from regard.continual.scoring import generate_answers, score_task
from regard.continual.text_learner import make_text_learner
from regard.data.stream import TextTask
from regard.models.generator import Generator
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream

pytestmark = pytest.mark.usefixtures("without_flops")
LOGITS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
WEIGHTS = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])


def by(weights: Tensor = WEIGHTS, *, first: str = "a", second: str = "b", rest: str = "head") -> Answering:
    return Answering(weights, {0: first, 1: second}, rest)


def known(**options: Any) -> KnownAnswers:
    answers = KnownAnswers(**options)
    answers.keep(2, "test", [7, 3, 5], LOGITS, by())
    return answers


def test_rows_are_known_under_the_weights_and_adapters_that_answered_them() -> None:
    answers = known()
    assert answers.has(2, "test")
    assert not answers.has(2, "dev")
    assert answers.recall(1, "test", [7, 3, 5], by()) == {}
    assert answers.recall(2, "dev", [7, 3, 5], by()) == {}
    assert answers.recall(2, "test", [7, 3, 5], by(rest="another head")) == {}
    found = answers.recall(2, "test", [5, 9, 7], by(WEIGHTS[[2, 0, 0]]))
    assert {row: logits.tolist() for row, logits in found.items()} == {5: [5.0, 6.0], 7: [1.0, 2.0]}
    wider = torch.cat([WEIGHTS, torch.tensor([[0.0], [0.1], [TOLERANCE / 2]])], 1)  # of one adapter more
    assert set(answers.recall(2, "test", [7, 3, 5], by(wider))) == {7, 5}
    assert set(answers.recall(2, "test", [7, 3, 5], by(WEIGHTS + torch.tensor([[0], [2], [1]]) * TOLERANCE))) == {7, 5}


def test_an_adapter_that_changed_is_none_that_answered() -> None:
    answers = known()
    assert set(answers.recall(2, "test", [7, 3, 5], by(first="trained again"))) == {5}
    assert set(answers.recall(2, "test", [7, 3, 5], by(second="trained again"))) == {7}


def test_the_newest_answers_stay_and_those_of_another_head_go() -> None:
    bytes_of_one = known().num_bytes
    assert bytes_of_one == 3 * 8 + 6 * 4 + 6 * 4
    answers = known(max_bytes=2 * bytes_of_one)
    answers.keep(0, "test", [0, 1, 2], LOGITS + 1, by())
    answers.keep(1, "test", [0, 1, 2], LOGITS + 2, by())
    assert [answers.has(task, "test") for task in (2, 0, 1)] == [False, True, True]
    answers.keep(1, "test", [0, 1, 2], LOGITS + 3, by(rest="another head"))
    assert answers.num_bytes == 2 * bytes_of_one
    assert answers.recall(1, "test", [0], by(WEIGHTS[:1])) == {}
    assert answers.recall(1, "test", [0], by(WEIGHTS[:1], rest="another head"))[0].tolist() == [4.0, 5.0]


def test_what_is_kept_is_a_copy_and_survives_a_file() -> None:
    logits, answers = LOGITS.clone(), KnownAnswers()
    answers.keep(0, "test", [0, 1, 2], logits, by())
    logits.zero_()
    other = KnownAnswers()
    other.restore(answers.record(), answers.tensors())
    found = other.recall(0, "test", [0, 1, 2], by())
    assert torch.equal(torch.stack([found[row] for row in range(3)]), LOGITS)


def begun(*, keeps: bool = True, **config: Any) -> tuple[Learner, Sapt]:
    method = Sapt(SaptConfig(r=2, **config))
    learner = make_learner(stream(8), method, loaded(dropout=0.0), BUDGET, seed=1, head="labels")
    assert isinstance(learner.network.known_answers, KnownAnswers)
    if not keeps:
        learner.network.known_answers = None
    return learner, method


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is sure of the adapter of most rows, as of texts that differ."""
    scores = DiscriminantRouter.scores
    monkeypatch.setattr(DiscriminantRouter, "scores", lambda *given: 100 * scores(*given))


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward pass in evaluation has."""
    counts, states = list[int](), Sapt.Network.known_answers
    assert states is None

    def count(module: nn.Module, args: Any) -> None:
        if not module.training:
            counts.append(len(args[0]["input_ids"]))

    made = SaptNetwork.__init__

    def make(self: SaptNetwork, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        self.register_forward_pre_hook(count)

    monkeypatch.setattr(SaptNetwork, "__init__", make)
    return counts


@pytest.mark.usefixtures("sure")
def test_scores_are_those_of_a_run_that_answers_every_row_again(answered: list[int]) -> None:
    runs = []
    for keeps in (False, True):
        learner, method = begun(keeps=keeps)
        answered.clear()
        ran = run_stream(learner, method, gated=4)
        runs.append(({name: ran.rows[name] for name in ("matrix", "gate", "learnt")}, sum(answered)))
    (expected, rows_again), (found, rows) = runs
    assert found == expected
    assert rows < 0.8 * rows_again


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_answers_are_those_of_a_run_that_writes_every_one_again(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter ones are kept with ends behind them."""
    generate, runs, written = Generator.generate, list[Any](), list[int]()

    def count(self: Generator, ids: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
        written.append(len(ids))
        return generate(self, ids, mask, new_tokens)

    monkeypatch.setattr(Generator, "generate", count)
    for keeps in (False, True):
        method = Sapt(SaptConfig(r=2))
        made = small_text_tasks.stream(3, 3), method, small_text_tasks.lively(kind), small_text_tasks.BUDGET
        learner = make_text_learner(*made, seed=1)
        if not keeps:
            learner.network.known_answers = None
        written.clear()
        ran = run_stream(learner, method, gated=3)
        answers = [sorted(generate_answers(learner, cast(TextTask, task))) for task in learner.stream.tasks]
        runs.append(({name: ran.rows[name] for name in ("matrix", "gate", "learnt")}, answers, sum(written)))
    (expected, expected_answers, rows_again), (found, found_answers, rows) = runs
    assert found == expected
    assert found_answers == expected_answers
    assert rows < 0.8 * rows_again


@pytest.mark.usefixtures("sure")
def test_what_changed_is_answered_again(answered: list[int]) -> None:
    learner, method = begun()
    run_stream(learner, method)
    network = learner.network_as(SaptNetwork)
    rows = len(learner.encoded[0, "test"])

    def count() -> int:
        answered.clear()
        with network.use_only(0):
            score_task(learner, 0, tasks_trained=3)
        return sum(answered)

    count()
    assert count() == 0
    with torch.no_grad():
        network.pool.parameters_of(1)[0].add_(1)
    assert count() == 0  # another adapter
    with torch.no_grad():
        network.pool.parameters_of(0)[0].add_(1)
    assert count() == rows
    weight = next(parameter for parameter in network.classifier.parameters() if not parameter.requires_grad)
    weight.requires_grad_(True)  # as a method of one's own may train more
    assert count() == rows
    with torch.no_grad():
        weight.add_(1)
    assert count() == rows
    with torch.no_grad():
        network.classifier.head.vectors.add_(1)  # type: ignore[operator, union-attr]  # of label texts: a buffer
    assert count() == rows
    assert count() == 0


def test_networks_that_answer_otherwise_know_nothing() -> None:
    class Other(SaptNetwork):
        def forward(self, rows: dict[str, Tensor]) -> Tensor:
            return 2 * super().forward(rows)

    class Unmixed(SaptNetwork):
        def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
            return self.pool.use_weights(None)

    for network in (Other, Unmixed):
        method = Sapt(SaptConfig(r=2))
        method.Network = network  # type: ignore[misc]
        assert make_learner(stream(4), method, loaded(), BUDGET, seed=1).network.known_answers is None
    made = make_learner(stream(4), Sapt(SaptConfig(r=2, top_k=1)), loaded(), BUDGET, seed=1)
    assert made.network.known_answers is None


@pytest.mark.usefixtures("sure")
def test_a_resumed_run_knows_the_same_answers(answered: list[int], tmp_path: Path) -> None:
    def run(folder: Path | None, *, stops: bool = False, resume: bool = False) -> RunState:
        learner, method = begun()
        answered.clear()

        def look(told: ProgressEvent) -> None:
            answered.clear()
            if stops and told.task_index == 3:
                raise KeyboardInterrupt

        return run_stream(learner, method, folder=folder, resume=resume, on_progress=look, gated=4)

    whole, rows = run(None), list(answered)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stops=True)
    resumed = run(tmp_path, resume=True)
    assert answered == rows
    for name in ("matrix", "gate", "learnt"):
        assert resumed.rows[name] == whole.rows[name]
    kept = [ran.learner.network.known_answers for ran in (whole, resumed)]
    assert [None if one is None else one.record() for one in kept[:1]] == [one.record() for one in kept[1:] if one]
    expected, found = (one.tensors() for one in kept if one is not None)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_digest_tells_numbers_apart() -> None:
    one = torch.arange(4.0)
    assert digest([one]) == digest([one.clone().view(2, 2)])
    assert digest([one]) != digest([one + 1])
    assert digest([]) != digest([one])


def test_the_gate_of_a_single_task_needs_no_further_answer(answered: list[int]) -> None:
    learner, method = begun()
    learner.task = 0
    method.place_adapter(learner, 0)
    score_task(learner, 0, tasks_trained=1)
    answered.clear()
    measure_gate(learner, method, 1, rows=4)
    assert answered == []
