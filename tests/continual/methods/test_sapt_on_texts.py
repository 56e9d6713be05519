"""SAPT on tasks from text to text: the prompt alone says how blocks are mixed, for every token of its answer."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.continual.gate import measure_gate
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig, SaptNetwork
from regard.continual.run import make_learner, run_stream
from tests.continual.small_tasks import learnt_router
from tests.continual.small_text_tasks import BUDGET, KINDS, lively, stream

pytestmark = pytest.mark.usefixtures("without_flops")


def learnt(kind: Any, *, micro_batch: int | None = None, exact: bool = False) -> tuple[Learner, Sapt, SaptNetwork]:
    """Two tasks learnt, with blocks large enough to be heard."""
    method = Sapt(SaptConfig(**learnt_router(r=2, router_warmup_steps=30, memory_size=3)))
    learner = make_learner(
        stream(2, 2), method, lively(kind), replace(BUDGET, num_epochs=1, micro_batch_size=micro_batch), seed=1
    )
    if exact:
        learner.network.double()
    network = run_stream(learner, method).network
    assert isinstance(network, SaptNetwork)
    return learner, method, network


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_same_alone_and_among_others(kind: Any) -> None:
    learner, _, network = learnt(kind)
    with torch.no_grad():
        for block in network.pool.adapters:
            for part in block.B:
                part += 0.5 * torch.randn(part.shape, generator=torch.Generator().manual_seed(len(part)))
    items = [*learner.items(0)[:3], *learner.items(1)[:3]]
    together = network.generate(learner.rows(items), 5)
    for number, item in enumerate(items):
        alone = network.generate(learner.rows([item]), 5)[0]
        width = min(len(alone), together.shape[1])
        assert torch.equal(together[number, :width], alone[:width])


def test_the_weights_are_those_of_the_prompt_for_every_token_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, _, network = learnt("llama")
    rows, seen = learner.rows(learner.items(1)[:2]), []
    first = network.pool.adapters[0]
    plain = type(first).forward

    def watched(self: Any, states: Any, out: Any, mixture: Any) -> Any:
        if self is first:
            seen.append(mixture.weights.clone())
        return plain(self, states, out, mixture)

    monkeypatch.setattr(type(first), "forward", watched)
    with torch.no_grad():
        network.generate(rows, 4)
    expected = network.weights(rows)
    assert expected is not None
    assert len(seen) >= 2
    assert all(torch.allclose(one, expected) for one in seen)


def test_the_answer_has_no_part_in_the_weights() -> None:
    learner, _, network = learnt("gpt2")
    rows = learner.rows(learner.items(0)[:2])
    other = {**rows, "labels": rows["labels"].flip(0)}
    assert torch.equal(network.vectors(rows), network.vectors(other))


@pytest.mark.exhaustive
def test_how_batches_are_split_does_not_matter() -> None:
    _, _, whole = learnt("t5", exact=True)
    _, _, split = learnt("t5", micro_batch=3, exact=True)
    for (name, one), other in zip(whole.state_dict().items(), split.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=name)


@pytest.mark.exhaustive
def test_the_gate_of_texts_is_looked_at() -> None:
    learner, method, _ = learnt("t5")
    found = measure_gate(learner, method, 2, rows=2)
    assert {row["statistic"] for row in found} >= {
        "weight",
        "own_adapter_weight",
        "entropy",
        "routed_score",
        "own_adapter_score",
    }
    assert min(row["value"] for row in found if row["statistic"] == "own_adapter_weight") > 0.1
