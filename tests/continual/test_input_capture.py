"""What adapted layers read: real tokens of rows that count, whichever model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.continual.adapter_network import PoolNetwork, capture_layer_inputs
from regard.continual.learner import Learner
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from tests.continual import small_tasks, small_text_tasks

Seen = dict[str, list[Tensor]]


def seen(learner: Learner, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each layer reads, (token, inputs)."""
    found: Seen = {}
    network = learner.network_as(PoolNetwork)
    network.eval()
    with (
        torch.no_grad(),
        capture_layer_inputs(network, rows, lambda name, states: found.setdefault(name, []).append(states)),
    ):
        network(rows)
    assert not any(layer._forward_pre_hooks for layer in network.pool.layers.values())
    return {name: torch.cat(parts) for name, parts in found.items()}


def classifying() -> Learner:
    method = METHODS["sequential-lora"]()
    return make_learner(
        small_tasks.stream(), method, small_tasks.loaded(dtype=torch.float64), small_tasks.BUDGET, seed=1
    )


def writing(kind: Any, targets: str = "auto") -> Learner:
    method = METHODS["sequential-lora"](METHODS["sequential-lora"].Config.parse({"target_modules": targets}))
    return make_learner(
        small_text_tasks.stream(), method, small_text_tasks.lively(kind), small_text_tasks.BUDGET, seed=1
    )


def test_padding_and_rows_that_count_for_nothing_are_left_out() -> None:
    learner = classifying()
    items = learner.items(0)[:5]
    rows = learner.rows(items, size=7)
    assert not rows["attention_mask"].all()
    for states in seen(learner, rows).values():
        assert states.shape == (sum(learner.length(item) for item in items), 16)


def test_rows_together_are_read_as_each_alone() -> None:
    learner = classifying()
    items = learner.items(0)[:5]
    alone = [seen(learner, learner.rows([item])) for item in items]
    for name, states in seen(learner, learner.rows(items)).items():
        torch.testing.assert_close(states, torch.cat([one[name] for one in alone]), rtol=0, atol=1e-12)


def test_no_gradient_flows_from_what_is_seen() -> None:
    learner, found = classifying(), list[Tensor]()
    rows = learner.rows(learner.items(0)[:2])
    with capture_layer_inputs(learner.network_as(PoolNetwork), rows, lambda _, states: found.append(states)):
        learner.network(rows)
    assert found
    assert not any(states.requires_grad for states in found)


@pytest.mark.parametrize(
    "kind, targets",
    [("t5", "q,k,v"), ("bart", "q_proj,v_proj"), ("llama", "auto"), ("gpt2", "auto"), ("regard", "auto")],
)
def test_of_texts_each_layer_reads_prompts_or_answers_as_when_alone(kind: str, targets: str) -> None:
    learner = writing(kind, targets)
    items = [*learner.items(0)[:3], *learner.items(2)[:2]]
    alone = [seen(learner, learner.rows([item])) for item in items]
    rows = learner.rows(items, size=6)
    prompts, answers = int(rows["attention_mask"][:5].sum()), int((rows["labels"] != -100).sum())
    counts = set()
    for name, states in seen(learner, rows).items():
        torch.testing.assert_close(states, torch.cat([one[name] for one in alone]), rtol=0, atol=1e-9)
        counts.add(len(states))
    assert counts == ({prompts, answers} if kind in ("t5", "bart") else {prompts + answers})
    assert prompts != answers


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_head_reads_what_answers_are_predicted_from(kind: str) -> None:
    """The decoder's states behind an encoder, else those of the last prompt token and of the answers but padding."""
    learner = writing(kind, "lm_head")
    rows = learner.rows(learner.items(0)[:3], size=4)
    answers = int((rows["labels"] != -100).sum())
    (states,) = seen(learner, rows).values()
    assert len(states) == answers + (0 if kind == "t5" else 3)


def test_cross_attention_reads_prompts_by_its_keys_and_answers_by_its_queries() -> None:
    learner = writing("t5", "q,k,v")
    rows = learner.rows(learner.items(0)[:3])
    prompts, answers = int(rows["attention_mask"].sum()), int((rows["labels"] != -100).sum())
    for name, states in seen(learner, rows).items():
        crossing = "EncDecAttention" in name and not name.endswith(".q")
        assert len(states) == (prompts if crossing or name.startswith("encoder.") else answers), name
