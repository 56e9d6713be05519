"""Methods with blocks on tasks from text to text: they learn, and nothing but their blocks changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors
from tests.continual.methods.adapter_networks import copied, made, moved
from tests.continual.small_text_tasks import BUDGET, lively, stream

NAMES = ("sequential-lora", "incremental-lora", "replay-lora", "o-lora", "n-lora", "inflora", "migu")
SAID: dict[str, dict[str, Any]] = {"replay-lora": {"memory_size": 4}, "inflora": {"threshold": 0.5}}


pytestmark = pytest.mark.usefixtures("without_flops")


def learnt(name: str, kind: Any, micro_batch: int | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after two tasks, in float64."""
    method = made(name, **SAID.get(name, {}))
    budget = replace(BUDGET, num_epochs=1, micro_batch_size=micro_batch)
    learner = make_learner(stream(2, 2), method, lively(kind), budget, seed=1)
    learner.network.double()
    before = copied(learner)
    return before, collect_tensors(run_stream(learner, method).network)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_learnt_by_the_blocks_alone(name: str) -> None:
    assert METHODS[name].supports_text
    before, after = learnt(name, "t5")
    changed = {one for one in moved({key: before[key] for key in after}, after) if one != "count"}
    assert changed
    assert all(".adapters." in one for one in changed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, kind", [("o-lora", "t5"), ("n-lora", "t5"), ("migu", "t5"), ("migu", "llama")])
def test_how_batches_are_split_does_not_matter(name: str, kind: str) -> None:
    _, after = learnt(name, kind)
    _, split = learnt(name, kind, micro_batch=3)
    for key, value in after.items():
        torch.testing.assert_close(split[key], value, rtol=0, atol=1e-9)
