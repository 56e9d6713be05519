"""Incremental LoRA: a new block for each task, those of earlier tasks frozen and added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.method import Method

if TYPE_CHECKING:
    from regard.continual.learner import Learner


class IncrementalLora(Method):
    """A LoRA block a task, all of them added with weight 1: IncLoRA, a baseline of O-LoRA and SAPT (arXiv 2401.08295).

    While a task is trained, and ever after, a row goes through its block and those of all earlier tasks, which are
    frozen. A later block changes what earlier tasks' rows become, and nothing is done about that.
    """

    Config = LoraConfig
    Network = PoolNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Add the task's block, and freeze the others."""
        learner.network_as(PoolNetwork).start_adapter(task)
