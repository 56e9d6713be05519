"""SLAO, GainLoRA and OSF on tasks from text to text: they learn, and nothing but what is theirs changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import collect_tensors
from tests.continual.methods.adapter_networks import copied, moved
from tests.continual.small_text_tasks import BUDGET, lively, stream

OWN = {
    "slao": (".adapters.", "count"),
    "gainlora": (".adapters.", "count", "change.", "free_", "down", "up", "key"),
    "osf": (".kept", ".U", ".S", ".V"),
}
SMALL: dict[str, dict[str, Any]] = {
    "slao": {"r": 2, "lora_alpha": 4.0},
    "gainlora": {"r": 2, "lora_alpha": 4.0, "gate_hidden_size": 5, "threshold": 0.5},
    "osf": {},
}


pytestmark = pytest.mark.usefixtures("without_flops")


def learnt(name: str, kind: Any, micro_batch: int | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after two tasks, in float64."""
    method = METHODS[name](METHODS[name].Config.parse(SMALL[name]))
    learner = make_learner(
        stream(2, 2), method, lively(kind), replace(BUDGET, num_epochs=1, micro_batch_size=micro_batch), seed=1
    )
    learner.network.double()
    before = copied(learner)
    return before, collect_tensors(run_stream(learner, method).network)


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("name", OWN)
def test_texts_are_learnt_by_what_is_theirs_however_batches_are_split(name: str, kind: Any) -> None:
    assert METHODS[name].supports_text
    before, after = learnt(name, kind)
    changed = moved({key: before[key] for key in after}, after)
    assert changed
    assert all(any(part in one for part in OWN[name]) for one in changed)
    _, split = learnt(name, kind, micro_batch=3)
    for key, value in after.items():
        torch.testing.assert_close(split[key], value, rtol=0, atol=1e-9)
