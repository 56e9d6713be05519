"""All tasks at once: what continual learning is held against."""

from __future__ import annotations

from regard.continual.batches import Batches
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.training_phase import TrainingPhase


class Joint(Method):
    """Fine-tuning on the rows of all tasks together, each row's loss over the classes of its own task.

    With a label-text head it is over those of all tasks. It learns when the last task is there, and is scored then.
    """

    evaluation_scope = "end"
    supports_text = True

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        """Nothing until the last task."""
        return (learner.fine_tuning_phase(respects_max_steps=False),) if task == len(learner.stream) - 1 else ()

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        """Return the training rows of all tasks, mixed."""
        return learner.epoch_batches([item for number in range(task + 1) for item in learner.items(number)], phase)
