"""Incremental LoRA: a new adapter for each task, those of earlier tasks frozen and added."""

from __future__ import annotations

from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.method import Method


class IncrementalLora(Method):
    """Incremental LoRA: one adapter a task, all added with weight 1; a baseline of O-LoRA and SAPT (arXiv 2401.08295).

    In training and afterwards, a row passes through its task's adapter and those of all earlier tasks, which are
    frozen. A later adapter changes what earlier tasks' rows become, and nothing is done about that.
    """

    Config = LoraConfig
    Network = PoolNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Add the task's adapter, and freeze the others."""
        learner.network_as(PoolNetwork).start_adapter(task)
