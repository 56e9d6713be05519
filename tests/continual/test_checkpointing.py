"""Gradient checkpointing of Transformers: what it computes again has the adapters that it had, so nothing changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.continual.run import make_learner, run_stream
from regard.errors import UserError
from regard.models import heads
from tests.continual.small_tasks import BUDGET, loaded, stream
from tests.continual.together import made as made_small


def learnt(method: str, monkeypatch: pytest.MonkeyPatch, **checkpointing: Any) -> dict[str, Tensor]:
    """The weights after three tasks, in float64 and without dropout."""
    made = heads.make_head
    monkeypatch.setattr(heads, "make_head", lambda *given, **options: made(*given, **{**options, "dropout": 0.0}))
    model = loaded(dropout=0.0, dtype=torch.float64)
    if checkpointing:
        enable = getattr(model.model, "activation_checkpointing_enable", model.model.gradient_checkpointing_enable)
        enable(checkpointing)
    learner = make_learner(stream(4), made_small(method), model, BUDGET, seed=1)
    run_stream(learner, made_small(method))
    return learner.network.state_dict()


@pytest.mark.every_value  # ways to hold what a forward had
@pytest.mark.parametrize("method", ["sapt", "o-lora", "epi", "ctr"])
def test_nothing_changes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = (learnt(method, monkeypatch, **options) for options in ({}, {"use_reentrant": False}))
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_the_reentrant_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^gradient checkpointing: expected use_reentrant=False, got True$"):
        learnt("sapt", monkeypatch, use_reentrant=True)
