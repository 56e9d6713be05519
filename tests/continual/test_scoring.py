"""Scores by hand: the highest logit among the task's own classes, and among those seen so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.continual import scoring
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.continual.scoring import score_task, score_training_rows
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

    def knowing(self, task: int) -> None:
        return None


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


def test_training_rows_are_scored_among_the_classes_of_their_task(
    learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, over all rows and over those that are drawn; a class of another task, however likely, is no answer."""
    labels = stream().tasks[1].train.labels
    logits = torch.randn(3, len(labels), 7, generator=torch.Generator().manual_seed(2))
    logits[..., 6] = 9.0
    learner.network = Saying(logits)
    right = [max(range(2, 5), key=lambda c: float(logits[1, row, c])) == label + 2 for row, label in enumerate(labels)]
    assert 0 < sum(right) < len(labels) <= scoring.NUM_TRAINING_ROWS
    assert score_training_rows(learner, 1) == pytest.approx(100 * sum(right) / len(labels))
    monkeypatch.setattr(scoring, "NUM_TRAINING_ROWS", 5)
    drawn = [right[item.row] for item in learner.sample_examples(1, "train", 5)]
    assert score_training_rows(learner, 1) == pytest.approx(100 * sum(drawn) / 5)


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
