"""Sequential LoRA: one adapter for all tasks, fine-tuned on each as it comes."""

from __future__ import annotations

from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.method import Method


class SharedAdapterNetwork(PoolNetwork):
    """A frozen model with one adapter, whatever the number of tasks."""

    def count_adapters(self, tasks: int) -> int:
        """One."""
        return 1


class SequentialLora(Method):
    """One LoRA adapter (arXiv 2106.09685) trained on every task in turn: SeqLoRA of SAPT (arXiv 2401.08295).

    Nothing holds the adapter where an earlier task left it, so this is what methods with adapters are measured against.
    """

    Config = LoraConfig
    Network = SharedAdapterNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Train the adapter, on."""
        learner.network_as(PoolNetwork).start_adapter(0)
