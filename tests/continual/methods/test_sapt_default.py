"""SAPT with its default router: fitted once a task, nothing trained or kept of it but means and a covariance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.discriminant import DiscriminantRouter
from regard.continual.costs import measure_memory
from regard.continual.gate import measure_gate
from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import QUERY, Sapt, SaptNetwork
from regard.continual.methods.sapt_config import SaptConfig, SaptPaperConfig
from regard.continual.network import INPUTS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import ProgressEvent
from regard.continual.text_learner import make_text_learner
from regard.continual.training_phase import ExampleRef
from regard.errors import UserError
from tests.continual import small_text_tasks
from tests.continual.small_tasks import BUDGET, loaded, stream

pytestmark = pytest.mark.usefixtures("without_flops")


def begun(name: str = "sapt", rows: int = 8, **config: Any) -> tuple[Learner, Sapt, SaptNetwork]:
    """A run before its first task."""
    method = METHODS[name](METHODS[name].Config.parse({"r": 2, **config}))
    assert isinstance(method, Sapt)
    learner = make_learner(stream(rows), method, loaded(dropout=0.0), BUDGET, seed=1)
    return learner, method, learner.network_as(SaptNetwork)


def place(learner: Learner, method: Sapt, task: int) -> None:
    learner.task = task
    method.before_task(learner, task)
    method.place_adapter(learner, task)


def test_adapters_are_in_all_linear_layers() -> None:
    method = METHODS["sapt"]()
    network = make_learner(stream(), method, loaded(), BUDGET, seed=1).network_as(SaptNetwork)
    types = {name.rsplit(".", 1)[-1] for name in network.pool.layers}
    assert types == {"query", "key", "value", "dense"}
    assert SaptPaperConfig().target_modules == "auto"


def test_the_router_knows_the_training_rows_of_each_task_and_nothing_twice() -> None:
    learner, method, network = begun()
    expected = DiscriminantRouter(network.router.width)
    for task in range(3):
        place(learner, method, task)
        method.place_adapter(learner, task)  # as a run that goes on within the task does
        vectors = torch.cat([network.vectors(rows) for rows in learner.iterate_batches(learner.items(task))])
        expected.use(task + 1)
        expected.fit(task, vectors)
        method.after_task(learner, task)
    rows = learner.rows(learner.items(1))
    torch.testing.assert_close(network.router(network.vectors(rows)), expected(network.vectors(rows)))
    found = network.weights(rows)
    assert found is not None
    assert torch.equal(found, network.router(network.vectors(rows)))
    assert method.state.tensors == {}


def test_a_known_task_is_answered_by_its_adapter_alone_once_there_is_one() -> None:
    learner, method, network = begun()
    place(learner, method, 0)
    place(learner, method, 1)
    with torch.no_grad():
        for part in [*network.pool.parameters_of(0), *network.pool.parameters_of(1)]:
            part.normal_(generator=torch.Generator().manual_seed(part.numel()))
    rows = learner.rows(learner.items(0)[:5])
    knowing = network.eval().knowing(0)
    assert knowing is not None
    with torch.no_grad():
        with knowing:
            found = network(rows)
        with network.pool.use_weights(torch.tensor([1.0, 0.0])):
            expected = network.classifier(**{name: rows[name] for name in INPUTS if name in rows}).logits
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, network(rows))
    assert network.knowing(2) is None  # not learnt yet
    assert begun(known_task="router")[2].knowing(0) is None
    assert SaptPaperConfig().known_task == METHODS["sapt-task-free"]().config.known_task == "router"


def test_a_record_of_before_is_of_a_run_whose_router_answered_known_tasks() -> None:
    settings = SaptConfig().to_dict()
    assert SaptConfig.restore(settings).known_task == "adapter"
    del settings["known_task"]
    assert SaptConfig.restore(settings).known_task == "router"
    assert "known_task" not in SaptConfig(known_task="router").identity()
    assert SaptConfig().identity()["known_task"] == "adapter"


def test_query_vectors_are_mean_states_of_the_model_without_adapters() -> None:
    learner, method, network = begun()
    place(learner, method, 0)
    with torch.no_grad():
        for part in network.pool.parameters_of(0):
            part.normal_()
    rows = learner.rows(learner.items(0)[:5])
    with torch.no_grad():
        outputs = loaded().model(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long(), output_hidden_states=True
        )
    expected = [
        states[: int(mask.sum())].mean(0)
        for states, mask in zip(outputs.hidden_states[1], rows["attention_mask"], strict=True)
    ]
    torch.testing.assert_close(network.vectors(rows), torch.stack(expected))


def test_training_rows_bring_the_vectors_that_were_read_once() -> None:
    learner, method, network = begun()
    batches = method.batches(learner, 0, method.phases(learner, 0)[0])
    for step in range(batches.steps):
        rows = batches.rows(step)
        plain = {name: value for name, value in rows.items() if name != QUERY}
        torch.testing.assert_close(rows[QUERY], network.vectors(plain), atol=1e-5, rtol=1e-4)
        assert network.vectors(rows) is rows[QUERY]


def test_only_the_new_adapter_is_trained_and_the_loss_is_that_of_the_rows() -> None:
    learner, method, network = begun()
    for task in range(2):
        place(learner, method, task)
    rows = learner.rows(learner.items(1)[:4])
    loss = method.loss(learner, network.eval(), rows)
    torch.testing.assert_close(loss, learner.cross_entropy(network(rows), rows))
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    assert {name for name in trained if ".adapters." in name} == {name for name in trained if name.endswith(".1")}
    assert not any(name.startswith("router.") for name in trained)


def test_each_task_finds_its_own_adapter() -> None:
    learner, method, _ = begun(rows=12)
    for task in range(3):
        place(learner, method, task)
        method.after_task(learner, task)
    rows = measure_gate(learner, method, 3, scored_tasks=())
    own = [row["value"] for row in rows if row["statistic"] == "own_adapter_weight"]
    assert min(own) > 0.6
    assert [row["value"] for row in rows if row["statistic"] == "strength"] == [0.0]


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_texts_that_are_generated_find_their_adapters(kind: Any) -> None:
    method = Sapt(SaptConfig(r=2))
    learner = make_text_learner(
        small_text_tasks.stream(3, 3), method, small_text_tasks.lively(kind), small_text_tasks.BUDGET, seed=1
    )
    run_stream(learner, method)
    rows = measure_gate(learner, method, len(learner.stream), scored_tasks=())
    own = [row["value"] for row in rows if row["statistic"] == "own_adapter_weight"]
    assert sum(own) / len(own) > 0.6


@pytest.mark.exhaustive
def test_a_run_that_is_broken_off_within_a_task_goes_on_to_the_same(tmp_path: Path) -> None:
    def learnt(folder: Path, stop: tuple[int, int] | None, *, resume: bool = False) -> dict[str, Tensor]:
        method = Sapt(SaptConfig(r=2))
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


@pytest.mark.exhaustive
def test_what_is_known_of_the_data_is_counted_as_memory() -> None:
    """In float32: a mean a task and the scatter; of EPI means of classes and the covariance; of GainLoRA three maps."""
    learner, method, _ = begun()
    for task in range(2):
        place(learner, method, task)
    assert measure_memory(learner, method) == {"memory_bytes": 4 * (2 * 16 + 16 * 16), "memory_examples": 0}
    for name, numbers in (("epi", 16 * 16 + 7 * 16), ("gainlora", 16 * 16 + 100 * 100 + 16 * 16)):
        other = METHODS[name](METHODS[name].Config.parse({"r": 2}))
        ran = run_stream(make_learner(stream(4), other, loaded(dropout=0.0), BUDGET, seed=1), other)
        kept = sum(tensor.numel() * tensor.element_size() for tensor in other.state.tensors.values())
        assert ran.rows["cost"][-1]["memory_bytes"] == 4 * numbers + kept


def test_the_paper_s_choices_are_a_method() -> None:
    config = SaptPaperConfig()
    assert (config.router, config.query, config.gate) == ("attention", "embeddings", "published")
    learner, method, network = begun("sapt-paper")
    for task in range(3):
        place(learner, method, task)
        method.after_task(learner, task)
    targets = method.state.tensors
    items = learner.sample_examples(1, "dev", 10**6)
    with torch.no_grad():
        vectors = torch.cat([network.vectors(rows) for rows in learner.iterate_batches(items, "dev")])
        network.router.use(2)
        expected = network.router(vectors).mean(0)
        network.router.use(3)
    torch.testing.assert_close(targets["target/1"], expected)
    assert method.reflection_strength(2) == 2 * config.reflection_weight  # of the mean: so it is of the sum
    with pytest.raises(UserError, match="router_warmup_steps: expected gate=open, which reads it, got gate=published"):
        SaptPaperConfig(router_warmup_steps=20)


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"router_warmup_steps": 20}, "router_warmup_steps: expected router=attention, which reads it, got router=dis"),
        ({"gate": "published"}, "gate: expected router=attention, which reads it, got router=discriminant"),
        ({"memory_size": 5}, "memory_size: expected router=attention, which reads it, got router=discriminant"),
        ({"query_layers": "2;4"}, "query_layers: expected auto, or numbers of layers with commas between, got '2;4'"),
        (
            {"query": "embeddings", "query_layers": "2"},
            "query_layers: expected query=states, which reads it, got query=embeddings",
        ),
        ({"router": "lda"}, "router: expected one of discriminant, attention, got 'lda'"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        SaptConfig(**config)
    assert str(refused.value).startswith(problem)


def test_layers_are_chosen_by_number() -> None:
    _, _, network = begun(query_layers="1,2")
    assert network.router.width == 32


def test_rows_that_are_scored_again_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, method, network = begun()
    place(learner, method, 0)
    calls: list[int] = []
    read = network.vectors
    monkeypatch.setattr(network, "vectors", lambda rows: (calls.append(1), read(rows))[1])
    items = [ExampleRef(0, row) for row in range(3)]
    with learner.evaluation_mode():
        first = [batch[QUERY] for batch in learner.iterate_batches(items, "test")]
        again = [batch[QUERY] for batch in learner.iterate_batches(reversed(items), "test", size=1)]
        other = [batch[QUERY] for batch in learner.iterate_batches(items, "dev")]
    assert len(calls) == 2  # of test and dev rows
    assert torch.equal(torch.cat(again).flip(0), torch.cat(first))
    assert not torch.equal(torch.cat(other), torch.cat(first))
    learner.network.train()
    assert not any(QUERY in batch for batch in learner.iterate_batches(items, "test"))  # dropout may change them


def test_a_score_that_is_known_is_not_computed_for_the_gate() -> None:
    learner, method, _ = begun()
    place(learner, method, 0)
    rows = measure_gate(learner, method, 1, routed_scores={0: 12.5})
    assert [row["value"] for row in rows if row["statistic"] == "routed_score"] == [12.5]


def test_adapters_above_the_query_answer_in_one_pass() -> None:
    method = Sapt(SaptConfig(r=2, above_query=True))
    learner = make_learner(stream(4), method, loaded(dropout=0.0), BUDGET, seed=1)
    run_stream(learner, method)
    network, calls = learner.network_as(SaptNetwork), list[int]()
    assert all(name.startswith("encoder.layer.1.") for name in network.pool.layers)
    rows = learner.rows(learner.items(1)[:4])
    network.eval()
    with torch.no_grad():
        with network.pool.use_weights(network.weights(rows)):
            expected = network.classifier(**{name: rows[name] for name in ("input_ids", "attention_mask")}).logits
        weights = network.routing_weights
        network.classifier.encoder.encoder.layer[0].register_forward_hook(lambda *_: calls.append(1))
        found = network(rows)
    assert calls == [1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(network.routing_weights, weights)
