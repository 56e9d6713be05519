"""Merges: an adapter a task, trained for itself, and one model merged from all of them (linear, TIES, DARE)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from regard.adapters.merging import merge_deltas
from regard.adapters.mixture import hold
from regard.continual import method
from regard.continual.adapter_network import LoraConfig, PoolNetwork
from regard.continual.learner import Learner
from regard.continual.methods.lora import LoraMethod
from regard.models.classifier import Classifier


@dataclass(frozen=True, kw_only=True)
class MergeConfig(LoraConfig):
    """Settings of merges: those of low-rank adapters, and `scale`, the λ of the mean of what they add."""

    kind: ClassVar[str] = "linear"
    scale: method.NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class MergeTiesConfig(MergeConfig):
    """Settings of TIES: those of merges, and `density`, the share of the largest entries of each task that is kept."""

    kind: ClassVar[str] = "ties"
    scale: method.NonNegative = 0.2
    density: Annotated[float, method.Range(1e-9, 1)] = 0.2


@dataclass(frozen=True, kw_only=True)
class MergeDareConfig(MergeConfig):
    """Settings of DARE: those of merges, and `density`, the share of entries of each task that is kept at random."""

    kind: ClassVar[str] = "dare_linear"
    density: Annotated[float, method.Range(1e-9, 1)] = 0.1


class MergeNetwork(PoolNetwork):
    """A model with an adapter for each task: it computes with the one that is trained, and answers with their merge.

    `finished`: how many tasks are merged. The merge is a function of their adapters and the seed, and is not stored.
    """

    separable = True
    finished: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: MergeConfig, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        self.register_buffer("finished", torch.tensor(0))
        self.config, self.seed = config, seed
        self._merged: tuple[int, dict[str, Tensor]] = (0, {})  # of so many tasks, whose adapters change no more

    def use_adapters(self, rows: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        if self._forced is not None:
            return super().use_adapters(dict(rows))
        if self.training:
            return self.pool.use_weights(nn.functional.one_hot(self.count - 1, int(self.count)).float())
        return self._use_merged()

    @contextmanager
    def _use_merged(self) -> Iterator[None]:
        """Add the merge to the weights of the layers for a while."""
        if self._merged[0] != int(self.finished):
            self._merged = (int(self.finished), self.merge())
        with self.pool.use_weights(None), ExitStack() as stack:
            for name, delta in self._merged[1].items():
                layer = self.pool.layers[name]
                delta = delta if isinstance(layer.base_layer, nn.Linear) else delta.T
                stack.enter_context(hold(layer.weight, data=layer.weight.detach() + delta.to(layer.weight)))
            yield

    @torch.no_grad()
    def merge(self) -> dict[str, Tensor]:
        """Return what the adapters of all finished tasks add to the weights of each layer, merged."""
        count, config = int(self.finished), self.config
        density, merged = getattr(config, "density", None), {}
        weight = config.scale if config.kind == "ties" else config.scale / count  # TIES averages by itself
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for name, layer in self.pool.layers.items():
                deltas = [layer.adapters.delta(task).cpu() for task in range(count)]
                merged[name] = merge_deltas(deltas, [weight] * count, config.kind, density).to(layer.weight.device)
        return merged

    def kept_tensors(self) -> list[Tensor]:
        """Return the adapters of the finished tasks, which the next merge needs, and no answer."""
        return [part for task in range(int(self.finished)) for part in self.pool.parameters_of(task)]


class MergeLinear(LoraMethod):
    """Task arithmetic (arXiv 2212.04089): W + λ/t Σ_i Δ_i after t tasks, with Δ_i what the adapter of task i adds.

    Each task trains an adapter of its own on the model as it was, whatever the tasks before it; after each task all are
    merged. λ = 1 is the mean; the paper's λ is of the sum, and the TIES paper's for it, 0.4 where there are no rows to
    choose it with, is `scale` = 0.4 t. Other tasks' classes in the head are restored after each task.
    """

    Config = MergeConfig
    Network = MergeNetwork
    restores_other_classes = True
    answers_as_trained = False

    def after_task(self, learner: Learner, task: int) -> None:
        network = learner.network_as(MergeNetwork)
        network.pool.set_trainable()
        network.finished.fill_(task + 1)


class MergeTies(MergeLinear):
    """TIES (arXiv 2306.01708): of the largest 20 % of each Δ_i those of the sign of their sum, their mean, times λ.

    Trained as `MergeLinear`. λ = 1 is the paper's where there are no rows to choose it with; 0.2 was better for twelve
    tasks.
    """

    Config = MergeTiesConfig


class MergeDare(MergeLinear):
    """DARE (arXiv 2311.03099) with task arithmetic: entries of Δ_i are dropped at random, and the others rescaled.

    Trained as `MergeLinear`.
    """

    Config = MergeDareConfig
