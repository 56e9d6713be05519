"""Methods that hold the network where it was: weights (EWC), or answers (LwF), against their papers' formulas."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS, regularized
from regard.continual.methods.regularized import (
    CENTRE,
    FISHER,
    Ewc,
    EwcConfig,
    Lwf,
    LwfConfig,
    distillation_losses,
    fisher_information,
    sample_labels,
)
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.continual.training_phase import ExampleRef
from regard.data.stream import Stream
from regard.errors import UserError
from regard.models.heads import LinearHead
from tests.continual.small_tasks import BUDGET, loaded, stream

Rows = dict[str, Tensor]
ITEMS = [ExampleRef(1, row) for row in (0, 3, 7, 11, 16)]
OWN = [2, 3, 4]
"""The classes of the second task among those of the stream."""


def precise(method: Method) -> Learner:
    """A run in float64 without dropout, at its second task."""
    learner = make_learner(stream(), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1)
    learner.network.to(torch.float64)
    head_of(learner).dropout.p = 0.0
    learner.task = 1
    return learner


def head_of(learner: Learner) -> LinearHead:
    """The classifier's head."""
    head = learner.network.classifier.head
    assert isinstance(head, LinearHead)
    return head


def two() -> Stream:
    """The first two tasks, with few rows."""
    whole = stream(rows=3)
    return replace(whole, tasks=whole.tasks[:2], order=(0, 1))


@cache
def learnt(name: str, *, tasks: int = 2, **said: Any) -> RunState:
    """A run of the method over two tasks, or broken off after one."""
    method = METHODS[name](METHODS[name].Config.parse(said))
    learner = make_learner(two(), method, loaded(), BUDGET, seed=1)
    return run_stream(learner, method) if tasks == 2 else stopped(learner, method)


class Enough(Exception):
    """A run that is to go no further."""


def stopped(learner: Learner, method: Method, folder: Path | None = None) -> RunState:
    """The run after its first task."""

    def stop(_: Learner, learnt: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        run_stream(learner, method, folder=folder, on_task=stop)
    return RunState(learner, method)


def weights(ran: RunState) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in ran.network.state_dict().items()}


def differing(one: RunState, other: RunState) -> list[str]:
    """The names of weights that are not bit for bit the same."""
    there = weights(other)
    return [name for name, value in weights(one).items() if not torch.equal(value, there[name])]


def gradients(learner: Learner, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter, zero where there is none."""
    named = dict(learner.network.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(one) if gradient is None else gradient
        for (name, one), gradient in zip(named.items(), found, strict=True)
    }


def in_pieces(learner: Learner, method: Method, rows: Rows, size: int) -> dict[str, Tensor]:
    """The gradient of a step whose batch is split: the sum of the losses of the pieces over the count of all."""
    counted = int((rows["labels"] != -100).sum())
    total = {name: torch.zeros_like(one) for name, one in learner.network.named_parameters()}
    for start in range(0, len(rows["labels"]), size):
        piece = {name: value[start : start + size] for name, value in rows.items()}
        for name, gradient in gradients(learner, method.loss(learner, learner.network, piece)).items():
            total[name] += gradient / counted
    return total


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 1e-7) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=atol)


def move(learner: Learner, by: float = 0.05) -> None:
    """Put every weight elsewhere."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in learner.network.parameters():
            one.add_(by * torch.randn(one.shape, generator=generator, dtype=one.dtype))


# -- EWC: Fisher information ----------------------------------------------------------------------------


def read(learner: Learner) -> tuple[Tensor, Tensor, Tensor]:
    """Of `ITEMS`: the states that the head reads (row, width), the probabilities of their classes, and the labels."""
    rows = learner.rows(ITEMS)
    classifier = learner.network.classifier
    with torch.no_grad():
        states = classifier.states(rows["input_ids"], rows["attention_mask"])[:, 0]
        logits = states @ head_of(learner).vectors.T + head_of(learner).bias
    return states, logits[:, OWN].softmax(-1), rows["labels"] - OWN[0]


def of_regression(states: Tensor, shares: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Logistic regression: log p(y|h) has the gradient (1[y = c] − p_c) h for the vector of class c."""
    errors = (nn.functional.one_hot(labels, 3) - shares).square()
    vectors, bias = torch.zeros(7, 16, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    vectors[OWN], bias[OWN] = errors.T @ states.square() / len(states), errors.mean(0)
    return {"classifier.head.vectors": vectors, "classifier.head.bias": bias}


def test_the_fisher_information_of_a_head_is_that_of_logistic_regression() -> None:
    learner = precise(Ewc())
    learner.network.classifier.encoder.requires_grad_(False)
    assert_same(fisher_information(learner, ITEMS, labels="true", seed=0), of_regression(*read(learner)), atol=1e-10)


def test_labels_of_the_model_are_those_it_gives_and_not_the_true_ones() -> None:
    learner = precise(Ewc())
    learner.network.classifier.encoder.requires_grad_(False)
    with torch.no_grad():
        head_of(learner).bias[OWN[0]] = 8.0
    states, shares, labels = read(learner)
    assert shares[:, 0].min() > 0.99
    assert labels.unique().tolist() == [0, 1, 2]
    expected = of_regression(states, shares, torch.zeros_like(labels))
    assert_same(fisher_information(learner, ITEMS, labels="model", seed=0), expected, atol=1e-10)


def test_drawn_labels_have_the_probabilities_of_the_logits() -> None:
    shares = torch.tensor([0.2, 0.5, 0.3])
    logits = torch.cat([torch.tensor([-1e30]), shares.log()]).expand(20_000, 4)
    found = sample_labels(logits, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    assert found[0] == 0
    torch.testing.assert_close(found[1:], shares, rtol=0, atol=4 * 0.5 / math.sqrt(20_000))


def test_the_fisher_information_is_the_mean_of_squared_gradients_of_single_examples() -> None:
    learner = precise(Ewc())
    expected = {name: torch.zeros_like(one) for name, one in learner.network.named_parameters()}
    for item in ITEMS:
        rows = learner.rows([item])
        logits = learner.network(rows)[0, OWN]
        log_likelihood = logits[rows["labels"][0] - OWN[0]] - logits.exp().sum().log()
        for name, gradient in gradients(learner, log_likelihood).items():
            expected[name] += gradient**2 / len(ITEMS)
    found = fisher_information(learner, ITEMS, labels="true", seed=0)
    assert_same(found, expected)
    assert max(float(value.max()) for value in found.values()) > 1e-3


def test_nothing_is_dropped_out_and_training_goes_on() -> None:
    learner = make_learner(stream(), Ewc(), loaded(dropout=0.5), BUDGET, seed=1)
    learner.network.train()
    one, other = (fisher_information(learner, ITEMS, labels="true", seed=0) for _ in range(2))
    assert_same(one, other, atol=0)
    assert all(module.training for module in learner.network.modules())
    assert all(parameter.grad is None for parameter in learner.network.parameters())


def test_classes_of_other_tasks_have_no_part() -> None:
    found = fisher_information(precise(Ewc()), ITEMS, labels="model", seed=0)
    others = [number for number in range(7) if number not in OWN]
    for name in ("classifier.head.vectors", "classifier.head.bias"):
        assert not found[name][others].any()
        assert found[name][OWN].all()


def test_what_is_not_trained_has_none() -> None:
    learner = precise(Ewc())
    learner.network.classifier.encoder.requires_grad_(False)
    assert set(fisher_information(learner, ITEMS, labels="true", seed=0)) == {
        "classifier.head.vectors",
        "classifier.head.bias",
    }


def test_information_is_taken_of_as_many_rows_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[ExampleRef]] = []

    def noted(learner: Learner, items: list[ExampleRef], **others: Any) -> dict[str, Tensor]:
        taken.append(list(items))
        return fisher_information(learner, items, **others)

    monkeypatch.setattr(regularized, "fisher_information", noted)
    learner = precise(Ewc())
    for samples in (4, 4, 100):
        Ewc(EwcConfig(fisher_samples=samples)).after_task(learner, 1)
    assert taken[0] == taken[1] == sorted(set(taken[0]))
    assert len(taken[0]) == 4
    assert taken[2] == learner.items(1)


# -- EWC: the penalty -----------------------------------------------------------------------------------


def told(learner: Learner, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Some information, a third of it zero, and some weights."""
    generator = torch.Generator().manual_seed(seed)

    def random(one: Tensor) -> Tensor:
        return torch.randn(one.shape, generator=generator, dtype=torch.float64)

    named = dict(learner.network.named_parameters())
    information = {name: (random(one) + 0.4).clamp(min=0) for name, one in named.items()}
    return information, {name: one.detach() + 0.1 * random(one) for name, one in named.items()}


def test_one_penalty_is_the_sum_of_those_of_all_tasks() -> None:
    method = Ewc(EwcConfig(ewc_lambda=3.0))
    learner = precise(method)
    tasks = [told(learner, seed) for seed in range(3)]
    for information, there in tasks:
        method.remember(information, there)
    named = dict(learner.network.named_parameters())
    expected: Tensor = sum(  # type: ignore[assignment]
        3.0 / 2 * (information[name] * (one - there[name]) ** 2).sum()
        for information, there in tasks
        for name, one in named.items()
    )
    found = method.penalty(learner.network)
    torch.testing.assert_close(found, expected)
    assert_same(gradients(learner, found), gradients(learner, expected), atol=1e-10)
    assert len(method.state.tensors) == 2 * len(named)


def test_online_information_fades_and_the_center_is_the_last() -> None:
    method = Ewc(EwcConfig(ewc_lambda=3.0, online=True, decay_factor=0.5))
    learner = precise(method)
    (first, _), (second, _), (third, there) = tasks = [told(learner, seed) for seed in range(3)]
    for information, places in tasks:
        method.remember(information, places)
    expected = sum(
        3.0 / 2 * ((first[name] / 4 + second[name] / 2 + third[name]) * (one - there[name]) ** 2).sum()
        for name, one in learner.network.named_parameters()
    )
    torch.testing.assert_close(method.penalty(learner.network), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_gradient_of_a_step_has_the_penalty_once_however_the_batch_is_split(size: int) -> None:
    method = Ewc(EwcConfig(ewc_lambda=7.0))
    learner = precise(method)
    method.after_task(learner, 0)
    move(learner)
    kept, rows = method.state.tensors, learner.rows(ITEMS[:4], size=6)
    logits = learner.network(rows)[:4, OWN]
    mean = nn.functional.cross_entropy(logits, rows["labels"][:4] - OWN[0])
    expected = {
        name: gradient + 7.0 * kept[FISHER + name] * (one.detach() - kept[CENTRE + name])
        for (name, gradient), one in zip(gradients(learner, mean).items(), learner.network.parameters(), strict=True)
    }
    assert_same(in_pieces(learner, method, rows, size), expected)


def test_there_is_no_penalty_where_the_weights_are_the_tasks_own() -> None:
    method = Ewc()
    learner = precise(method)
    method.after_task(learner, 0)
    assert method.penalty(learner.network) == 0
    move(learner)
    assert method.penalty(learner.network) > 1e-3


@pytest.mark.exhaustive
def test_the_first_task_is_fine_tuning_and_so_is_all_without_strength() -> None:
    assert differing(learnt("ewc", tasks=1), learnt("finetune", tasks=1)) == []
    assert differing(learnt("ewc", ewc_lambda=0.0), learnt("finetune")) == []
    assert differing(learnt("ewc"), learnt("finetune"))


@pytest.mark.exhaustive
def test_weights_that_the_first_task_depends_on_move_less() -> None:
    start = learnt("ewc", tasks=1)
    information, before = start.method.state.tensors, weights(start)

    def moved(strength: float) -> float:
        after = weights(learnt("ewc", ewc_lambda=strength))
        return sum(
            float((information[FISHER + name] * (after[name] - before[name]).square()).sum())
            for name, _ in start.network.named_parameters()
        )

    assert moved(1e5) < 0.5 * moved(0.0)


def test_two_numbers_are_kept_for_each_weight_however_many_tasks() -> None:
    ran = learnt("ewc")
    trained = sum(one.numel() for one in ran.network.parameters())
    assert [row["memory_bytes"] for row in ran.rows["cost"]] == [2 * 4 * trained] * 2


# -- LwF ------------------------------------------------------------------------------------------------


def test_answers_are_compared_at_the_temperature() -> None:
    before = torch.tensor([[math.log(9.0), 0.0]] * 3)
    logits = torch.tensor([[0.0, 0.0], [math.log(9.0), 0.0], [0.0, math.log(16.0)]])
    softened = (0.75, 0.25)  # of 9 : 1, whose roots are 3 : 1
    entropy = -sum(share * math.log(share) for share in softened)
    expected = [math.log(2.0), entropy, -0.75 * math.log(1 / 5) - 0.25 * math.log(4 / 5)]
    torch.testing.assert_close(distillation_losses(logits, before, 2.0), torch.tensor(expected))


def test_answers_that_stay_have_no_gradient() -> None:
    before = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    logits = before.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distillation_losses(logits, before, 2.0).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


def at_third_task(**said: Any) -> tuple[Learner, Lwf]:
    """A run at its last task, whose network has moved since the task began."""
    method = Lwf(LwfConfig(**said))
    learner = precise(method)
    learner.task = 2
    method.before_task(learner, 2)
    move(learner)
    return learner, method


def test_the_loss_is_that_of_the_new_task_and_of_each_old_one() -> None:
    method = Lwf(LwfConfig(temperature=3.0, distillation_weight=0.7))
    learner = precise(method)
    learner.task = 2
    items = learner.items(2)[:4]
    then = [learner.network(learner.rows([item]))[0].tolist() for item in items]
    method.before_task(learner, 2)
    move(learner)
    expected = 0.0
    for item, before in zip(items, then, strict=True):
        rows = learner.rows([item])
        now = learner.network(rows)[0].tolist()
        for classes, weight in (((0, 1), 0.7), ((2, 3, 4), 0.7)):
            soft = [math.exp(before[c] / 3) for c in classes]
            total = sum(math.exp(now[c] / 3) for c in classes)
            expected -= weight * sum(
                share / sum(soft) * math.log(math.exp(now[c] / 3) / total)
                for share, c in zip(soft, classes, strict=True)
            )
        expected -= now[int(rows["labels"])] - math.log(math.exp(now[5]) + math.exp(now[6]))
    found = method.loss(learner, learner.network, learner.rows(items, size=6))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split(size: int) -> None:
    learner, method = at_third_task()
    rows = learner.rows(learner.items(2)[:4], size=6)
    assert_same(in_pieces(learner, method, rows, size), in_pieces(learner, method, rows, 6))


def test_answers_are_those_of_the_network_in_evaluation_before_the_task() -> None:
    method = Lwf()
    learner = make_learner(stream(), method, loaded(dropout=0.5), BUDGET, seed=1)
    learner.network.train()
    method.before_task(learner, 2)
    learner.network.eval()
    with torch.no_grad():
        expected = torch.cat([learner.network(learner.rows([item])) for item in learner.items(2)])
    torch.testing.assert_close(method.answers, expected)
    assert not method.answers.requires_grad


def test_the_first_task_is_fine_tuning_and_so_is_all_without_weight() -> None:
    assert differing(learnt("lwf", tasks=1, warmup_head=True), learnt("finetune", tasks=1)) == []
    assert differing(learnt("lwf", distillation_weight=0.0), learnt("finetune")) == []
    assert differing(learnt("lwf"), learnt("finetune"))


@pytest.mark.exhaustive
def test_old_answers_on_new_texts_change_less() -> None:
    def changed(weight: float) -> float:
        method = Lwf(LwfConfig(distillation_weight=weight))
        learner = precise(method)
        with torch.no_grad():
            head_of(learner).vectors.mul_(20)
        method.before_task(learner, 1)
        rows, optimizer = learner.rows(learner.items(1)), torch.optim.Adam(learner.network.parameters(), 5e-3)
        for _ in range(20):
            optimizer.zero_grad()
            (method.loss(learner, learner.network, rows) / len(rows["labels"])).backward()
            optimizer.step()
        with torch.no_grad():
            now = learner.network(rows)
        assert (now[:, OWN].argmax(-1) + OWN[0] == rows["labels"]).double().mean() > 0.5
        return float((now[:, :2].softmax(-1) - method.answers[:, :2].softmax(-1)).abs().mean())

    assert changed(5.0) < 0.5 * changed(0.0)


def test_the_warm_up_gives_the_vectors_of_old_classes_no_gradient() -> None:
    learner, method = at_third_task(warmup_head=True)
    assert [stage.trains for stage in method.phases(learner, 2)] == ["head", "all"]
    assert [stage.trains for stage in method.phases(learner, 0)] == ["all"]
    rows, name = learner.rows(learner.items(2)[:4]), "classifier.head.vectors"
    assert gradients(learner, method.loss(learner, learner.network, rows))[name].any(-1).tolist() == [True] * 7
    learner.network.classifier.encoder.requires_grad_(False)
    head = head_of(learner).vectors
    (gradient,) = torch.autograd.grad(method.loss(learner, learner.network, rows), head)
    assert gradient.any(-1).tolist() == [False] * 5 + [True] * 2


# -- both -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name,said", [("ewc", {}), ("ewc", {"online": True}), ("lwf", {"warmup_head": True})])
def test_a_run_that_was_broken_off_goes_on_to_the_same_numbers(name: str, said: dict[str, Any], tmp_path: Path) -> None:
    def made() -> tuple[Learner, Method]:
        method = METHODS[name](METHODS[name].Config.parse(said))
        return make_learner(two(), method, loaded(), BUDGET, seed=1), method

    whole = learnt(name, **said)
    stopped(*made(), folder=tmp_path / "run")
    again = run_stream(*made(), folder=tmp_path / "run", resume=True)
    assert again.rows["matrix"] == whole.rows["matrix"]
    assert differing(again, whole) == []
    kept = whole.method.state.tensors
    assert_same(again.method.state.tensors, kept, atol=0)
    assert bool(kept) == (name == "ewc")


@pytest.mark.parametrize(
    "make,expected",
    [
        (lambda: EwcConfig(ewc_lambda=-1), "ewc_lambda: expected a number of at least 0, got -1"),
        (
            lambda: EwcConfig(fisher_samples=0),
            "fisher_samples: expected a whole number of at least 1, got 0",
        ),
        (
            lambda: EwcConfig(decay_factor=2.0),
            "decay_factor: expected a number of at least 0 and at most 1, got 2",
        ),
        (
            lambda: EwcConfig.parse({"fisher_labels": "some"}),
            "fisher_labels: expected one of model, true, got 'some'",
        ),
        (lambda: LwfConfig(temperature=0.0), "temperature: expected a number of at least"),
        (
            lambda: LwfConfig.parse({"distillation_weight": "-1"}),
            "distillation_weight: expected a number of at least 0, got -1",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make()
