"""CTR: masks, guarded layers and routing by their formulas; what is held is held to the bit; a run of the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraModel, GPT2Config, GPT2Model, RobertaConfig, RobertaModel

from regard.continual.learner import Learner
from regard.continual.methods.baselines import Probe
from regard.continual.methods.ctr import Ctr, CtrConfig
from regard.continual.methods.ctr_network import (
    KERNELS,
    CtrNetwork,
    GuardedLinear,
    KnowledgeSharing,
    Plugin,
    PluginInput,
    TaskSpecific,
    compensate,
    find_end_layers,
    open_gates,
    slope_at,
    squash,
)
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent
from regard.errors import UserError
from regard.models.pretrained import Loaded
from tests.continual.small_tasks import BUDGET, WORDS, loaded, stream, tokenizer

SIZES = CtrConfig(adapter_size=7, capsule_size=2, capsule_hidden_size=5, num_transfer_capsules=3, num_filters=4)
SMALL: dict[str, Any] = {"adapter_size": 12, "capsule_hidden_size": 6, "num_filters": 4, "capsule_size": 2}
WIDTH, TASKS, EPOCHS = 6, 3, 20


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    torch.manual_seed(0)


def site(tasks: list[int], lengths: list[int], width: int | None = None, slope: float = 140.0) -> PluginInput:
    real = torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]
    return PluginInput(real, torch.tensor(tasks), torch.full((len(tasks),), slope), max(tasks))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def begun(**changes: Any) -> tuple[Learner, Ctr]:
    method = Ctr(CtrConfig(**{**SMALL, **changes}))
    return make_learner(stream(), method, loaded(dropout=0.1), BUDGET, seed=1), method


# -- masks ----------------------------------------------------------------------------------------------


def test_the_slope_grows_through_an_epoch() -> None:
    assert [slope_at(step, 3, 140) for step in range(4)] == pytest.approx([1 / 140, (1 / 140 + 140) / 2, 140, 1 / 140])
    assert slope_at(5, 1, 140) == 140


@pytest.mark.parametrize("slope", [0.5, 3.0])
def test_compensation_takes_the_slope_out_of_the_gradient(slope: float) -> None:
    """What comes out is ∂L/∂m · most · σ'(e), whatever s is."""
    embedding, weight = nn.Parameter(draw(9)), draw(9)
    ((slope * embedding).sigmoid() * weight).sum().backward()
    compensate(embedding, slope, 140.0)
    told = embedding.detach().sigmoid()
    assert torch.allclose(embedding.grad, weight * 140 * told * (1 - told))  # type: ignore[arg-type]


def test_each_row_goes_through_the_neurons_of_its_task() -> None:
    module, states = TaskSpecific(WIDTH, TASKS, 7).double(), draw(2, 4, WIDTH)
    found = module(states, site([2, 0], [4, 4], slope=1.5))
    gelu = nn.functional.gelu
    for row, task in enumerate((2, 0)):
        first, second = ((1.5 * own[task]).sigmoid() for own in module.tasks)  # type: ignore[index]
        hidden = gelu(module.layers[0](states[row])) * first
        assert torch.allclose(found[row], gelu(module.layers[1](hidden)) * second)


# -- what is held ---------------------------------------------------------------------------------------


def train(module: nn.Module, loss: Callable[[], Tensor], steps: int = 5) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def test_held_weights_stay_to_the_bit_under_decay() -> None:
    layer, inputs = GuardedLinear(3, 4), torch.randn(5, 3)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    outputs, into = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    layer.guard(outputs, into)
    train(layer, lambda: layer(inputs).square().sum())
    computed = layer(inputs)
    layer.release()
    assert layer.guarded is None
    assert torch.equal(layer(inputs), computed)
    same = layer.weight == weight
    assert same.tolist() == [[True, True, False], [False] * 3, [True, True, False], [False] * 3]
    assert (layer.bias == bias).tolist() == [True, False, True, False]


def test_gradients_are_blocked_as_far_as_neurons_are_used() -> None:
    layer, inputs, used, into = (
        GuardedLinear(3, 2).double(),
        draw(5, 3),
        torch.tensor([0.25, 1.0]),
        torch.tensor([0, 0.5, 1]),
    )
    layer(inputs).square().sum().backward()
    assert layer.weight.grad is not None is not layer.bias.grad
    plain, plain_bias = layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.zero_grad()
    layer.guard(used.double(), into.double())
    layer(inputs).square().sum().backward()
    expected = plain * torch.tensor([[1.0, 0.75, 0.75], [1.0, 0.5, 0.0]])
    assert torch.allclose(layer.weight.grad, expected)
    assert torch.allclose(layer.bias.grad, plain_bias * torch.tensor([0.75, 0.0]))


def test_an_old_task_is_computed_as_before() -> None:
    """The property of HAT: with masks of 0 and 1 nothing that a later task learns is seen by an earlier one."""
    module, states = TaskSpecific(WIDTH, TASKS, 20), torch.randn(3, 4, WIDTH)
    with torch.no_grad():
        for embeddings in module.tasks:
            for one in embeddings:  # type: ignore[attr-defined]
                one.copy_(one.sign())
    old, new = site([0] * 3, [4] * 3), site([1] * 3, [4] * 3)
    before, was = module(states, old), module(states, new)
    first, second = (mask.detach() for mask in module.masks(0, 140.0))
    module.guard([first, second])
    free = module.layers[1].guarded[0]  # type: ignore[index,union-attr]
    assert torch.equal(free, 1 - second[:, None] * first), "what comes from a neuron that is closed is free"
    assert 0 < float(first.sum()) < len(first)
    train(module, lambda: (module(states, new) - 1).square().sum())
    module.release()
    assert torch.equal(module(states, old), before)
    assert not torch.allclose(module(states, new), was)


# -- sharing --------------------------------------------------------------------------------------------


def test_squashing_by_hand() -> None:
    found = squash(torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor([[3 / 5 * 25 / 26, 4 / 5 * 25 / 26], [0, 0]], dtype=torch.float64))


def test_gates_by_hand() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.0]]).expand(3, 3, 2)
    found = open_gates(logits, torch.tensor([0, 1, 2]))
    assert found.tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def test_drawn_gates_open_as_often_as_their_softmax_says() -> None:
    logits = torch.tensor([[0.7, 0.0], [0.0, 0.0]], requires_grad=True)
    noise = -torch.empty(4000, 3, 2).exponential_().log()
    found = open_gates(logits.expand(4000, 2, 2), torch.ones(4000, dtype=torch.long), noise)
    assert set(found.flatten().tolist()) == {0.0, 1.0}
    chance = 1 / (1 + math.exp(-0.7))
    assert float(found.detach()[:, 0].mean()) == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 4000))
    found[:, 0].sum().backward()
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) > 0
    assert logits.grad[1].tolist() == [0, 0]


def shared_by_hand(module: KnowledgeSharing, states: Tensor, task: int) -> Tensor:
    """What is shared with a text (token, width) of a task, one number at a time where it can be."""
    sizes, tokens = SIZES, len(states)
    capsules = [squash(module.capsules[one](states)) for one in range(task + 1)]
    votes = [
        torch.stack([torch.cat([route @ token for route in module.routes[one]]) for token in capsules[one]])
        for one in range(task + 1)
    ]

    def read(vote: Tensor, convolutions: nn.ModuleList, added: Tensor | None) -> Tensor:
        found = []
        for kernel, one in zip(KERNELS, convolutions, strict=True):
            for number in range(sizes.num_filters):
                values = []
                for middle in range(tokens):
                    value = one.bias[number] + (0 if added is None else added[number])  # type: ignore[index]
                    for tap in range(kernel):
                        place = middle + tap - (kernel - 1) // 2
                        if 0 <= place < tokens:
                            value = value + one.weight[number, :, tap] @ vote[place]  # type: ignore[index]
                    values.append(value.relu())
                found.append(torch.stack(values).max())
        return torch.stack(found)

    compared = module.compare(read(votes[task], module.own, None))
    total = torch.zeros(tokens, sizes.num_transfer_capsules, sizes.capsule_size, dtype=states.dtype)
    for one in range(task + 1):
        seen = read(votes[one], module.others, compared)
        let, kept_out = module.router(seen).tolist()
        if one == task or let > kept_out:
            similarity = module.similarity(seen)
            for transfer in range(sizes.num_transfer_capsules):
                part = votes[one][:, transfer * sizes.capsule_size : (transfer + 1) * sizes.capsule_size]
                total[:, transfer] += similarity[transfer] * part
    return torch.stack([module.widen(token.flatten()) for token in total])


def test_sharing_is_its_formula_for_each_row() -> None:
    module = KnowledgeSharing(WIDTH, TASKS, SIZES).double().eval()
    tasks, lengths = [2, 0, 1, 2, 1], [5, 3, 1, 4, 2]
    with torch.no_grad():
        module.router.weight.mul_(20)
        module.router.bias.zero_()
        states = 3 * draw(5, 5, WIDTH)
        found = module(states, site(tasks, lengths))
        wide = module(nn.functional.pad(states, (0, 0, 0, 3), value=9.0), site(tasks, lengths, 8))
        for row, (task, length) in enumerate(zip(tasks, lengths, strict=True)):
            expected = shared_by_hand(module, states[row, :length], task)
            assert torch.allclose(found[row, :length], expected)
            assert torch.allclose(wide[row, :length], expected)


@given(st.integers(0, TASKS - 1))
def test_later_tasks_have_no_share(task: int) -> None:
    module, states = Plugin(WIDTH, TASKS, SIZES).double().eval(), draw(2, 4, WIDTH)
    here = site([task, task], [4, 4])
    before = module(states, here)
    with torch.no_grad():
        for later in range(task + 1, TASKS):
            module.sharing.routes[later].add_(1)
            for embeddings in module.specific.tasks:
                embeddings[later].add_(1)  # type: ignore[index]
    assert torch.equal(module(states, here._replace(upto=TASKS - 1)), before)


# -- the network ----------------------------------------------------------------------------------------


def test_closed_plugins_leave_the_model_as_it_is() -> None:
    learner, _ = begun()
    network = learner.network.eval()
    rows = learner.rows(learner.items(0)[:3])
    assert isinstance(network, CtrNetwork)
    open_ = network(rows)
    with torch.no_grad():
        for plugin in network.typed_plugins:
            for one in plugin.specific.tasks[1]:  # type: ignore[attr-defined]
                one.fill_(-9.0)
    found = network(rows)
    encoder = loaded(dropout=0.1).model
    states = encoder(rows["input_ids"], rows["attention_mask"].long(), rows.get("token_type_ids")).last_hidden_state
    expected = network.classifier.head(states, rows["attention_mask"])
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(open_, expected, atol=1e-3)


def test_an_encoder_on_its_own_is_of_the_latest_task() -> None:
    learner, method = begun()
    network: Any = learner.network.eval()
    rows = learner.rows(learner.items(1)[:3])
    ids, mask = rows["input_ids"], rows["attention_mask"]
    alone = network.classifier(ids, mask, rows.get("token_type_ids")).logits
    assert torch.equal(alone, network({**rows, "tasks": torch.zeros(3, dtype=torch.long)}))
    method.before_task(learner, 1)
    assert torch.equal(network.classifier(ids, mask, rows.get("token_type_ids")).logits, network(rows))


def test_where_plugins_go() -> None:
    said: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    models: list[Any] = [
        RobertaModel(RobertaConfig(num_hidden_layers=2, **said)),
        ElectraModel(ElectraConfig(num_hidden_layers=2, embedding_size=8, **said)),
        loaded().model,
    ]
    for model in models:
        layers = model.encoder.layer
        assert [id(one) for one in find_end_layers(model)] == [
            id(one) for layer in layers for one in (layer.attention.output.dense, layer.output.dense)
        ]


def test_a_model_that_has_no_place_for_them_is_refused() -> None:
    model: Any = GPT2Model(GPT2Config(vocab_size=len(WORDS), n_embd=8, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(UserError, match=r"BERT, RoBERTa, ELECTRA or MiniLM.*GPT2Model"):
        make_learner(stream(), Ctr(), Loaded(model, tokenizer(), "tiny", None), BUDGET, seed=1)


def test_lora_is_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(UserError, match=r"^lora: expected none"):
        make_learner(stream(), Ctr(), loaded(), BUDGET, seed=1, lora={"rank": 2})


@pytest.mark.parametrize(
    "name, value", [("adapter_size", 0), ("capsule_size", 1.5), ("max_slope", 0.5), ("sparsity_weight", -1.0)]
)
def test_settings_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}: expected"):
        CtrConfig(**{name: value})


# -- the whole ------------------------------------------------------------------------------------------


def test_the_loss_counts_free_neurons_that_are_capacity_used() -> None:
    learner, method = begun(sparsity_weight=0.5)
    network: Any = learner.network.eval()
    method.before_task(learner, 0)
    method.after_task(learner, 0)
    learner.task = 1
    method.before_task(learner, 1)
    rows = {**learner.rows(learner.items(1)[:3], size=4), "slope": torch.full((4,), 2.0)}
    taken = free = 0.0
    for plugin in network.typed_plugins:
        for embeddings in plugin.specific.tasks:
            for first, second in zip(embeddings[0].tolist(), embeddings[1].tolist(), strict=True):
                left = 1 - 1 / (1 + math.exp(-140 * first))
                free, taken = free + left, taken + left / (1 + math.exp(-2 * second))
    with torch.no_grad():
        expected = float(learner.cross_entropy(network(rows), rows)) + 3 * 0.5 * taken / free
        assert float(method.loss(learner, network, rows)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_what_a_run_changes_and_what_not() -> None:
    learner, method = begun()
    states: list[dict[str, Tensor]] = []
    ran = run_stream(learner, method, on_task=lambda learner, _: states.append(deepcopy(learner.network.state_dict())))
    before, (first, second, _) = {name: value.clone() for name, value in learner.start.items()}, states
    encoder = [name for name in before if name.startswith("classifier.encoder.")]
    assert encoder
    assert all(torch.equal(before[name], second[name]) for name in encoder)
    assert not torch.equal(before["plugins.0.specific.layers.0.weight"], first["plugins.0.specific.layers.0.weight"])
    # the first task's classes, embeddings and neurons, after the second
    own = learner.task_classes[0]
    assert torch.equal(first["classifier.head.vectors"][own], second["classifier.head.vectors"][own])
    assert not torch.equal(first["classifier.head.vectors"][~own], second["classifier.head.vectors"][~own])
    assert torch.equal(first["plugins.3.specific.tasks.1.0"], second["plugins.3.specific.tasks.1.0"])
    assert not torch.equal(first["plugins.3.specific.tasks.1.1"], second["plugins.3.specific.tasks.1.1"])
    assert torch.equal(before["plugins.3.specific.tasks.1.1"], first["plugins.3.specific.tasks.1.1"])
    used = (140 * first["plugins.0.specific.tasks.0.0"]).sigmoid() == 1
    assert 0 < int(used.sum()) < len(used)
    layer = "plugins.0.specific.layers.0.weight"
    assert torch.equal(first[layer][used], second[layer][used])
    assert not torch.equal(first[layer][~used], second[layer][~used])
    assert {row["scenario"] for row in ran.rows["matrix"]} == {"til"}
    assert set(method.state.tensors) == {f"{number}.{layer}" for number in range(4) for layer in ("first", "second")}


@pytest.mark.exhaustive
def test_a_run_resumed_within_a_task_is_the_unbroken_one(tmp_path: Any) -> None:
    learner, method = begun()
    whole = run_stream(learner, method)

    def stop(told: Any) -> None:
        if (told.task_index, told.step) == (2, 4):
            raise KeyboardInterrupt

    learner, method = begun()
    with pytest.raises(KeyboardInterrupt):
        run_stream(learner, method, folder=tmp_path, checkpoint_every=3, on_progress=stop)
    learner, method = begun()
    again = run_stream(learner, method, folder=tmp_path, checkpoint_every=3, resume=True)
    assert again.rows["matrix"] == whole.rows["matrix"]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


def test_all_that_is_trained_gets_a_gradient() -> None:
    """Else several processes could not train together; and what is not the task's own to train gets none."""
    learner, method = begun()
    network = learner.network
    for task in (0, 1):
        learner.task = task
        method.before_task(learner, task)
        network.zero_grad()
        rows = {**learner.rows(learner.items(task)[:4]), "slope": torch.ones(4)}
        method.loss(learner, network.train(), rows).backward()
        without = [name for name, one in network.named_parameters() if one.requires_grad and one.grad is None]
        assert without == []
        trained = {name for name, one in network.named_parameters() if one.requires_grad}
        assert ("plugins.0.sharing.routes.1" in trained) == (task == 1)
        assert ("plugins.0.specific.tasks.0.0" in trained) == (task == 0)
        held = [part.guarded is not None for part in network.modules() if isinstance(part, GuardedLinear)]
        assert held == [task == 1] * 8, "what the first task uses is held in the second"
        method.after_task(learner, task)


@pytest.mark.exhaustive
def test_it_learns() -> None:
    """A linear head over random attention cannot tell three classes; plug-ins beside that attention can."""
    model = loaded(dropout=0.0)
    with torch.no_grad():
        for one in model.model.parameters():
            if one.ndim == 2:
                one.mul_(20)
    budget = dataclasses.replace(
        BUDGET, num_epochs=EPOCHS, num_probing_epochs=EPOCHS, probing_learning_rate=3e-2, batch_size=12
    )
    few = dataclasses.replace(stream(16), tasks=stream(16).tasks[1:2], order=(0,))
    losses: list[list[float]] = []
    for method in (
        Probe(),
        Ctr(CtrConfig(adapter_size=32, capsule_hidden_size=8, num_filters=4, sparsity_weight=0.0, learning_rate=0.0)),
    ):
        told: list[ProgressEvent] = []
        learner = make_learner(few, method, model, budget, seed=1)
        run_stream(learner, method, on_progress=told.append)
        losses.append([event.metrics["loss"] for event in told if event.step][-4:])
    assert min(losses[0]) > 0.7 > 0.4 > max(losses[1]), losses
