"""Experience replay: examples of earlier tasks among those of the task at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.continual import memory, method
from regard.continual.batches import Batches
from regard.continual.learner import Learner
from regard.continual.training_phase import TrainingPhase

ReplayMode = Literal["batch", "interval", "merge"]


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(memory.MemoryConfig):
    """Settings of experience replay: those of a memory, and how it is mixed with new examples.

    Args:
        replay_mode: "batch" adds stored examples to each batch, "interval" follows each `replay_interval` batches by
            one of the memory alone, "merge" joins both into one training set.
        replay_interval: Number of new batches for each replayed one, with "interval".
    """

    replay_mode: ReplayMode = "batch"
    replay_interval: method.PositiveInt = 100


class Replay(memory.MemoryMethod):
    """Experience replay, ER: each new batch with one from a memory (arXiv 1902.10486); or sparse (arXiv 1906.01076).

    The memory takes in a task's examples when the task has been learnt, so that what is replayed is of earlier tasks.
    The loss is the mean over new and old rows alike, each over the classes of its own task. Sparse replay, mixing
    `replay_interval`, is one batch of the memory in 100 by default, the paper's rate: runs of fewer steps replay
    nothing then.
    """

    Config = ReplayConfig
    supports_text = True

    def batches(self, learner: Learner, task: int, phase: TrainingPhase) -> Batches:
        if not self.state.examples:
            return super().batches(learner, task, phase)
        if self.config.replay_mode == "merge":
            return learner.epoch_batches([*learner.items(task), *self.state.examples], phase)
        if self.config.replay_mode == "interval":
            interval = self.config.replay_interval
            return memory.replay_at_intervals(learner, self.state, self.config, task, phase, interval=interval)
        return memory.replay_in_batches(learner, self.state, self.config, task, phase)
