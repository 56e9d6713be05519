"""A bounded memory of training examples: which are kept from task to task, and which are drawn from it at a step."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.continual import method
from regard.continual.learner import Learner
from regard.continual.method import MethodState
from regard.continual.training_phase import Batches, ExampleRef, TrainingPhase
from regard.training.placement import Rows

StoragePolicy = Literal["reservoir", "balanced"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(method.MethodConfig):
    """Settings of every method with an episodic memory.

    Args:
        memory_size: Number of examples stored, of all tasks together.
        storage_policy: "reservoir" (a uniform sample of all so far) or "balanced" over classes and tasks.
        replay_batch_size: Examples drawn from the memory in a step; 0 for as many as the batch has.
    """

    memory_size: method.PositiveInt = 50
    storage_policy: StoragePolicy = "reservoir"
    replay_batch_size: method.NonNegativeInt = 0


def store_examples(learner: Learner, state: MethodState, config: MemoryConfig, task: int) -> None:
    """Store a task's training examples in `state.examples`."""
    new_examples = learner.items(task)
    random = np.random.default_rng(learner.seed_for("memory", task))
    if config.storage_policy == "reservoir":
        num_seen = state.values.get("seen", 0)
        limits = {"seen": num_seen, "capacity": config.memory_size}
        state.examples = update_reservoir(state.examples, new_examples, **limits, draw=random.integers)
        state.values["seen"] = num_seen + len(new_examples)
    else:
        mixed = [new_examples[number] for number in random.permutation(len(new_examples))]

        def label_of(item: ExampleRef) -> tuple[int, int]:
            return item.task, int(learner.encoded[item.task, "train"].labels[item.row])

        state.examples = balance_groups([*state.examples, *mixed], capacity=config.memory_size, group=label_of)


def store_with(
    learner: Learner, state: MethodState, config: MemoryConfig, task: int, name: str, compute: Callable[[Rows], Tensor]
) -> None:
    """Store a task's training examples, and in `state.tensors[name]` what is computed of each row when it comes in."""
    previous = dict(zip(state.examples, state.tensors.get(name, ()), strict=True))
    store_examples(learner, state, config, task)
    new = [item for item in state.examples if item not in previous]
    values = [value for rows in learner.iterate_batches(new) for value in compute(rows).cpu()]
    value_of = previous | dict(zip(new, values, strict=True))
    state.tensors[name] = torch.stack([value_of[item] for item in state.examples])


def update_reservoir(
    stored: Sequence[ExampleRef],
    new_examples: Sequence[ExampleRef],
    *,
    seen: int,
    capacity: int,
    draw: Callable[[int], int],
) -> list[ExampleRef]:
    """Update a reservoir of `seen` examples with equal probability, `draw(n)` from 0 to n − 1 (R of Vitter 1985)."""
    memory = list(stored)
    for index, item in enumerate(new_examples, start=seen):
        if index < capacity:
            memory.append(item)
            continue
        slot = draw(index + 1)
        if slot < capacity:
            memory[slot] = item
    return memory


def balance_groups(
    items: Sequence[ExampleRef], *, capacity: int, group: Callable[[ExampleRef], Hashable]
) -> list[ExampleRef]:
    """Return the first examples of each group, equally many of each, or all of a smaller one; see `allocate`."""
    groups: dict[Hashable, list[ExampleRef]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    counts = allocate([len(members) for members in groups.values()], capacity)
    return [item for members, count in zip(groups.values(), counts, strict=True) for item in members[:count]]


def allocate(sizes: Sequence[int], capacity: int) -> list[int]:
    """Divide a capacity among groups one at a time, each up to its size."""
    counts = [0] * len(sizes)
    turns = (index for turn in range(max(sizes, default=0)) for index, size in enumerate(sizes) if turn < size)
    for index in islice(turns, capacity):
        counts[index] += 1
    return counts


class MemoryMethod(method.Method):
    """A method that stores examples of each task after training."""

    Config = MemoryConfig

    @property
    def memory_size(self) -> int:
        return int(self.config.memory_size)

    def after_task(self, learner: Learner, task: int) -> None:
        store_examples(learner, self.state, self.config, task)

    def replay_batches(
        self, learner: Learner, task: int, phase: TrainingPhase, *, interval: int | None = None
    ) -> Batches:
        """Return the task's batches, each with examples of the memory (arXiv 1902.10486), if there are any.

        With an `interval`, batches of the memory alone follow each so many of the task (arXiv 1906.01076).
        """
        if not self.state.examples:
            return super().batches(learner, task, phase)
        new = learner.schedule(learner.items(task), phase)
        count = min(self.config.replay_batch_size or learner.budget.batch_size, len(self.state.examples))
        counts = min(learner.budget.batch_size, len(new.items)), count
        size = learner.batch_size(sum(counts) if interval is None else max(counts))
        sample = partial(sample_memory, list(self.state.examples), count, seed=learner.seed_for("replay", task))

        def rows(step: int) -> Rows:
            if interval is None:
                return learner.rows([*new.at(step), *sample(step=step)], size=size)
            rounds, position = divmod(step, interval + 1)
            items = sample(step=step) if position == interval else new.at(rounds * interval + position)
            return learner.rows(items, size=size)

        return Batches(new.steps if interval is None else new.steps + new.steps // interval, size, rows)


def sample_memory(items: Sequence[ExampleRef], count: int, *, seed: int, step: int) -> list[ExampleRef]:
    """Sample `count` different examples, or all of a smaller memory; a function of seed and step."""
    random = np.random.default_rng([seed, step])
    return [items[number] for number in random.choice(len(items), min(count, len(items)), replace=False)]
