"""EPI: an adapter a task, and at test the block of the task whose training rows a text is nearest to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.adapters.prompt_pool import embedding_reader
from regard.continual import method
from regard.continual.adapter_network import ROUTED, KnownTask, LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora import LoraMethod
from regard.continual.network import as_float32
from regard.models.classifier import Classifier
from regard.models.heads import pool_states

OTHER_TASK_PENALTY = 1e3
"""What is taken off the logits of classes of tasks that a text is not thought to be of."""


@dataclass(frozen=True, kw_only=True)
class EpiConfig(LoraConfig):
    """Settings of EPI: those of low-rank adapters, and of task identification.

    Args:
        shrinkage: How far the shared covariance, singular for few rows, is moved towards the identity; 0 in the paper,
            which then ignores all that lies outside of the rows' span (docs/results/epi-shrinkage.csv has both).
        known_task: What answers a text whose task is known (TIL): its task's "adapter", or that of the task which the
            "router" finds, as where it is not known (CIL).
    """

    before: ClassVar[Mapping[str, Any]] = ROUTED
    known_task: KnownTask = "adapter"
    shrinkage: method.Fraction = 0.1


class EpiNetwork(PoolNetwork):
    """A frozen model with an adapter for each task, and what is known of each task's texts.

    `means` (task, class, width) of the frozen model's mean states, of those (task, class) that are `known`;
    `covariance` (width, width); `whitening` W with W Wᵀ = its pseudo-inverse; `owned` (task, class): which classes a
    task has. A task from text to text counts as one class.
    """

    by_row = True
    separable = True
    means: Tensor
    known: Tensor
    covariance: Tensor
    whitening: Tensor
    owned: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: EpiConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.reader = (embedding_reader(classifier.encoder)[0],)
        width, classes = self.reader[0].config.hidden_size, len(getattr(classifier.config, "classes", ()))
        self.register_buffer("means", torch.zeros(tasks, max(classes, 1), width))
        self.register_buffer("known", torch.zeros(tasks, max(classes, 1), dtype=torch.bool))
        self.register_buffer("covariance", torch.zeros(width, width))
        self.register_buffer("whitening", torch.zeros(width, width))
        self.register_buffer("owned", torch.zeros(tasks, classes, dtype=torch.bool))
        self.shrinkage: float = config.shrinkage
        self.identified_tasks: Tensor | None = None

    def states(self, rows: dict[str, Tensor]) -> Tensor:
        """Return (row, width): the mean of a text's last states in the frozen model, which has no adapter."""
        inputs = {name: rows[name] for name in ("input_ids", "token_type_ids") if name in rows}
        mask = rows["attention_mask"].bool()
        with self.pool.use_weights(None), torch.no_grad():
            states = self.reader[0](**inputs, attention_mask=mask.long(), return_dict=True).last_hidden_state
        return pool_states(as_float32(states), mask, "mean")

    def distances(self, states: Tensor) -> Tensor:
        """Return (row, task): the squared Mahalanobis distance to the nearest class of each task that is known."""
        num_tasks = int(self.known.any(1).sum())
        differences = (states.double()[:, None, None] - self.means[:num_tasks].double()) @ self.whitening.double()
        return differences.square().sum(-1).masked_fill(~self.known[:num_tasks], torch.inf).amin(-1)

    def identify(self, rows: dict[str, Tensor]) -> Tensor:
        with torch.autocast(rows["input_ids"].device.type, enabled=False):
            return self.distances(self.states(rows)).argmin(-1)

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """One adapter a row (row, adapter): its task's in training, and else that of the task that it is nearest to."""
        count = int(self.count)
        if not count:
            return None
        if not self.training and bool(self.known.any()):
            self.identified_tasks = self.identify(rows)
        else:
            self.identified_tasks = torch.full_like(rows["input_ids"][:, 0], count - 1)
        return torch.nn.functional.one_hot(self.identified_tasks, count).float()

    def kept_tensors(self) -> list[Tensor]:
        return [self.means[self.known], self.covariance]

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        logits = super().forward(rows)
        identified, self.identified_tasks = self.identified_tasks, None
        if self.training or identified is None or not self.owned.shape[1]:
            return logits
        return as_float32(logits).double() - OTHER_TASK_PENALTY * ~self.owned[identified]  # float32 would make ties

    def learn(self, states: Tensor, labels: Tensor, task: int) -> None:
        """Take in what a task's training rows are: states (row, width), and the class of each (row,).

        A task of one row a class tells no covariance: it counts as one that has that of the tasks before it.
        """
        means, covariance = class_statistics(states.double(), labels)
        for index, mean in means.items():
            self.means[task, index], self.known[task, index] = mean.to(self.means), True
        shared = self.covariance.double()
        if covariance.any():
            shared = (shared * task + covariance) / (task + 1)
        self.covariance.copy_(shared)
        self.whitening.copy_(make_whitening(shared, self.shrinkage))


class Epi(LoraMethod):
    """Efficient parameter isolation (EPI; Wang et al., ACL 2023, 2023.acl-long.612): private adapters, tasks found.

    Each task trains an adapter, among its own classes. Afterwards the mean state of its training texts in the frozen
    model is noted for each class, with their covariance, averaged over classes and tasks. A text is answered with the
    adapter and among the classes of the task whose class has the smallest Mahalanobis distance, (e − μ)ᵀ Σ⁺ (e − μ).

    The paper's adapters are prefixes; these are LoRA's. Other tasks' classes in the head are restored after each task.
    """

    Config = EpiConfig
    Network = EpiNetwork
    loss_classes = "task"
    restores_other_classes = True

    def before_task(self, learner: Learner, task: int) -> None:
        super().before_task(learner, task)
        learner.network_as(EpiNetwork).owned.copy_(learner.task_classes)

    def after_task(self, learner: Learner, task: int) -> None:
        network, states, labels = learner.network_as(EpiNetwork), list[Tensor](), list[Tensor]()
        with learner.evaluation_mode(), torch.autocast(learner.device.type, enabled=False):
            for rows in learner.iterate_batches(learner.items(task)):
                states.append(network.states(rows))
                labels.append(rows["labels"] if network.owned.shape[1] else torch.zeros_like(rows["tasks"]))
        network.learn(torch.cat(states), torch.cat(labels), task)


def class_statistics(states: Tensor, labels: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Return each class's mean (width,) by index, and the mean of their covariances; classes of one row have none."""
    means, covariances = dict[int, Tensor](), list[Tensor]()
    for index in labels.unique().tolist():
        class_states = states[labels == index]
        means[index] = class_states.mean(0)
        if len(class_states) > 1:
            deviations = class_states - means[index]
            covariances.append(deviations.T @ deviations / (len(class_states) - 1))
    width = states.shape[1]
    return means, torch.stack(covariances).mean(0) if covariances else states.new_zeros(width, width)


def make_whitening(covariance: Tensor, shrinkage: float = 0.0) -> Tensor:
    """Return W (width, width) with W Wᵀ the pseudo-inverse of a covariance; without any variance the identity."""
    width = len(covariance)
    mean_variance = covariance.diagonal().mean()
    identity = torch.eye(width, dtype=covariance.dtype, device=covariance.device)
    if not mean_variance > 0:
        return identity
    values, vectors = torch.linalg.eigh((1 - shrinkage) * covariance + shrinkage * mean_variance * identity)
    positive = values > width * torch.finfo(torch.float32).eps * values[-1]
    return vectors * torch.where(positive, values.clamp(min=0).rsqrt(), 0.0)
