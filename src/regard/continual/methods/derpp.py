"""Dark experience replay: examples of earlier tasks with the logits that they had."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.continual import memory, method
from regard.continual.batches import Batches, ExampleRef
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.training_phase import TrainingPhase
from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class DarkExperienceConfig(memory.MemoryConfig):
    """Settings of DER++: those of a memory, and the weights of its two losses.

    Args:
        alpha: Weight of the distance to stored logits.
        beta: Weight of the cross-entropy of replayed examples.
    """

    alpha: method.NonNegative = 0.1
    beta: method.NonNegative = 0.5


class DarkExperience(memory.MemoryMethod):
    """DER++ (arXiv 2004.07211, equation 6 and algorithm 2).

    The loss of a step is the mean cross-entropy of the new rows, plus alpha times the mean distance of the logits of a
    batch of the memory to those stored with it, plus beta times the mean cross-entropy of another batch of the memory.
    The distance is the mean square over the classes of the row's own task: those alone are compared in training, and
    alpha means the same for tasks of few classes and of many.

    Unlike in the paper, whose reservoir takes in rows and logits while a task is being learnt, here they are stored, in
    evaluation mode, when it has been: so that the batch of a step is a function of the step, whichever process asks for
    it and wherever a run was resumed.
    """

    Config = DarkExperienceConfig

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        if not self.state.examples:
            return super().batches(learner, task, phase)
        new, count = memory.schedule_task(learner, task, phase), memory.replay_batch_size(learner, self.config)
        size = learner.budget.batch_size + 2 * count
        seeds = [learner.seed_for("replay", name, task) for name in ("logits", "labels")]

        def rows(step: int) -> Rows:
            dark, old = (memory.sample_memory(self.state.examples, count, seed=seed, step=step) for seed in seeds)
            return self._rows(learner, new.at(step), dark, old, size)

        return Batches(new.steps, size, rows)

    def _rows(
        self, learner: Learner, new: list[ExampleRef], dark: list[ExampleRef], old: list[ExampleRef], size: int
    ) -> Rows:
        """Return the batch of a step, each row with its `weight` in the cross-entropy, its `pull` to stored `logits`.

        The loop divides by how many rows count: weights make of that sum the means of the three parts.
        """
        items = [*new, *dark, *old]
        rows = learner.rows(items, size=size)
        sources = torch.tensor([0] * len(new) + [1] * len(dark) + [2] * len(old) + [3] * (size - len(items)))
        stored_logits = self.state.tensors["logits"]
        logits = torch.zeros(size, stored_logits.shape[1], dtype=stored_logits.dtype)
        position = {item: index for index, item in enumerate(self.state.examples)}
        logits[sources == 1] = stored_logits[[position[item] for item in dark]]
        weight = torch.tensor([1 / len(new), 0.0, self.config.beta / len(old), 0.0])
        pull = torch.tensor([0.0, self.config.alpha / len(dark), 0.0, 0.0])
        return {**rows, "logits": logits, "weight": len(items) * weight[sources], "pull": len(items) * pull[sources]}

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        if "pull" not in rows:
            return super().loss(learner, network, rows)
        logits = network(rows)
        losses = nn.functional.cross_entropy(
            learner.mask_logits(logits, rows["tasks"]), rows["labels"], ignore_index=IGNORE_INDEX, reduction="none"
        )
        task_classes = learner.task_classes.to(logits.device)[rows["tasks"]]
        distances = mean_square_distance(logits[:, : task_classes.shape[1]], rows["logits"], task_classes)
        return (rows["weight"] * losses + rows["pull"] * distances).sum()

    def after_task(self, learner: Learner, task: int) -> None:
        def compute(rows: Rows) -> Tensor:
            logits = learner.network(rows)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        with learner.evaluation_mode(), torch.no_grad():
            memory.store_with(learner, self.state, self.config, task, "logits", compute)


def mean_square_distance(logits: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Return the mean square difference of logits (row, class) over each row's `classes` classes: (row,)."""
    return ((logits - target).square() * classes).sum(-1) / classes.sum(-1)
