"""Experience replay, dark experience replay (DER++), and no step that would make the memory's loss grow (A-GEM)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.continual import memory, method
from regard.continual.learner import Learner, row_losses
from regard.continual.network import as_float32
from regard.continual.training_phase import Batches, ExampleRef, TrainingPhase
from regard.training.placement import Rows, isolated_rng, seed_step

ReplayMode = Literal["batch", "interval", "merge"]


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(memory.MemoryConfig):
    """Settings of experience replay: those of a memory, and how it is mixed with new examples.

    `replay_mode`: "batch" adds stored examples to each batch, "interval" follows each `replay_interval` batches by one
    of the memory alone, "merge" joins both into one training set.
    """

    conditions: ClassVar[Mapping[str, tuple[method.RequiredSetting, ...]]] = {
        "replay_interval": (method.RequiredSetting("replay_mode", ("interval",)),),
        "replay_batch_size": (method.RequiredSetting("replay_mode", ("batch", "interval")),),
    }
    replay_mode: ReplayMode = "batch"
    replay_interval: method.PositiveInt = 100


class Replay(memory.MemoryMethod):
    """Experience replay, ER: each new batch with one from a memory (arXiv 1902.10486); or sparse (arXiv 1906.01076).

    The memory takes in a task's examples when the task has been learnt. The loss is the mean over new and old rows
    alike. With `replay_interval` 100, the paper's rate, runs of fewer steps replay nothing.
    """

    Config = ReplayConfig
    supports_text = True

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        if self.config.replay_mode == "merge":
            return learner.epoch_batches([*learner.items(task), *self.state.examples], phase)
        interval = self.config.replay_interval if self.config.replay_mode == "interval" else None
        return self.replay_batches(learner, task, phase, interval=interval)


@dataclass(frozen=True, kw_only=True)
class DarkExperienceConfig(memory.MemoryConfig):
    """Settings of DER++: those of a memory, and the weights of stored logits (`alpha`) and labels (`beta`)."""

    alpha: method.NonNegative = 0.1
    beta: method.NonNegative = 0.5


class DarkExperience(memory.MemoryMethod):
    """DER++ (arXiv 2004.07211, equation 6 and algorithm 2).

    The loss of a step is the mean cross-entropy of the new rows, plus alpha times the mean distance of the logits of a
    batch of the memory to those stored with it, plus beta times the mean cross-entropy of another batch of the memory.
    The distance is the mean square over the classes of the row's own task, so that alpha means the same for any number.
    The paper's reservoir takes in rows and logits while a task is being learnt; here they are stored afterwards, in
    evaluation mode.
    """

    can_continue = False
    Config = DarkExperienceConfig

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        if not self.state.examples:
            return super().batches(learner, task, phase)
        new = learner.schedule(learner.items(task), phase)
        count = min(self.config.replay_batch_size or learner.budget.batch_size, len(self.state.examples))
        size = learner.batch_size(min(learner.budget.batch_size, len(new.items)) + 2 * count)
        seeds = [learner.seed_for("replay", name, task) for name in ("logits", "labels")]

        def rows(step: int) -> Rows:
            dark, old = (memory.sample_memory(self.state.examples, count, seed=seed, step=step) for seed in seeds)
            return self._rows(learner, new.at(step), dark, old, size)

        return Batches(new.steps, size, rows)

    def _rows(
        self, learner: Learner, new: list[ExampleRef], dark: list[ExampleRef], old: list[ExampleRef], size: int
    ) -> Rows:
        """Return the batch of a step, with the `weight` of cross-entropies and the `pull` to stored `logits`."""
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
        losses = row_losses(learner.mask_logits(logits, rows["tasks"]), rows["labels"])
        task_classes = learner.task_classes.to(logits.device)[rows["tasks"]]
        distances = mean_square_distance(logits[:, : task_classes.shape[1]], rows["logits"], task_classes)
        return (rows["weight"] * losses + rows["pull"] * distances).sum()

    def after_task(self, learner: Learner, task: int) -> None:
        with learner.evaluation_mode() as network, torch.no_grad():
            memory.store_with(learner, self.state, self.config, task, "logits", lambda rows: as_float32(network(rows)))


def mean_square_distance(logits: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Return the mean square difference of logits (row, class) over each row's `classes` classes: (row,)."""
    return ((logits - target).square() * classes).sum(-1) / classes.sum(-1)


@dataclass(frozen=True, kw_only=True)
class AGemConfig(memory.MemoryConfig):
    """Settings of A-GEM: those of a memory, which is balanced as in the paper."""

    storage_policy: memory.StoragePolicy = "balanced"


class AGem(memory.MemoryMethod):
    """A-GEM (arXiv 1812.00420, equation 11): a gradient that points against the memory's is projected.

    The memory's gradient r is that of the mean loss, with dropout, of a batch drawn from it at each step; g becomes
    g − (g·r / r·r) r where g·r < 0. Adam's step, made of what is left, is not itself orthogonal to r.
    """

    Config = AGemConfig
    supports_text = True

    def phases(self, learner: Learner, task: int) -> tuple[TrainingPhase, ...]:
        transform = partial(self._transform_gradients, learner) if self.state.examples else None
        return (learner.fine_tuning_phase(transform_gradients=transform),)

    def _transform_gradients(self, learner: Learner, network: nn.Module, step: int) -> None:
        """Project on what does not go against the gradient of the memory's mean loss, the same in every process."""
        parameters = [parameter for parameter in network.parameters() if parameter.grad is not None]
        seed, count = learner.seed_for("replay", learner.task), self.config.replay_batch_size
        count = count or learner.budget.batch_size
        items = memory.sample_memory(self.state.examples, count, seed=seed, step=step)
        reference = [torch.zeros_like(parameter) for parameter in parameters]
        with isolated_rng(learner.device):
            seed_step(learner.device, seed, step, 0)
            for rows in learner.iterate_batches(items, size=learner.budget.micro_batch_size or len(items)):
                with learner.autocast():
                    loss = learner.cross_entropy(network(rows), rows) / len(items)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                for total, gradient in zip(reference, gradients, strict=True):
                    total += gradient
        project_gradient([parameter.grad for parameter in parameters if parameter.grad is not None], reference)


@torch.no_grad()
def project_gradient(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Take out of a gradient, in place, its part along a reference that it points against (the paper's equation 11)."""
    dot = sum(float((part * reference_part).sum()) for part, reference_part in zip(gradient, reference, strict=True))
    square = sum(float(part.square().sum()) for part in reference)
    if dot < 0 and square > 0:
        for part, reference_part in zip(gradient, reference, strict=True):
            part -= (dot / square) * reference_part
