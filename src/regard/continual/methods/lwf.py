"""Learning without forgetting: on the new task's texts the network keeps answering for old tasks as it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from regard.continual import method
from regard.continual.learner import IGNORE_INDEX, Learner
from regard.continual.training_phase import TrainingPhase
from regard.training.placement import Rows


@dataclass(frozen=True, kw_only=True)
class LwfConfig(method.MethodConfig):
    """Settings of LwF.

    Args:
        temperature: T, which logits are divided by before they are compared.
        distillation_weight: λ_o, weight of the losses of earlier tasks.
        warmup_head: Train the head of a new task alone first, as in the paper; off, to separate the method from
            probing.
    """

    temperature: Annotated[float, method.Range(1e-6)] = 2.0
    distillation_weight: method.NonNegative = 1.0
    warmup_head: bool = False


class Lwf(method.Method):
    """Learning without forgetting (arXiv 1606.09282, equations 1 to 5).

    Before a task the network, in evaluation, answers its training texts over the classes of each old task. In training
    the cross-entropy between these answers and the present ones, both at temperature T, is added for each old task:
    −Σ_c y'_c log ŷ'_c with y' = softmax(logits / T). A resumed run makes the answers anew, from the same weights.
    """

    Config = LwfConfig

    def before_task(self, learner: Learner, task: int) -> None:
        if not task:
            return
        with learner.evaluation_mode() as network, torch.no_grad():
            self.answers = torch.cat([network(rows).float() for rows in learner.iterate_batches(learner.items(task))])

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        warming = (learner.probing_phase(name="warm-up"),) if self.config.warmup_head and task else ()
        return (*warming, learner.fine_tuning_phase())

    def loss(self, learner: Learner, network: nn.Module, rows: Rows) -> Tensor:
        logits = network(rows)
        loss = learner.cross_entropy(logits, rows)
        is_warmup = not any(parameter.requires_grad for parameter in learner.network.classifier.encoder.parameters())
        if not learner.task or is_warmup:  # in the warm-up the vectors of old classes are to get no gradient
            return loss
        now, earlier = logits[:, : learner.task_classes.shape[1]], self.answers[rows["rows"]]
        old_losses = sum(
            distillation_losses(now[:, task_classes], earlier[:, task_classes], self.config.temperature)
            for task_classes in learner.task_classes[: learner.task].to(logits.device)
        )
        return loss + self.config.distillation_weight * (old_losses * (rows["labels"] != IGNORE_INDEX)).sum()


def distillation_losses(logits: Tensor, earlier: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy (row,) of answers with earlier ones, of logits (row, class), at a temperature."""
    return -((earlier / temperature).softmax(-1) * (logits.float() / temperature).log_softmax(-1)).sum(-1)
