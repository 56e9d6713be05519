"""A model for each task: what is reached where nothing can be forgotten, or carried over."""

from __future__ import annotations

from regard.continual.learner import Learner
from regard.continual.method import Method


class Separate(Method):
    """Fine-tuning that begins anew with each task.

    Each task is scored by its own model alone, whose score later tasks do not change; classes of several tasks are
    never told apart, whatever the head.
    """

    loss_classes = "task"
    evaluation_scope = "own"
    incremental = False
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Put the network back to where the run began."""
        learner.network.load_state_dict(learner.start)
