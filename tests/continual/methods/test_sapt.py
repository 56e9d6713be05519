"""SAPT against its definition, written out; and what its remedies do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual import gate as measured
from regard.continual.adapter_network import choose_initial_adapter
from regard.continual.gate import find_closed_gates, measure_gate
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods.sapt import FLOOR, Sapt, SaptConfig, SaptNetwork
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent
from regard.continual.scoring import score_task
from regard.errors import UserError
from regard.models.heads import HeadName
from tests.continual.small_tasks import BUDGET, learnt_router, loaded, stream

pytestmark = pytest.mark.usefixtures("without_flops")


def begun(*, head: HeadName | None = None, **config: Any) -> tuple[Learner, Sapt]:
    """A run before its first task, in float64 and without dropout."""
    if config.get("gate") != "published":
        config = {"router_warmup_steps": 60} | config
    method = Sapt(SaptConfig(**learnt_router(r=2, **config)))
    learner = make_learner(stream(4), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1, head=head)
    learner.network.double()
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return learner, method


def after_two(**config: Any) -> tuple[Learner, Sapt]:
    """The third task about to be learnt, with blocks that do something."""
    learner, method = begun(**config)
    for task in range(2):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        _stir(learner.network_as(SaptNetwork), task)
        method.after_task(learner, task)
    learner.task = 2
    method.before_task(learner, 2)
    method.place_adapter(learner, 2)
    _stir(learner.network_as(SaptNetwork), 2)
    return learner, method


@torch.no_grad()
def _stir(network: SaptNetwork, block: int) -> None:
    """Give a block weights, and change the maps."""
    random = torch.Generator().manual_seed(block)
    for part in network.pool.parameters_of(block):
        part += 0.3 * torch.randn(part.shape, generator=random, dtype=torch.float64)
    for part in (network.router.down, network.router.up):
        part += 0.1 * torch.randn(part.shape, generator=random, dtype=torch.float64)


@torch.no_grad()
def weights_written_out(network: SaptNetwork, rows: dict[str, Tensor]) -> Tensor:
    """(row, block): equations 4 to 6, a row and a block at a time."""
    table, attention = network.classifier.encoder.get_input_embeddings().weight, network.router
    found = []
    for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True):
        e = torch.stack([table[token] for token, real in zip(ids, mask, strict=True) if real]).max(0).values
        e = e.float().double()  # vectors are kept in float32
        mapped = attention.up @ (attention.down @ e)
        mapped = mapped * torch.sigmoid(mapped)
        centerd = mapped - mapped.mean()
        q = centerd / (centerd.square().mean() + 1e-5).sqrt() * attention.norm.weight + attention.norm.bias
        scores = [float(q @ attention.keys[block]) / math.sqrt(len(e)) for block in range(int(network.count))]
        whole = sum(math.exp(score) for score in scores)
        found.append([math.exp(score) / whole for score in scores])
    return torch.tensor(found, dtype=torch.float64)


def test_the_weights_are_those_of_the_paper() -> None:
    learner, _ = after_two()
    rows = learner.rows(learner.items(1)[:5])
    found = learner.network_as(SaptNetwork).weights(rows)
    assert found is not None
    assert found.shape == (5, 3)
    assert torch.allclose(found, weights_written_out(learner.network_as(SaptNetwork), rows), atol=1e-6)


def test_query_vectors_of_training_rows_are_in_the_order_of_the_rows() -> None:
    """They are read by length."""
    learner, method = begun()
    items = learner.items(1)
    lengths = [learner.length(item) for item in items]
    found = method._training_vectors(learner, 1)
    expected = torch.cat([learner.network_as(SaptNetwork).vectors(learner.rows([item])) for item in items])
    assert lengths != sorted(lengths)
    torch.testing.assert_close(found, expected)


def test_targets_are_mean_weights_over_the_rows_of_the_task() -> None:
    learner, method = begun()
    learner.task = 0
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.after_task(learner, 0)
    method.before_task(learner, 1)
    method.place_adapter(learner, 1)
    _stir(learner.network_as(SaptNetwork), 1)
    method.after_task(learner, 1)
    expected = weights_written_out(learner.network_as(SaptNetwork), learner.rows(learner.items(1))).mean(0)
    assert torch.allclose(method.state.tensors["target/1"].double(), expected, atol=1e-6)
    assert torch.equal(method.state.tensors["target/0"], torch.ones(1).to(method.state.tensors["target/0"]))


@pytest.mark.parametrize("gate", ["open", "published"])
def test_the_loss_is_that_of_the_rows_and_of_the_reflection(gate: Any) -> None:
    said = {
        "open": {"router_loss_weight": 2.0, "entropy_weight": 0.5, "load_balancing_weight": 0.3},
        "published": {"reflection_weight": 0.7},
    }[gate]
    learner, method = after_two(gate=gate, memory_size=3, **said)
    network = learner.network_as(SaptNetwork)
    rows = learner.rows(learner.items(2)[:3], size=4)
    found = method.loss(learner, network, rows)
    mixed = network.weights(rows)
    assert mixed is not None
    counted = mixed[:3]
    expected = learner.cross_entropy(network(rows), rows)
    if gate == "open":
        expected = expected - 2.0 * counted[:, 2].log().sum() - 0.5 * (counted * counted.log()).sum()
        expected = expected - 0.3 * counted.log().sum() / 3  # the mean over three blocks
    apart = []
    for task in range(2):
        target, vectors = method.state.tensors[f"target/{task}"], method.state.tensors[f"vectors/{task}"]
        assert vectors.shape[0] == 3
        told = network.router(vectors)
        apart.append(sum(target[block] * (target[block].log() - told[:, block].log()) for block in range(task + 1)))
    strength = 2 * 2.0 if gate == "open" else 0.7  # the open gate counts each earlier task as the one at hand
    expected = expected + 3 * strength * (apart[0].mean() + apart[1].mean()) / 2  # type: ignore[union-attr]
    assert torch.allclose(found, expected, rtol=1e-6)


def test_blocks_keys_and_maps_may_have_rates_of_their_own() -> None:
    learner, method = begun(adapter_lr_multiplier=20.0, key_lr_multiplier=10.0, projection_lr_multiplier=0.1)
    (stage,) = method.phases(learner, 0)
    names = [name for name, _ in learner.network.named_parameters()]
    blocks = {name for name in names if ".adapters." in name}
    assert {stage.lr_multipliers[name] for name in blocks} == {20.0}
    assert {name: stage.lr_multipliers[name] for name in names if name.startswith("router.")} == {
        name: 10.0 if ".keys." in name else 0.1 for name in names if name.startswith("router.")
    }
    assert not any(name.startswith("classifier.head") for name in stage.lr_multipliers)
    learner, method = begun()
    assert method.phases(learner, 0)[0].lr_multipliers == {}


def test_what_is_trained_is_the_new_block_its_key_and_the_maps() -> None:
    learner, method = after_two()
    method.loss(learner, learner.network, learner.rows(learner.items(2)[:3])).backward()
    moved = {name for name, one in learner.network.named_parameters() if one.grad is not None and one.grad.any()}
    blocks = {name for name in moved if ".adapters." in name}
    assert blocks
    assert all(name.endswith(".2") for name in blocks)
    shared = {"router.down", "router.up", "router.norm.weight", "router.norm.bias", "router.keys.2"}
    assert moved - blocks - {name for name in moved if name.startswith("classifier.head.")} == shared


def test_a_new_block_earns_no_gradient_through_a_published_gate() -> None:
    """B = 0 at first: what the block is given changes nothing, so nothing says that it should be given more."""
    for gate, moves in (("published", False), ("open", True)):
        learner, method = begun(gate=gate, reflection="none")
        method.before_task(learner, 0)
        method.place_adapter(learner, 0)
        _stir(learner.network_as(SaptNetwork), 0)
        learner.task = 1
        method.before_task(learner, 1)
        method.place_adapter(learner, 1)
        with torch.no_grad():
            for layer in learner.network_as(SaptNetwork).pool.adapters:
                layer.B[0].zero_()
                layer.A[0].normal_()
        method.loss(learner, learner.network, learner.rows(learner.items(1)[:3])).backward()
        gradient = learner.network_as(SaptNetwork).router.keys[1].grad
        assert gradient is not None
        assert bool(gradient.abs().max() > 1e-9) is moves


def test_the_gate_is_opened_before_the_block_is_trained() -> None:
    own = []
    for ahead in (0, 300):
        learner, method = begun(router_warmup_steps=ahead, memory_size=8)
        for task in range(3):
            learner.task = task
            method.before_task(learner, task)
            method.place_adapter(learner, task)
            method.after_task(learner, task)
        rows = measure_gate(learner, method, 3, scored_tasks=())
        own.append([row["value"] for row in rows if row["statistic"] == "own_adapter_weight"])
    assert min(own[1]) > 0.6
    assert max(own[0]) < 0.6


def test_a_gate_that_is_held_is_not_trained_with_the_block() -> None:
    learner, method = after_two(freeze_router=True)
    method.loss(learner, learner.network, learner.rows(learner.items(2)[:3])).backward()
    assert all(one.grad is None for one in learner.network_as(SaptNetwork).router.parameters())
    assert learner.network_as(SaptNetwork).pool.adapters[0].A[2].grad is not None


def test_while_it_warms_up_the_own_block_has_its_floor() -> None:
    learner, method = begun(own_weight_floor=0.8, floor_fraction=0.5)
    learner.task = 1
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    method.before_task(learner, 1)
    method.place_adapter(learner, 1)
    made = method.batches(learner, 1, method.phases(learner, 1)[0])
    floors = [made.rows(step)[FLOOR] for step in range(made.steps)]
    half = math.ceil(made.steps / 2)
    expected = [0.8 * max(0.0, 1 - step / half) for step in range(made.steps)]
    assert all(torch.allclose(floor, torch.tensor(value)) for floor, value in zip(floors, expected, strict=True))
    rows = made.rows(0)
    learner.network.train()
    with_floor, without = (
        learner.network_as(SaptNetwork).weights(one) for one in (rows, {**rows, FLOOR: torch.zeros(4)})
    )
    assert with_floor is not None
    assert without is not None
    assert torch.allclose(with_floor[:, 1], 0.2 * without[:, 1] + 0.8)
    assert torch.allclose(with_floor.sum(1), torch.ones(4, dtype=torch.float64))


def test_unaligned_blocks_are_learnt_alone_and_mixed_when_they_answer() -> None:
    learner, method = after_two(joint_training=False)
    rows = learner.rows(learner.items(2)[:2])
    network = learner.network_as(SaptNetwork).train()
    assert torch.equal(network.weights(rows), torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64))  # type: ignore[arg-type]
    alone, _ = network(rows), method
    with network.use_only(2):
        assert torch.allclose(network(rows), alone)
    mixed = network.eval().weights(rows)
    assert mixed is not None
    assert bool((mixed > 0).all())


def test_a_density_stands_for_rows_and_none_is_kept() -> None:
    learner, method = after_two(reflection="density", memory_size=5, density_rank=2)
    names = set(method.state.tensors)
    assert not any(name.startswith("vectors/") for name in names)
    assert method.stand_in_vectors(learner, 1).shape == (5, 16)
    assert torch.equal(method.stand_in_vectors(learner, 1), method.stand_in_vectors(learner, 1))
    assert float(method.reflection_loss(learner).detach()) > 0


@pytest.mark.parametrize("strength", [0.0, 0.1])
def test_a_strength_that_is_balanced_makes_the_gradients_as_long_as_it_says(strength: float) -> None:
    """Those of the loss that is trained: with other words as one class more, and nothing dropped out."""
    learner, method = after_two(
        head="labels", gate="published", gradient_balance=0.5, memory_size=4, reflection_weight=strength
    )
    network = learner.network_as(SaptNetwork).eval()
    head: Any = network.classifier.head
    assert len(head.others)
    maps = [network.router.down, network.router.up]
    rows = learner.rows(learner.items(2)[: 4 * BUDGET.batch_size])
    method.state.values["strength/2"] = method._balance_strength(learner, 2)
    assert not any(one.training for one in network.modules())
    head.train()
    own = learner.cross_entropy(network(rows), rows) / len(rows["labels"])
    lengths = [
        torch.cat([one.flatten() for one in torch.autograd.grad(loss, maps)]).norm()
        for loss in (own, method.reflection_loss(learner))
    ]
    assert float(lengths[1] / lengths[0]) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.exhaustive
def test_the_gate_is_looked_at_and_told_of_when_it_is_shut() -> None:
    learner, method = after_two(memory_size=3)
    found, network = measure_gate(learner, method, 3, rows=6), learner.network_as(SaptNetwork)
    by = {(row["task_index"], row["statistic"], row["adapter"]): row["value"] for row in found}
    for place in (1, 2, 3):
        shares = [by[place, "weight", block] for block in (1, 2, 3)]
        assert sum(shares) == pytest.approx(1, abs=1e-6)
        assert by[place, "own_adapter_weight", place] == shares[place - 1]
        with learner.evaluation_mode(), torch.no_grad():
            batches = learner.batches_by_length(learner.sample_examples(place - 1, "dev", 6), "dev")
            weights = [row for batch in batches for row in network.router(network.vectors(batch)).tolist()]
        entropies = [-sum(weight * math.log(weight) for weight in row if weight) for row in weights]
        assert by[place, "entropy", None] == pytest.approx(sum(entropies) / len(entropies), abs=1e-6)
        assert 0 <= by[place, "own_adapter_score", place] <= 100
    assert {row["task_index"] for row in found if row["statistic"] == "reflection"} == {1, 2}
    with torch.no_grad():
        learner.network_as(SaptNetwork).router.keys[2].fill_(0)
        learner.network_as(SaptNetwork).router.norm.bias.copy_(20 * learner.network_as(SaptNetwork).router.keys[0])
    found = measure_gate(learner, method, 3, scored_tasks=())
    names = [task.name for task in learner.stream.tasks]
    assert list(find_closed_gates(found, 3, newest_only=True)) == [names[2]]
    own = {row["task"]: row["value"] for row in found if row["statistic"] == "own_adapter_weight"}
    assert find_closed_gates(found, 3, newest_only=False) == {
        name: own[name] for name in names[:2] if own[name] < 1 / 6
    }


@pytest.mark.exhaustive
def test_an_adapter_that_is_as_it_was_is_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, method = after_two(memory_size=3)
    expected, known = measure_gate(learner, method, 3, rows=6), dict[Any, float]()
    assert measure_gate(learner, method, 3, rows=6, known_scores=known) == expected
    assert len(known) == 6  # of three tasks: the own adapter, and another
    scored, score = [], measured.score_task

    def count(learner: Learner, task: int, **options: Any) -> Any:
        scored.append(task)
        return score(learner, task, **options)

    monkeypatch.setattr(measured, "score_task", count)
    routed = {row["task_index"] - 1: row["value"] for row in expected if row["statistic"] == "routed_score"}
    assert measure_gate(learner, method, 3, rows=6, known_scores=known, routed_scores=routed) == expected
    assert scored == []
    _stir(learner.network_as(SaptNetwork), 1)  # the own adapter of task 2; the newest other one of task 3
    changed = measure_gate(learner, method, 3, rows=6, known_scores=known, routed_scores=routed)
    assert scored == [1, 2]
    assert changed == measure_gate(learner, method, 3, rows=6, routed_scores=routed)


@pytest.mark.exhaustive
def test_a_head_that_trains_is_scored_again_with_the_same_adapter() -> None:
    learner, method = after_two(memory_size=3)
    known: dict[Any, float] = {}
    measure_gate(learner, method, 3, rows=6, known_scores=known)
    with torch.no_grad():
        next(learner.network.classifier.head.parameters()).add_(1)
    measure_gate(learner, method, 3, rows=6, known_scores=known)
    assert len(known) == 12


def test_a_single_adapter_has_all_of_the_weight() -> None:
    learner, method = begun()
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    _stir(learner.network_as(SaptNetwork), 0)
    found = {row["statistic"]: row["value"] for row in measure_gate(learner, method, 1, rows=6)}
    with learner.network_as(SaptNetwork).use_only(0):
        assert found["own_adapter_score"] == found["routed_score"] == score_task(learner, 0, tasks_trained=1).til
    assert (found["own_adapter_weight"], str(found["entropy"])) == (1.0, "0.0")  # and not -0.0


def test_a_method_without_a_gate_has_nothing_to_look_at() -> None:
    plain = Method()
    learner = make_learner(stream(4), plain, loaded(), BUDGET, seed=1)
    assert measure_gate(learner, plain, 1) == []


@pytest.mark.exhaustive
def test_the_open_gate_learns_the_words() -> None:
    method = Sapt(SaptConfig(**learnt_router(r=4, memory_size=8)))
    learner = make_learner(stream(), method, loaded(dropout=0.0), BUDGET, seed=1)
    found = run_stream(learner, method).rows["matrix"]
    at_once = [row["score"] for row in found if row["after_task"] == row["task_index"] and row["scenario"] == "til"]
    assert len(at_once) == 3
    rows = measure_gate(learner, method, 3, scored_tasks=())
    own = [row["value"] for row in rows if row["statistic"] == "own_adapter_weight"]
    assert min(own) > 0.2


@pytest.mark.parametrize(
    "config, told",
    [
        ({"gate": "ajar"}, "gate: expected one of open, published, got 'ajar'"),
        ({"reflection": "mirrors"}, "reflection: expected one of real, generated, density, none, got 'mirrors'"),
        ({"projection_order": "mine"}, "projection_order: expected one of published, paper, got 'mine'"),
        ({"own_weight_floor": 2.0}, "own_weight_floor: expected a number of at least 0 and at most 1, got 2.0"),
        ({"reflection_weight": 2.0}, "reflection_weight: expected gate=published, which reads it, got gate=open"),
        (
            {"gate": "published", "router_warmup_steps": 20},
            "router_warmup_steps: expected gate=open, which reads it, got gate=published",
        ),
        ({"router_hidden_size": 1.5}, "router_hidden_size: expected a whole number of at least 1, got 1.5"),
        ({"memory_size": 2.5}, "memory_size: expected a whole number of at least 0, got 2.5"),
        ({"init_samples": 8}, "init_samples: expected init=best, which reads it, got init=last"),
        ({"init": "nothing", "gate": "published"}, "init: expected gate=open, which reads it, got gate=published"),
        ({"init": "first"}, "init: expected one of last, best, nothing, got 'first'"),
        (
            {"floor_fraction": 0.2},
            "floor_fraction: expected own_weight_floor above 0, which reads it, got own_weight_floor=0.0",
        ),
        (
            {"router_warmup_steps": 0, "router_warmup_lr": 0.1},
            "router_warmup_lr: expected router_warmup_steps above 0, which reads it, got router_warmup_steps=0",
        ),
        (
            {"memory_size": 5, "memory_fraction": 0.5},
            "memory_fraction: expected memory_size=0, which reads it, got memory_size=5",
        ),
        (
            {"reflection": "generated", "pseudo_samples_dir": "x", "generator_steps": 7},
            "generator_steps: expected pseudo_samples_dir=none, which reads it, got pseudo_samples_dir=x",
        ),
        (
            {"gate": "published", "reflection": "none", "reflection_weight": 3.0},
            "reflection_weight: expected reflection=real or generated or density, which reads it, got reflection=none",
        ),
        ({"gate": "published", "joint_training": False}, "joint_training: expected true with gate=published"),
        (
            {"freeze_router": True, "entropy_weight": 0.1},
            "entropy_weight: expected freeze_router=false, which reads it, got freeze_router=true",
        ),
        (
            {"own_weight_floor": 0.5, "floor_fraction": 0.0},
            "own_weight_floor: expected floor_fraction above 0, which reads it, got floor_fraction=0.0",
        ),
        ({"density_rank": 2}, "density_rank: expected reflection=density, which reads it, got reflection=real"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        SaptConfig(**learnt_router(**config))


@pytest.mark.parametrize("begins", ["last", "nothing"])
def test_a_block_begins_as_the_one_before_it_or_at_nothing(begins: Any) -> None:
    learner, method = begun(init=begins, router_warmup_steps=0, reflection="none")
    network = learner.network_as(SaptNetwork)
    for task in range(3):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        new = [part.clone() for part in network.pool.parameters_of(task)]
        assert (sum(float(part.detach().abs().sum()) for part in new[1::2]) == 0) is (begins == "nothing" or not task)
        if task and begins == "last":
            for one, other in zip(new, network.pool.parameters_of(task - 1), strict=True):
                assert torch.equal(one, other)
        _stir(network, task)
        stirred = [part.clone() for part in network.pool.parameters_of(task)]
        method.place_adapter(learner, task)  # as a run that goes on within the task does
        assert all(map(torch.equal, network.pool.parameters_of(task), stirred))


def _losses_by_block(learner: Learner, task: int, blocks: int) -> list[float]:
    """Compute the mean loss of a task's rows, all in one batch, under each of the first blocks alone."""
    network, rows, losses = learner.network_as(SaptNetwork), learner.rows(learner.items(task)), []
    for block in range(blocks):
        with network.eval().use_only(block), torch.no_grad():
            losses.append(float(learner.cross_entropy(network(rows), rows) / len(rows["labels"])))
    return losses


def test_a_block_begins_as_a_copy_of_that_under_which_the_task_loses_least() -> None:
    learner, method = begun(init="best", init_samples=64, router_warmup_steps=0, reflection="none")
    learner.task = 0
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    network = learner.network_as(SaptNetwork)
    _stir(network, 0)
    for task in (1, 2):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        found = _losses_by_block(learner, task, task + 1)
        assert found[task] == pytest.approx(min(found), rel=1e-6)
        _stir(network, task)


@pytest.mark.parametrize("router", ["discriminant", "attention"])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_only_the_adapters_that_the_router_finds_likeliest_are_tried(most: int, router: Any) -> None:
    settings = {"router_warmup_steps": 0, "reflection": "none"} if router == "attention" else {}
    method = Sapt(SaptConfig(r=2, router=router, init_candidates=most, **settings))
    learner = make_learner(stream(4), method, loaded(), BUDGET, seed=1)
    network, tried = learner.network_as(SaptNetwork), set[int]()
    handle = network.register_forward_pre_hook(lambda module, _: tried.add(module._forced))
    for task in range(3):
        learner.task = task
        method.before_task(learner, task)
        vectors = method._training_vectors(learner, task)
        likely = network.router(vectors).double().log().mean(0) if task else torch.zeros(0)
        tried.clear()
        method.place_adapter(learner, task)
        number = min(most or task, task)
        best = likely.topk(number).indices.tolist() if task else []
        assert tried - {None} == ({task, *best} if task else set())
        for part in network.pool.parameters_of(task):
            part.data.normal_()
    handle.remove()


def test_a_block_that_nothing_helps_begins_at_nothing() -> None:
    learner, method = begun(router_warmup_steps=0, reflection="none", target_modules="auto")
    method.before_task(learner, 0)
    method.place_adapter(learner, 0)
    with torch.no_grad():
        for part in learner.network_as(SaptNetwork).pool.parameters_of(0):
            part.copy_(50 * torch.randn(part.shape, generator=torch.Generator().manual_seed(3)))
    learner.task = 1
    learner.network_as(SaptNetwork).start_adapter(1)
    found = _losses_by_block(learner, 1, 2)
    assert found[1] < found[0]
    assert choose_initial_adapter(learner, 1, 1, 64, range(1)) is None


@pytest.mark.parametrize("least", [0, 1, 2])
def test_no_adapter_reads_more_rows_than_show_that_another_is_better(least: int) -> None:
    """Those of the best are all read; of another one only as many as lose less than these."""
    learner, _ = begun()
    network = learner.network_as(SaptNetwork)
    learner.task, learner.budget = 2, replace(BUDGET, eval_batch_size=2)
    for adapter in range(3):
        network.start_adapter(adapter)
        _stir(network, adapter)
    with learner.loss_mode(), torch.no_grad():
        batches = list(learner.batches_by_length(learner.sample_examples(2, "train", 64)))
        for adapter in {0, 1, 2} - {least}:
            network.pool.parameters_of(adapter)[1].mul_(30)
        losses = []
        for adapter in range(3):
            with network.use_only(adapter):
                losses.append([float(learner.cross_entropy(network(batch), batch)) for batch in batches])
    read = dict.fromkeys(range(3), 0)

    def count(module: nn.Module, _: Any) -> None:
        read[module._forced] += 1  # type: ignore[index]

    handle = network.register_forward_pre_hook(count)
    found = choose_initial_adapter(learner, 2, 2, 64, range(2))
    handle.remove()
    assert len(batches) > 3
    best = min(reversed(range(3)), key=lambda adapter: sum(losses[adapter]))
    assert found == (None if best == 2 else best)
    for adapter in range(3):
        sums = [sum(losses[adapter][:number]) for number in range(len(batches) + 1)]
        assert read[adapter] == min(sum(one <= sum(losses[best]) for one in sums), len(batches))


def test_an_adapter_under_which_a_loss_is_no_number_is_not_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor taken for the best because no other is less."""
    learner, _ = begun()
    network = learner.network_as(SaptNetwork)
    network.start_adapter(2)
    for without in range(3):
        losses = [math.nan if adapter == without else 1.0 + adapter for adapter in range(3)]
        monkeypatch.setattr(learner, "cross_entropy", lambda *_, losses=losses: losses[network._forced])
        assert choose_initial_adapter(learner, 2, 2, 64, range(2)) == (1 if without == 0 else 0)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("reflects", ["real", "density"])
def test_a_run_that_is_broken_off_within_a_task_goes_on_to_the_same(reflects: Any, tmp_path: Path) -> None:
    def learnt(folder: Path | None, stop: tuple[int, int] | None, *, resume: bool = False) -> dict[str, Tensor]:
        method = Sapt(SaptConfig(**learnt_router(r=2, memory_size=4, reflection=reflects, router_warmup_steps=20)))
        learner = make_learner(stream(4), method, loaded(), replace(BUDGET, num_epochs=1), seed=1, head="labels")

        def tell(told: ProgressEvent) -> None:
            if (told.task_index, told.step) == stop:
                raise KeyboardInterrupt

        ran = run_stream(learner, method, folder=folder, resume=resume, checkpoint_every=1, on_progress=tell)
        return {name: value.clone() for name, value in ran.network.state_dict().items()}

    whole = learnt(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        learnt(tmp_path / "parts", (3, 2))
    parts = learnt(tmp_path / "parts", None, resume=True)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
