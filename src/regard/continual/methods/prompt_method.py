"""What methods that train prompts have in common: a rate of their own, and one phase."""

from __future__ import annotations

from regard.continual import method
from regard.continual.learner import Learner
from regard.continual.training_phase import MethodLearningRate, TrainingBudget, TrainingPhase, setting_rate


class PromptMethod(method.Method):
    """A method that trains prompts, and the head, for the budget's epochs at the rate of its settings."""

    def own_learning_rate(self, budget: TrainingBudget) -> MethodLearningRate:
        return setting_rate(self.config.learning_rate)

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        return (learner.fine_tuning_phase(name="prompting", learning_rate=self.config.learning_rate),)
