"""SAPT with soft prompts for blocks (SAPT-Prompt): what is read, what is learnt, and what other parts make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.adapters.prompt_pool import PromptAdapterPool
from regard.continual.gate import measure_gate
from regard.continual.learner import Learner
from regard.continual.methods.sapt import Sapt, SaptConfig, SaptNetwork
from regard.continual.methods.sapt_task_free import SaptTaskFree, SaptTaskFreeConfig
from regard.continual.pseudo.generator import GeneratorTrainingConfig, generate_inputs
from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from tests.continual.pseudo import small_pseudo
from tests.continual.small_tasks import BUDGET, learnt_router, loaded, stream
from tests.continual.small_text_tasks import BUDGET as TEXTS
from tests.continual.small_text_tasks import lively
from tests.continual.small_text_tasks import stream as text_stream

SMALL: dict[str, Any] = {
    **learnt_router(),
    "adapter_type": "prompt",
    "num_virtual_tokens": 2,
    "encoder_hidden_size": 4,
    "router_warmup_steps": 20,
    "memory_size": 3,
}


pytestmark = pytest.mark.usefixtures("without_flops")


def made(**config: Any) -> tuple[Learner, Sapt, SaptNetwork]:
    """A run before its first task, in float64 and without dropout."""
    method = Sapt(SaptConfig(**SMALL | config))
    learner = make_learner(stream(4), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1)
    learner.network.double()
    return learner, method, learner.network_as(SaptNetwork)


def pool_of(network: SaptNetwork) -> PromptAdapterPool:
    assert isinstance(network.pool, PromptAdapterPool)
    return network.pool


def begun(learner: Learner, method: Sapt, tasks: int) -> None:
    """So many tasks begun, all but the last of them finished, with prompts that were trained a little."""
    for task in range(tasks):
        learner.task = task
        method.before_task(learner, task)
        method.place_adapter(learner, task)
        with torch.no_grad():
            pool = pool_of(learner.network_as(SaptNetwork))
            pool.prompts.P[task].add_(0.1 * torch.randn(2, 16, generator=torch.Generator().manual_seed(task)))
        if task + 1 < tasks:
            method.after_task(learner, task)


def test_a_row_reads_the_mix_of_prompts_that_its_weights_say() -> None:
    learner, method, network = made()
    begun(learner, method, 3)
    plain: Any = loaded(dropout=0.0, dtype=torch.float64).model
    rows = learner.rows(learner.items(1)[:3])
    prompts, mlp = pool_of(network).prompts, pool_of(network).prompts.mlp
    assert mlp is not None
    assert prompts.live.tolist() == [False, False, True]
    read = [prompts.P[0], prompts.P[1], mlp(prompts.P[2]) + prompts.P[2]]
    table = plain.embeddings.word_embeddings
    network.eval()
    with torch.no_grad():
        found, weights = network(rows), network.weights(rows)
    assert weights is not None
    for row, (ids, mask) in enumerate(zip(rows["input_ids"], rows["attention_mask"], strict=True)):
        ids = ids[mask.bool()]
        mixed = sum(float(weight) * prompt for weight, prompt in zip(weights[row], read, strict=True))
        states = plain(inputs_embeds=torch.cat([mixed, table(ids)])[None]).last_hidden_state
        head: Any = network.classifier.head
        torch.testing.assert_close(found[row], (states[0, 2] @ head.vectors.T + head.bias).detach())


def test_the_newest_prompt_is_trained_with_its_key_and_the_maps() -> None:
    learner, method, network = made()
    begun(learner, method, 3)
    with torch.no_grad():
        pool_of(network).prompts.mlp[-1].weight.fill_(0.1)  # type: ignore[index,union-attr,operator]
    method.loss(learner, network, learner.rows(learner.items(2)[:3])).backward()
    moved = {name for name, one in network.named_parameters() if one.grad is not None and one.grad.any()}
    blocks = {name.split("soft_prompts.")[1] for name in moved if "soft_prompts" in name}
    assert {name for name in blocks if name.startswith("P.")} == {"P.2"}
    assert any(name.startswith("mlp.") for name in blocks)
    others = {name for name in moved if "soft_prompts" not in name and not name.startswith("classifier.head")}
    assert "router.keys.2" in others
    shared = ("router.down", "router.up", "router.norm", "router.keys.2")
    assert all(name.startswith(shared) for name in others)


@pytest.mark.parametrize("begins", ["last", "nothing"])
def test_a_prompt_begins_as_the_one_before_it_or_as_words(begins: str) -> None:
    learner, method, network = made(init=begins)
    begun(learner, method, 1)
    method.after_task(learner, 0)
    rows = learner.rows(learner.items(1)[:3])
    network.eval()
    with network.use_only(0):
        first = network(rows)
    method.place_adapter(learner, 1)
    with network.use_only(1):
        second = network(rows)
    assert torch.allclose(first, second, atol=1e-9) is (begins == "last")


def states_of(network: SaptNetwork) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_was_interrupted_comes_to_the_same(after: int, tmp_path: Path) -> None:
    def learner_of() -> tuple[Learner, Sapt]:
        method = Sapt(SaptConfig(**SMALL))
        return make_learner(stream(4), method, loaded(), BUDGET, seed=1), method

    whole = run_stream(*learner_of())

    def stop(learner: Learner, learnt: int) -> None:
        if learnt == after:
            raise KeyboardInterrupt

    learner, method = learner_of()
    with pytest.raises(KeyboardInterrupt):
        run_stream(learner, method, folder=tmp_path / "run", on_kept=lambda learnt, _: stop(learner, learnt))
    again = run_stream(*learner_of(), folder=tmp_path / "run", resume=True)
    assert [row["score"] for row in again.rows["matrix"]] == [row["score"] for row in whole.rows["matrix"]]
    for name, value in whole.learner.network.state_dict().items():
        assert torch.equal(again.learner.network.state_dict()[name], value), name


@pytest.mark.exhaustive
def test_the_gate_of_prompts_is_looked_at() -> None:
    method = Sapt(SaptConfig(**SMALL))
    ran = run_stream(make_learner(stream(4), method, loaded(), BUDGET, seed=1), method, gated=1)
    own = [row["value"] for row in ran.rows["gate"] if row["statistic"] == "own_adapter_weight"]
    assert len(own) == 6
    assert all(0 < value <= 1 for value in own)


@pytest.mark.exhaustive
def test_tasks_that_are_noticed_have_prompts_too() -> None:
    method = SaptTaskFree(SaptTaskFreeConfig(**SMALL | {"memory_size": 12, "false_alarm_rate": 0.2}))
    learner = make_learner(stream(6), method, loaded(), BUDGET, seed=1)
    ran = run_stream(learner, method)
    assert len(measure_gate(ran.learner, method, 3, rows=4)) > 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_answers_are_written_behind_prompts(kind: Any) -> None:
    method = Sapt(SaptConfig(**SMALL))
    learner = make_learner(text_stream(2, 2), method, lively(kind), replace(TEXTS, num_epochs=1), seed=1)
    network = run_stream(learner, method).network
    assert isinstance(network, SaptNetwork)
    rows = learner.rows(learner.items(1)[:3])
    together = network.generate(rows, 4)
    for number, item in enumerate(learner.items(1)[:3]):
        alone = network.generate(learner.rows([item]), 4)[0]
        width = min(len(alone), together.shape[1])
        assert torch.equal(together[number, :width], alone[:width])
    with network.pool.disable():
        plain = network.classifier(**{name: rows[name] for name in ("input_ids", "attention_mask", "labels")}).logits
    assert not torch.allclose(network(rows), plain, atol=1e-3)


def test_what_writes_stands_beside_prompts_and_leaves_them() -> None:
    learner, method = small_pseudo.begun(adapter_type="prompt", num_virtual_tokens=2, encoder_hidden_size=4, r=8)
    before = states_of(learner.network_as(SaptNetwork))
    learner.task = 0
    method.before_task(learner, 0)
    generate_inputs(
        small_pseudo.texts(learner), 0, 2, GeneratorTrainingConfig(steps=2, learning_rate=1e-2, batch_size=4)
    )
    after = states_of(learner.network_as(SaptNetwork))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_texts_need_room_behind_prompts() -> None:
    with pytest.raises(UserError, match=r"length: expected texts of at most 7 tokens behind 9 of prompts, got \d+"):
        made(num_virtual_tokens=9)


@pytest.mark.parametrize(
    "said, told",
    [
        ({"r": 4}, "r: expected adapter_type=lora, which reads it, got adapter_type=prompt"),
        ({"top_k": 1}, "top_k: expected adapter_type=lora, which reads it, got adapter_type=prompt"),
        (
            {"adapter_type": "lora"},
            "num_virtual_tokens: expected adapter_type=prompt, which reads it, got adapter_type=lora",
        ),
        ({"adapter_type": "prefix"}, "adapter_type: expected one of lora, prompt, got 'prefix'"),
    ],
)
def test_settings_that_nothing_reads(said: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        SaptConfig(**SMALL | said)
