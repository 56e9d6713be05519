"""LoRA adapters on which nothing is done against forgetting: one for all tasks, one a task, or one with replay."""

from __future__ import annotations

from dataclasses import dataclass

from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import replay


class LoraMethod(Method):
    """A method that trains the low-rank adapter of the task at hand."""

    Config = LoraConfig
    Network = PoolNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Train the task's adapter, and freeze the others."""
        learner.network_as(PoolNetwork).start_adapter(task)


class IncrementalLora(LoraMethod):
    """Incremental LoRA: one adapter a task, all added with weight 1; a baseline of O-LoRA and SAPT (arXiv 2401.08295).

    In training and afterwards, a row passes through its task's adapter and those of all earlier tasks, which are
    frozen. A later adapter changes what earlier tasks' rows become, and nothing is done about that.
    """


class SharedAdapterNetwork(PoolNetwork):
    """A frozen model with one adapter, whatever the number of tasks."""

    def count_adapters(self, tasks: int) -> int:
        return 1

    def start_adapter(self, adapter: int) -> None:
        super().start_adapter(0)


class SequentialLora(LoraMethod):
    """One LoRA adapter (arXiv 2106.09685) trained on every task in turn: SeqLoRA of SAPT (arXiv 2401.08295).

    Nothing holds the adapter where an earlier task left it, so this is what methods with adapters are measured against.
    """

    Network = SharedAdapterNetwork


@dataclass(frozen=True, kw_only=True)
class ReplayLoraConfig(replay.ReplayConfig, LoraConfig):
    """Settings of experience replay with a low-rank adapter."""


class ReplayLora(replay.Replay, LoraMethod):
    """Experience replay (arXiv 1902.10486) where one LoRA adapter is trained: a baseline of SAPT (arXiv 2401.08295)."""

    Config = ReplayLoraConfig
    Network = SharedAdapterNetwork
