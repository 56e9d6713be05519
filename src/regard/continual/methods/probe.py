"""Probing: the encoder stays as it was."""

from __future__ import annotations

from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.training_phase import MethodLearningRate, TrainingBudget, TrainingPhase, probing_rate


class Probe(Method):
    """The head alone is trained, on hidden states that no task changes (arXiv 2410.05648, table 2)."""

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        """That of probing."""
        return probing_rate(budget)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """Return the head, as long as other methods train it and everything."""
        return (learner.probing_phase(),)
