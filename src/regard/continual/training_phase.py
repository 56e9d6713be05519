"""What the training of a task is made of: the budget that all methods share, phases, and their batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from torch import nn

from regard.continual.network import Network
from regard.continual.shares import ceil_share
from regard.errors import UserError
from regard.training.placement import Rows

TruncationSide = Literal["right", "middle", "left"]
"""What a prompt that is too long loses: its end, the middle, or what follows its first special tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """What every method of a comparison is given: epochs, rates and batches of each task.

    `probing_…`: of phases that train the head alone. `lr_scheduler_type`: "linear" (to 0 after the last step) or
    "constant" behind the warm-up. `length`, `target_length`: tokens of a text and of an answer at most;
    `truncation_side`: what a prompt that is longer loses. `max_steps`: by a task's name, steps on its own batches in a
    phase at most (replay that is mixed with the task's rows counts, other replay comes besides, and `joint` has no
    limit); `default_max_steps`: those of a task that is not named. `min_steps`: so many in a phase at least, which adds
    epochs to a task of few rows (of `joint` for each task).
    """

    num_epochs: int = 3
    learning_rate: float = 2e-5
    num_probing_epochs: int = 3
    probing_learning_rate: float = 1e-3
    batch_size: int = 32
    micro_batch_size: int | None = None
    length: int = 128
    target_length: int = 50
    truncation_side: TruncationSide = "right"
    lr_scheduler_type: str = "linear"
    warmup_ratio: float = 0.06
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: str = "float32"
    eval_batch_size: int = 64
    max_steps: Mapping[str, int] = field(default_factory=dict)
    default_max_steps: int | None = None
    min_steps: int = 0

    def step_limit(self, task: str) -> int | None:
        """Return the maximum number of steps of a phase on the rows of a task, None without one."""
        return self.max_steps.get(task, self.default_max_steps)


FULL_RATE, ADAPTER_RATE = 1e-4, 1e-3
"""Peak learning rates at the scale of a laptop, of a whole model and of adapters alone (docs/rates.md has runs)."""


class MethodLearningRate(NamedTuple):
    """A learning rate that is not the budget's, and the `option` that sets it, with what stands behind it."""

    option: str
    value: float

    @property
    def option_text(self) -> str:
        """The option with its value, as in "--set learning_rate=0.3"."""
        return f"{self.option}{self.value:g}"


def setting_rate(value: float) -> MethodLearningRate:
    """Return the rate that the setting `learning_rate` of a method says."""
    return MethodLearningRate("--set learning_rate=", value)


def probing_rate(budget: TrainingBudget) -> MethodLearningRate:
    """Return the rate of phases that train the head alone."""
    return MethodLearningRate("--probing-learning-rate ", budget.probing_learning_rate)


def count_warmup_steps(budget: TrainingBudget, steps: int) -> int:
    """Return the steps of linear warm-up of a phase."""
    return ceil_share(budget.warmup_ratio, steps)


TrainedPart = Literal["head", "all"]
LossClasses = Literal["task", "seen"]


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """A part of a task's training, with an optimizer and a schedule of its own.

    `trains`: the head alone, or all that the network lets be trained; `respects_max_steps`: whether the budget's
    limit of the task's steps holds for it; `transform_gradients(network, step)` may change a step's gradient, and
    `lr_multipliers` multiplies the rates of parameters by their names, see `regard.training.loop.train`.
    """

    name: str
    num_epochs: int
    learning_rate: float
    trains: TrainedPart = "all"
    respects_max_steps: bool = True
    transform_gradients: Callable[[nn.Module, int], None] | None = None
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def train_only(network: Network, phase: TrainingPhase) -> Iterator[None]:
    """Freeze for a while what a phase does not train."""
    head_only = phase.trains == "head"
    trainable = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if head_only and not any(map(network.is_head_parameter, trainable)):
        problem = f"stage {phase.name} trains the head alone, and {network.classifier.config.head} has no weights"
        raise UserError(f"head: expected one that can be trained, {problem}")
    frozen = [parameter for name, parameter in trainable.items() if head_only and not network.is_head_parameter(name)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


BATCHES_PER_SORT = 16
"""Batches whose rows are sorted by length with one another."""


class ExampleRef(NamedTuple):
    """A training example of a stream: its task, counted from 0 in their order, and its row."""

    task: int
    row: int


@dataclass(frozen=True)
class Batches:
    """How many steps there are, and the rows of each; a batch is `size` rows, of which some may count for nothing."""

    steps: int
    size: int
    rows: Callable[[int], Rows]


class Epochs:
    """Items in batches, each item once an epoch, the last batch of an epoch shorter; a function of seed and step.

    There are at least `min_steps` and at most `max_steps`, whatever the epochs.
    The order is drawn for each epoch; `BATCHES_PER_SORT` batches at a time are sorted by length and then dealt out.
    """

    def __init__(
        self,
        items: Sequence[ExampleRef],
        lengths: Sequence[int],
        *,
        size: int,
        epochs: int,
        seed: int,
        min_steps: int = 0,
        max_steps: int | None = None,
    ) -> None:
        self.items, self.size, self.seed = list(items), size, seed
        self.lengths = np.asarray(lengths)
        self.per_epoch = -(-len(self.items) // size)
        steps = max(self.per_epoch * epochs, min_steps if epochs and self.items else 0)
        self.steps = steps if max_steps is None else min(steps, max_steps)
        self._epoch, self._batches = -1, list[list[int]]()

    def at(self, step: int) -> list[ExampleRef]:
        """Return the items of a step: `size` of them, or fewer at the end of an epoch."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffle(epoch)
        return [self.items[number] for number in self._batches[index]]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.items))
        batches: list[list[int]] = []
        for start in range(0, len(order), BATCHES_PER_SORT * self.size):
            chunk = order[start : start + BATCHES_PER_SORT * self.size]
            chunk = chunk[np.argsort(self.lengths[chunk], kind="stable")]
            chunk_batches = [chunk[first : first + self.size].tolist() for first in range(0, len(chunk), self.size)]
            batches += [chunk_batches[number] for number in random.permutation(len(chunk_batches))]
        return batches
