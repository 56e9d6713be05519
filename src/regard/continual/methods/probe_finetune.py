"""Probing, then fine-tuning."""

from __future__ import annotations

from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.training_phase import TrainingPhase


class ProbeFinetune(Method):
    """The head alone, then everything (arXiv 2202.10054; the baseline of arXiv 2410.05648).

    A head that fits when the encoder begins to move pulls its features less far from where they were.
    """

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """First the head, then everything."""
        return learner.probing_phase(), learner.fine_tuning_phase()
