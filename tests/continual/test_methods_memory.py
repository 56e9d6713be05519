"""Methods with a memory, each against its paper's formula."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual import memory
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.methods.baselines import Finetune
from regard.continual.methods.mbpa import AdaptingNetwork, MbPA, ShownMemory
from regard.continual.methods.replay import AGem, DarkExperience, Replay, mean_square_distance, project_gradient
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError
from tests.continual.small_tasks import BUDGET, loaded, stream

ONE = replace(BUDGET, num_epochs=1)


def begun(method: Method, *, budget: Any = ONE) -> Learner:
    """A run in float64 without dropout."""
    learner = make_learner(stream(), method, loaded(dropout=0.0, dtype=torch.float64), budget, seed=1)
    learner.network.double()
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return learner


def of(name: str, **said: Any) -> Any:
    """A method with settings."""
    kind = METHODS[name]
    return kind(kind.Config(**said))


def second_batch(learner: Learner, method: Method) -> Any:
    """The batches of the second task, when the first one's examples are in memory."""
    method.after_task(learner, 0)
    learner.task = 1
    return method.batches(learner, 1, method.phases(learner, 1)[0])


# -- replay ---------------------------------------------------------------------------------------------


def test_replay_is_the_mean_over_new_and_old_rows_each_over_its_own_classes() -> None:
    method: Replay = of("replay", memory_size=5, replay_batch_size=3)
    learner = begun(method)
    rows = second_batch(learner, method).rows(0)
    assert rows["tasks"].tolist() == [1] * 4 + [0] * 3
    logits = learner.network(rows).detach()
    classes = {0: slice(0, 2), 1: slice(2, 5)}
    by_hand = 0.0
    for number, task in enumerate(rows["tasks"].tolist()):
        own = logits[number, classes[task]]
        by_hand -= float(own[int(rows["labels"][number]) - classes[task].start] - own.logsumexp(0))
    assert method.loss(learner, learner.network, rows).item() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "name, said, size",
    [
        ("replay", {"memory_size": 5}, 18 + 5),
        ("replay", {"memory_size": 5, "replay_mode": "interval"}, 18),
        ("replay", {"memory_size": 5, "replay_mode": "merge"}, 18 + 5),
        ("mbpa++", {"memory_size": 5}, 18),
        ("der++", {"memory_size": 5}, 18 + 2 * 5),
        ("idbr", {"memory_size": 6, "memory_fraction": 1.0}, 18),
    ],
)
def test_a_batch_has_no_more_rows_than_task_and_memory(name: str, said: dict[str, Any], size: int) -> None:
    """With `--batch-size 1000` each step on a second task of 18 rows computed 2000, or 3000 of DER++."""
    method = of(name, **said)
    batches = second_batch(begun(method, budget=replace(ONE, batch_size=1000)), method)
    rows = batches.rows(0)
    assert batches.size == size
    assert {len(value) for value in rows.values()} == {size}
    assert (rows["labels"] != IGNORE_INDEX).all()


def test_merging_goes_once_over_new_and_old_rows_an_epoch() -> None:
    method = of("replay", memory_size=5, replay_mode="merge")
    learner = begun(method)
    found = second_batch(learner, method)
    told = [item for step in range(found.steps) for item in _items(found.rows(step))]
    assert sorted(told) == sorted([*learner.items(1), *method.state.examples])
    assert found.steps == 6


def _items(rows: dict[str, Tensor]) -> list[ExampleRef]:
    here = rows["labels"] != IGNORE_INDEX
    return [ExampleRef(*each) for each in torch.stack([rows["tasks"], rows["rows"]], 1)[here].tolist()]


@pytest.mark.exhaustive
def test_sparse_replay_in_a_short_run_is_fine_tuning() -> None:
    rare, plain = of("replay", replay_mode="interval", replay_interval=100), Finetune()
    a, b = (run_stream(begun(method), method) for method in (rare, plain))
    for name, weight in a.network.state_dict().items():
        assert torch.equal(weight, b.network.state_dict()[name])
    often = of("replay", replay_mode="interval", replay_interval=2)
    assert run_stream(begun(often), often).rows["cost"][1]["steps"] == 7


# -- A-GEM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gradient, reference, expected",
    [
        ((1.0, 2.0), (-1.0, 0.0), (0.0, 2.0)),
        ((2.0, -1.0), (0.0, 2.0), (2.0, 0.0)),
        ((3.0, -1.0), (-1.0, 1.0), (1.0, 1.0)),
        ((1.0, 2.0), (1.0, 0.0), (1.0, 2.0)),
        ((1.0, 2.0), (0.5, 0.0), (1.0, 2.0)),
        ((1.0, 2.0), (-2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (0.0, 0.0), (1.0, 2.0)),
    ],
)
def test_a_gradient_against_the_reference_is_projected(
    gradient: tuple[float, float], reference: tuple[float, float], expected: tuple[float, float]
) -> None:
    pieces = [torch.tensor([one]) for one in gradient]
    project_gradient(pieces, [torch.tensor([one]) for one in reference])
    assert [float(one) for one in pieces] == pytest.approx(expected)


def test_a_step_on_a_quadratic_does_not_raise_the_memory_s_loss() -> None:
    # new ½|w − (2, 0)|², old ½|w − (−1, 1)|², at w = 0: g = (−2, 0), r = (1, −1), g·r = −2, r·r = 2
    gradient = torch.tensor([-2.0, 0.0])
    reference = torch.tensor([1.0, -1.0])
    project_gradient([gradient], [reference])
    assert gradient.tolist() == [-1.0, -1.0]
    assert float(gradient @ reference) == 0.0


@pytest.mark.parametrize("micro", [None, 2])
def test_the_reference_is_the_gradient_of_the_memory_batch_s_mean_loss(micro: int | None) -> None:
    method: AGem = of("agem", memory_size=7, replay_batch_size=5)
    learner = begun(method, budget=replace(ONE, micro_batch_size=micro))
    method.after_task(learner, 0)
    learner.task = 1
    (stage,) = method.phases(learner, 1)
    network = learner.network.train()
    parameters = [one for one in network.parameters() if one.requires_grad]
    items = memory.sample_memory(method.state.examples, 5, seed=learner.seed_for("replay", 1), step=3)
    rows = learner.rows(items)
    reference = torch.autograd.grad(learner.cross_entropy(network(rows), rows) / 5, parameters)
    for one, gradient in zip(parameters, reference, strict=True):
        one.grad = -2 * gradient
    assert parameters[0].grad is not None
    parameters[0].grad += 0.5
    before = [one.grad.clone() for one in parameters if one.grad is not None]
    along = sum(float((g * r).sum()) for g, r in zip(before, reference, strict=True))
    square = sum(float(r.square().sum()) for r in reference)
    assert along < 0
    chance = torch.random.get_rng_state()
    assert stage.transform_gradients is not None
    stage.transform_gradients(network, 3)
    assert torch.equal(torch.random.get_rng_state(), chance)
    for one, gradient, other in zip(parameters, before, reference, strict=True):
        torch.testing.assert_close(one.grad, gradient - along / square * other, rtol=1e-6, atol=1e-8)


def test_the_reference_has_the_dropout_of_its_step_whatever_was_drawn_before() -> None:
    """Processes have drawn different numbers for their rows, and must project alike."""
    method: AGem = of("agem")
    learner = make_learner(stream(), method, loaded(dropout=0.3), ONE, seed=1)
    method.after_task(learner, 0)
    learner.task = 1
    (stage,) = method.phases(learner, 1)
    assert stage.transform_gradients is not None
    vectors = learner.network.train().get_parameter("classifier.head.vectors")
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        vectors.grad = torch.linspace(-1, 1, vectors.numel()).view_as(vectors)
        stage.transform_gradients(learner.network, 3)
        found.append(vectors.grad)
    assert not torch.equal(found[0], torch.linspace(-1, 1, vectors.numel()).view_as(vectors))
    assert torch.equal(found[0], found[1])


def test_only_what_a_step_trains_is_corrected() -> None:
    method = of("agem")
    learner = begun(method)
    method.after_task(learner, 0)
    learner.task = 1
    vectors = learner.network.get_parameter("classifier.head.vectors")
    vectors.grad = torch.ones_like(vectors)
    (stage,) = method.phases(learner, 1)
    assert stage.transform_gradients is not None
    stage.transform_gradients(learner.network, 0)
    assert [name for name, one in learner.network.named_parameters() if one.grad is not None] == [
        "classifier.head.vectors"
    ]


# -- DER++ ----------------------------------------------------------------------------------------------


def test_the_distance_is_the_mean_square_over_the_row_s_own_classes() -> None:
    logits, stored = torch.tensor([[1.0, 2.0, 9.0], [0.0, 1.0, 3.0]]), torch.tensor([[0.0, 0.0, 0.0], [5.0, 1.0, 1.0]])
    own = torch.tensor([[True, True, False], [False, True, True]])
    assert mean_square_distance(logits, stored, own).tolist() == [2.5, 2.0]


def test_dark_experience_is_the_sum_of_three_means() -> None:
    method: DarkExperience = of("der++", memory_size=9, replay_batch_size=3, alpha=0.7, beta=0.3)
    learner = begun(method)
    batches = second_batch(learner, method)
    short = next(step for step in range(batches.steps) if len(_items(batches.rows(step))) == 8)
    rows = batches.rows(short)
    kept, stored = method.state.examples, method.state.tensors["logits"]
    items = _items(rows)
    new, dark, old = items[:2], items[2:5], items[5:]
    assert ({item.task for item in new}, len(old)) == ({1}, 3)
    for name, drawn in (("logits", dark), ("labels", old)):
        assert drawn == memory.sample_memory(kept, 3, seed=learner.seed_for("replay", name, 1), step=short)
    method.state.tensors["logits"] = stored + 1.0  # the network moved away
    rows, network = batches.rows(short), learner.network

    def entropy(items: list[ExampleRef]) -> Tensor:
        these = learner.rows(items)
        return learner.cross_entropy(network(these), these) / len(items)

    now = network(learner.rows(dark))[:, :2]
    then = (stored + 1.0)[[kept.index(item) for item in dark]][:, :2]
    expected = entropy(new) + 0.7 * (now - then).square().mean() + 0.3 * entropy(old)
    found = method.loss(learner, network, rows) / (rows["labels"] != IGNORE_INDEX).sum()
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


def test_logits_are_those_that_an_example_had_when_its_task_was_learnt() -> None:
    method: DarkExperience = of("der++", memory_size=8)
    learner = begun(method)
    method.after_task(learner, 0)
    first = dict(zip(method.state.examples, method.state.tensors["logits"], strict=True))
    with torch.no_grad():
        learner.network.get_parameter("classifier.head.bias").add_(1.0)
    method.after_task(learner, 1)
    both = dict(zip(method.state.examples, method.state.tensors["logits"], strict=True))
    assert {item.task for item in both} == {0, 1}
    learner.network.eval()
    now = learner.network(learner.rows(list(both))).detach()
    for (item, logits), present in zip(both.items(), now, strict=True):
        torch.testing.assert_close(logits, first.get(item, present), rtol=0, atol=1e-12)


# -- MbPA++ ---------------------------------------------------------------------------------------------


def adapting(**said: Any) -> tuple[MbPA, Learner, AdaptingNetwork]:
    """A network that has learnt two tasks, as far as it knows, and is evaluated."""
    method: MbPA = of(
        "mbpa++",
        **{
            "memory_size": 10,
            "storage_policy": "balanced",
            "num_neighbors": 3,
            "adaptation_steps": 4,
            "adaptation_lr": 0.1,
        }
        | said,
    )
    learner = begun(method)
    network = learner.network
    assert isinstance(network, AdaptingNetwork)
    for task in (0, 1):
        method.after_task(learner, task)
    with torch.no_grad():
        for one in network.classifier.parameters():
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())), alpha=0.01)
    network.eval()
    return method, learner, network


def by_hand(method: MbPA, learner: Learner, network: AdaptingNetwork, item: ExampleRef, trained: str) -> Tensor:
    """The logits of a row after gradient descent on a copy, by PyTorch's optimizer and autograd alone."""
    config = method.config
    row = learner.rows([item])
    model = copy.deepcopy(network.classifier).eval()
    keys = [_key(learner, network, other) for other in method.state.examples]
    far = [float((_key(learner, network, item) - key).norm()) for key in keys]
    near = sorted(range(len(far)), key=far.__getitem__)[: config.num_neighbors]
    rows = learner.rows([method.state.examples[number] for number in near])
    parameters = [one for name, one in model.named_parameters() if name.startswith(trained)]
    start = [one.detach().clone() for one in parameters]
    descent = torch.optim.SGD(parameters, lr=config.adaptation_lr)
    for _ in range(config.adaptation_steps):
        logits = model(rows["input_ids"], rows["attention_mask"]).logits
        loss = torch.zeros((), dtype=torch.float64)
        for logit, task, label in zip(logits, rows["tasks"].tolist(), rows["labels"].tolist(), strict=True):
            first, last = ((0, 2), (2, 5))[task]
            loss = loss - logit[first:last].log_softmax(0)[label - first] / len(near)
        loss = loss + config.l2_weight * sum(
            (one - other).square().sum() for one, other in zip(parameters, start, strict=True)
        )
        descent.zero_grad()
        loss.backward()
        descent.step()
    return model(row["input_ids"], row["attention_mask"]).logits.detach()


def _key(learner: Learner, network: AdaptingNetwork, item: ExampleRef) -> Tensor:
    row = learner.rows([item])
    return network.reader(row["input_ids"], row["attention_mask"].long()).last_hidden_state[0, 0].detach()


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapt, trained", [("all", ""), ("head", "head.")])
def test_adaptation_is_gradient_descent_from_the_weights_for_each_row(adapt: str, trained: str) -> None:
    method, learner, network = adapting(adaptation_scope=adapt, l2_weight=0.3)
    items = [ExampleRef(1, 0), ExampleRef(0, 3), ExampleRef(1, 4)]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        found = network(learner.rows(items))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    for logits, item in zip(found, items, strict=True):
        torch.testing.assert_close(logits, by_hand(method, learner, network, item, trained)[0], rtol=0, atol=1e-10)
    network.remembered = None
    assert (found - network(learner.rows(items))).abs().max() > 0.01


@pytest.mark.parametrize("adapt", ["all", "head"])
def test_one_step_of_a_head_by_hand(adapt: str) -> None:
    """A bias moves by −rate · (p − y), the mean over neighbors; the pull counts from the second step on."""
    _, learner, network = adapting(
        adaptation_scope=adapt, adaptation_steps=1, num_neighbors=1, l2_weight=100.0, adaptation_lr=0.5
    )
    row = learner.rows([ExampleRef(0, 2)])
    with torch.no_grad():
        for one in network.classifier.parameters():
            one.zero_()
        found = network(row)[0]
    # with weights of zero every state is zero: logits are biases, p = ½ for both classes of the task
    assert network.remembered is not None
    label = int(network.remembered.rows["labels"][network.find_neighbors(row)[0, 0]])
    own = (0, 1) if label < 2 else (2, 3, 4)
    expected = [0.0] * 7
    for number in own:
        expected[number] = -0.5 * (1 / len(own) - (number == label))
    assert found.tolist() == pytest.approx(expected)


def test_neighbors_have_the_nearest_keys_of_the_first_encoder() -> None:
    method, learner, network = adapting(num_neighbors=4)
    rows = learner.rows([ExampleRef(0, 1), ExampleRef(2, 5), ExampleRef(1, 3)], split="train")
    keys = torch.stack([_key(learner, network, item) for item in method.state.examples])
    torch.testing.assert_close(method.state.tensors["keys"], keys, rtol=0, atol=1e-12)
    for near, task, row in zip(
        network.find_neighbors(rows), rows["tasks"].tolist(), rows["rows"].tolist(), strict=True
    ):
        far = (keys - _key(learner, network, ExampleRef(task, row))).norm(dim=1)
        assert near.tolist() == far.argsort()[:4].tolist()
    for name, one in network.reader.named_parameters():
        assert torch.equal(one.float(), learner.start[f"reader.{name}"].float())


def test_a_pull_that_is_strong_holds_the_weights() -> None:
    # each step takes back the whole of the way: rate · 2 λ = 1, so that one gradient step is left
    _, learner, network = adapting(adaptation_scope="head", adaptation_steps=7, adaptation_lr=1e-6, l2_weight=5e5)
    rows = learner.rows([ExampleRef(0, 1)])
    with torch.no_grad():
        found = network(rows)
    network.remembered = None
    torch.testing.assert_close(found, network(rows).detach(), rtol=0, atol=1e-4)


def test_rows_of_tasks_not_learnt_and_gradients_are_of_the_weights_as_they_are() -> None:
    _, learner, network = adapting()
    mixed = learner.rows([ExampleRef(2, 0), ExampleRef(0, 1)])
    with torch.no_grad():
        adapted = network(mixed)
        alone = network(learner.rows([ExampleRef(2, 0)]))
    plain = network(mixed)
    assert plain.requires_grad
    torch.testing.assert_close(adapted[0], plain[0].detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(alone[0], plain[0].detach(), rtol=0, atol=1e-12)
    assert (adapted[1] - plain[1]).abs().max() > 0.01
    network.train()
    with torch.no_grad():
        torch.testing.assert_close(network(mixed), plain.detach(), rtol=0, atol=1e-12)
    assert not network.reader.training


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("adapt", ["all", "head"])
def test_adapted_rows_do_not_depend_on_those_beside_them(adapt: str) -> None:
    _, learner, network = adapting(adaptation_scope=adapt)
    items = [ExampleRef(0, row) for row in range(5)]
    with torch.no_grad():
        together = network(learner.rows(items))
        apart = torch.cat([network(learner.rows([item])) for item in items])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def test_in_bfloat16_the_weights_are_adapted_in_float32() -> None:
    _, learner, network = adapting(adaptation_scope="head")
    network.float()
    assert network.remembered is not None
    network.remembered = ShownMemory(
        network.remembered.rows,
        network.remembered.keys.float(),
        network.remembered.class_mask,
        network.remembered.tasks_trained,
    )
    rows = learner.rows([ExampleRef(0, 1), ExampleRef(1, 1)])
    with torch.no_grad():
        plain = network(rows)
        with torch.autocast("cpu", torch.bfloat16):
            low = network(rows)
    assert torch.equal(plain, low)


@pytest.mark.parametrize(
    "name, said, told",
    [
        ("der++", {"alpha": -1.0}, "alpha: expected a number of at least 0, got -1.0"),
        ("der++", {"alpha": float("inf")}, "alpha: expected a number of at least 0, got inf"),
        ("der++", {"beta": "much"}, "beta: expected a number, got 'much'"),
        ("agem", {"storage_policy": "some"}, "storage_policy: expected one of reservoir, balanced, got 'some'"),
        ("mbpa++", {"adaptation_scope": "some"}, "adaptation_scope: expected one of all, head, got 'some'"),
        ("mbpa++", {"num_neighbors": 0}, "num_neighbors: expected a whole number of at least 1, got 0"),
        ("mbpa++", {"adaptation_lr": -1}, "adaptation_lr: expected a number of at least 0, got -1.0"),
        ("mbpa++", {"adaptation_steps": 1.5}, "adaptation_steps: expected a whole number of at least 0, got 1.5"),
    ],
)
def test_settings_that_cannot_be(name: str, said: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        METHODS[name].Config.parse(said)
    assert str(raised.value) == told
