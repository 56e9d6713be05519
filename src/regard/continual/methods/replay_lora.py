"""Replay with LoRA: one adapter for all tasks, and examples of earlier tasks among those of the task at hand."""

from __future__ import annotations

from dataclasses import dataclass

from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods import replay
from regard.continual.methods.sequential_lora import SharedAdapterNetwork


@dataclass(frozen=True, kw_only=True)
class ReplayLoraConfig(replay.ReplayConfig, LoraConfig):
    """Settings of experience replay with a low-rank adapter."""


class ReplayLora(replay.Replay):
    """Experience replay (arXiv 1902.10486) where one LoRA adapter is trained: a baseline of SAPT (arXiv 2401.08295)."""

    Config = ReplayLoraConfig
    Network = SharedAdapterNetwork
    supports_text = True

    def before_task(self, learner: Learner, task: int) -> None:
        """Train the adapter, on."""
        learner.network_as(PoolNetwork).start_adapter(0)
