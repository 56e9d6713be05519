"""Blocks that are told apart by the distances of texts, against distances that are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.epi import (
    OTHER_TASK_PENALTY,
    Epi,
    EpiConfig,
    EpiNetwork,
    class_statistics,
    make_whitening,
)
from regard.continual.network import INPUTS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors, load_tensors
from regard.continual.text_learner import make_text_learner
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream

SMALL = EpiConfig(r=2)


pytestmark = pytest.mark.usefixtures("without_flops")


def made(config: EpiConfig = SMALL) -> tuple[Learner, Epi]:
    """A run in float64."""
    method = Epi(config)
    learner = make_learner(stream(), method, loaded(dtype=torch.float64), BUDGET, seed=1)
    learner.network.double()
    return learner, method


def rows_of(learner: Learner, *items: tuple[int, int]) -> dict[str, Tensor]:
    return learner.rows([ExampleRef(*one) for one in items])


def drawn(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- formulas ---------------------------------------------------------------------------------------------


def test_statistics_are_means_and_the_mean_covariance_of_classes() -> None:
    states, labels = drawn(12, 3), torch.tensor([4] * 5 + [2] * 6 + [7])
    means, covariance = class_statistics(states, labels)
    assert set(means) == {2, 4, 7}
    for number, mean in means.items():
        np.testing.assert_allclose(mean.numpy(), states[labels == number].numpy().mean(0))
    both = [np.cov(states[labels == number].numpy().T) for number in (2, 4)]
    np.testing.assert_allclose(covariance.numpy(), (both[0] + both[1]) / 2)


def test_statistics_of_classes_of_one_row() -> None:
    means, covariance = class_statistics(drawn(2, 3), torch.tensor([0, 1]))
    assert set(means) == {0, 1}
    assert not covariance.any()
    assert torch.equal(make_whitening(covariance), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_whitening_is_half_of_a_pseudo_inverse(rows: int, shrinkage: float) -> None:
    _, covariance = class_statistics(drawn(rows, 5), torch.zeros(rows))
    spread = float(covariance.diagonal().mean())
    moved = (1 - shrinkage) * covariance.numpy() + shrinkage * spread * np.eye(5)
    whitening = make_whitening(covariance, shrinkage)
    np.testing.assert_allclose((whitening @ whitening.T).numpy(), np.linalg.pinv(moved, rcond=1e-6), atol=1e-9)


@pytest.mark.parametrize("shrinkage", [0.0, EpiConfig().shrinkage])
def test_distances_are_to_the_nearest_class_by_the_mean_covariance_of_tasks(shrinkage: float) -> None:
    learner, _ = made(EpiConfig(r=2, shrinkage=shrinkage))
    network = learner.network_as(EpiNetwork)
    sets = [drawn(30, 16, 1), drawn(40, 16, 2) + 1]
    labels = [torch.arange(30) % 2, 2 + torch.arange(40) % 3]
    for task in range(2):
        network.learn(sets[task], labels[task], task)
    classes = [[sets[task][labels[task] == one].numpy() for one in labels[task].unique()] for task in range(2)]
    shared = np.mean([np.mean([np.cov(one.T) for one in task], axis=0) for task in classes], axis=0)
    inverse = np.linalg.inv((1 - shrinkage) * shared + shrinkage * np.trace(shared) / 16 * np.eye(16))
    texts = drawn(4, 16, 3)
    found = network.distances(texts)
    assert found.shape == (4, 2)
    for row in range(4):
        for task in range(2):
            gaps = [texts[row].numpy() - one.mean(0) for one in classes[task]]
            expected = min(float(gap @ inverse @ gap) for gap in gaps)
            assert float(found[row, task]) == pytest.approx(expected)


# -- the network ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_text_is_what_the_frozen_model_makes_of_it() -> None:
    learner, method = made()
    run_stream(learner, method)
    rows, plain = rows_of(learner, (0, 1), (2, 4)), loaded(dtype=torch.float64).model
    states = plain(rows["input_ids"], rows["attention_mask"]).last_hidden_state
    real = rows["attention_mask"][..., None]
    expected = (states * real).sum(1) / real.sum(1)
    torch.testing.assert_close(learner.network_as(EpiNetwork).eval().states(rows), expected.detach())


def test_a_task_is_learnt_among_its_own_classes_whatever_the_head() -> None:
    method = Epi(SMALL)
    learner = make_learner(stream(), method, loaded(), BUDGET, seed=1, head="labels")
    learner.task = 2
    tasks = torch.tensor([2, 2])
    assert torch.equal(learner.contrast_mask(tasks), learner.task_classes[tasks])
    learner.loss_classes = "seen"
    assert not torch.equal(learner.contrast_mask(tasks), learner.task_classes[tasks])


@pytest.mark.exhaustive
def test_a_text_is_answered_with_one_block_among_its_task_s_classes() -> None:
    learner, method = made()
    run_stream(learner, method)
    network = learner.network_as(EpiNetwork).eval()
    rows = rows_of(learner, *[(task, row) for task in range(3) for row in (0, 3, 7)])
    with torch.no_grad():
        tasks, found = network.identify(rows), network(rows)
        assert not torch.equal(tasks, torch.full_like(tasks, 2))
        for row, task in enumerate(tasks.tolist()):
            with network.pool.use_weights(torch.nn.functional.one_hot(torch.tensor(task), 3).double()):
                alone = network.classifier(rows["input_ids"][[row]], rows["attention_mask"][[row]]).logits[0]
            own = learner.task_classes[task]
            torch.testing.assert_close(found[row][own], alone[own])
            torch.testing.assert_close(found[row][~own], alone[~own] - OTHER_TASK_PENALTY)
    network.train()
    assert torch.equal(network.weights(rows), torch.tensor([[0.0, 0.0, 1.0]]).expand(9, 3))  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_known_task_is_answered_by_its_block_whatever_the_text_is_near_to() -> None:
    learner, _ = made()
    network = learner.network_as(EpiNetwork)
    network.start_adapter(1)
    network.owned.copy_(learner.task_classes)
    with torch.no_grad():
        for adapter in range(2):
            for part in network.pool.parameters_of(adapter):
                part.normal_(generator=torch.Generator().manual_seed(adapter))
    rows = rows_of(learner, (0, 1), (1, 2))
    network.known[0, 0] = True  # all texts are taken for those of the first task
    knowing = network.eval().knowing(1)
    assert knowing is not None
    with torch.no_grad():
        with knowing:
            found = network(rows)
        with network.pool.use_weights(torch.tensor([0.0, 1.0], dtype=torch.float64)):
            expected = network.classifier(**{name: rows[name] for name in INPUTS if name in rows}).logits
        torch.testing.assert_close(found, expected)
        assert network.identify(rows).tolist() == [0, 0]
    assert made(EpiConfig(r=2, known_task="router"))[0].network.knowing(0) is None
    assert EpiConfig.restore({"r": 2}).known_task == "router"


def test_tasks_of_other_words_are_told_apart() -> None:
    learner, method = made()
    run_stream(learner, method)
    network = learner.network_as(EpiNetwork).eval()
    right = sum(
        int((network.identify(rows) == rows["tasks"]).sum())
        for task in range(3)
        for rows in learner.iterate_batches(learner.items(task))
    )
    assert right >= 0.8 * sum(len(learner.items(task)) for task in range(3))


@pytest.mark.exhaustive
def test_old_tasks_stay_as_they_are_where_they_are_recognised() -> None:
    learner, method = made()
    blocks, vectors = list[Tensor](), list[Tensor]()

    def note(learner: Learner, learnt: int) -> None:
        head: Any = learner.network.classifier.head
        blocks.append(learner.network_as(EpiNetwork).pool.adapters[0].B[0].detach().clone())
        vectors.append(head.vectors[learner.task_classes[0]].detach().clone())

    run_stream(learner, method, on_task=note)
    assert all(torch.equal(one, blocks[0]) for one in blocks)
    assert all(torch.equal(one, vectors[0]) for one in vectors)
    assert blocks[0].any()


@pytest.mark.exhaustive
def test_what_tells_tasks_apart_is_saved_with_the_network() -> None:
    learner, method = made()
    run_stream(learner, method)
    other, _ = made()
    load_tensors(other.network, collect_tensors(learner.network))
    rows = rows_of(learner, (0, 1), (1, 5), (2, 4))
    with torch.no_grad():
        assert torch.equal(other.network.eval()(rows), learner.network.eval()(rows))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UserError, match="shrinkage: expected a number of at least 0 and at most 1, got 2"):
        EpiConfig(shrinkage=2)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_tasks_from_text_to_text_are_told_apart_as_well(kind: small_text_tasks.Kind) -> None:
    method = Epi(EpiConfig(r=2, shrinkage=0.1))
    learner = make_text_learner(
        small_text_tasks.stream(many=2), method, small_text_tasks.loaded(kind), small_text_tasks.BUDGET, seed=1
    )
    run_stream(learner, method)
    network = learner.network
    assert isinstance(network, EpiNetwork)
    assert network.known.tolist() == [[True], [True]]
    network.eval()
    for task in range(2):
        for rows in learner.iterate_batches(learner.items(task)):
            assert (network.identify(rows) == task).double().mean() >= 0.75
            inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
            logits = network(rows)
            for row, chosen in enumerate(network.identify(rows).tolist()):
                with network.pool.use_weights(torch.nn.functional.one_hot(torch.tensor(chosen), 2).float()):
                    alone = network.classifier(**inputs, labels=rows["labels"]).logits[row]
                torch.testing.assert_close(logits[row], alone)


def test_answers_are_written_with_the_block_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Epi(EpiConfig(r=2, shrinkage=0.1))
    learner = make_text_learner(
        small_text_tasks.stream(many=2), method, small_text_tasks.loaded(), small_text_tasks.BUDGET, seed=1
    )
    run_stream(learner, method)
    network, rows = learner.network_as(EpiNetwork).eval(), rows_of(learner, (0, 1), (1, 4), (0, 7))
    seen = list[Any]()

    def generate(*_: Any) -> Tensor:
        seen.append(network.pool.mixture.weights)
        return rows["input_ids"]

    monkeypatch.setattr(network.classifier, "generate", generate)
    network.generate(rows, 3)
    assert torch.equal(seen[0].argmax(1), network.identify(rows))
    assert torch.equal(seen[0].sum(1), torch.ones(3))


def test_a_task_of_single_rows_leaves_the_covariance_as_it_was() -> None:
    """It tells none; counted as none it would shrink that of the others."""
    network = made()[0].network_as(EpiNetwork)
    width = network.means.shape[2]
    network.learn(drawn(40, width).double(), torch.arange(40) % 2, 0)
    known = network.covariance.clone()
    network.learn(drawn(2, width, seed=1).double(), torch.tensor([2, 3]), 1)
    assert torch.equal(network.covariance, known)
    assert network.known[1, 2:4].all()


def test_classes_of_another_task_than_the_found_one_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the task known they are compared among themselves; in float32, 1e-5 and 0 less 1000 were one number."""
    learner = make_learner(stream(), Epi(SMALL), loaded(), BUDGET, seed=1)
    network = learner.network_as(EpiNetwork).eval()
    network.owned.copy_(learner.task_classes)
    logits = torch.zeros(1, len(learner.stream.classes))
    own = learner.task_classes[1].nonzero().flatten()
    logits[0, own[-1]] = 1e-5

    def forward(self: EpiNetwork, _: dict[str, Tensor]) -> Tensor:
        self.identified_tasks = torch.tensor([0])
        return logits

    monkeypatch.setattr(PoolNetwork, "forward", forward)
    assert int(network({})[0, own].argmax()) == len(own) - 1
