"""Scores by hand: the highest logit among the task's own classes, and among those seen so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.continual.scoring import score_task
from tests.continual.small_tasks import BUDGET, loaded, stream


class Saying(nn.Module):
    """Logits (task, row, class) that were written down."""

    known_answers = None

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        assert not self.training
        return self.logits[rows["tasks"], rows["rows"]]

    def annotate(self, rows: dict[str, Tensor], split: str) -> dict[str, Tensor]:
        return rows


@pytest.fixture
def learner() -> Any:
    return make_learner(stream(), METHODS["finetune"](), loaded(), BUDGET, seed=1)


@pytest.mark.parametrize("split, rows", [("test", 12), ("dev", 9)])
def test_by_hand(split: Any, rows: int, learner: Any) -> None:
    logits = torch.randn(3, rows, 7, generator=torch.Generator().manual_seed(2))
    learner.network = Saying(logits)
    labels = stream().tasks[1].split(split).labels
    own = [max(range(2, 5), key=lambda c: float(logits[1, row, c])) == label + 2 for row, label in enumerate(labels)]
    for learnt, classes in ((1, 2), (2, 5), (3, 7)):
        seen = [
            max(range(classes), key=lambda c: float(logits[1, row, c])) == label + 2 for row, label in enumerate(labels)
        ]
        found = score_task(learner, 1, tasks_trained=learnt, split=split)
        assert found.til == pytest.approx(100 * sum(own) / rows, rel=1e-6)
        assert found.cil == pytest.approx(100 * sum(seen) / rows, rel=1e-6)
        assert found.n == rows
        assert found.right == {"til": tuple(own), "cil": tuple(seen)}
    assert 0 < sum(own) < rows


def test_all_right_and_all_wrong(learner: Any) -> None:
    labels = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]).expand(3, -1)
    right = torch.nn.functional.one_hot(labels, 7).float()
    learner.network = Saying(right)
    assert score_task(learner, 0, tasks_trained=3) == score_task(learner, 0, tasks_trained=1)
    assert (score_task(learner, 0, tasks_trained=1).til, score_task(learner, 0, tasks_trained=1).cil) == (100.0, 100.0)
    right[..., 6] = 2.0  # a class of the last task, which is not yet known
    assert score_task(learner, 0, tasks_trained=2).cil == 100.0
    assert score_task(learner, 0, tasks_trained=3).cil == 0.0
    assert score_task(learner, 0, tasks_trained=3).til == 100.0
    learner.network = Saying(-right)
    assert score_task(learner, 0, tasks_trained=3).til == 0.0
