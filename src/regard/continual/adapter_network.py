"""A model with a pool of adapters, an adapter a task: what methods that train adapters train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.continual import method
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier

if TYPE_CHECKING:
    from regard.continual.learner import Learner

AdapterPool = LoraAdapterPool | PromptAdapterPool


@dataclass(frozen=True, kw_only=True)
class LoraConfig(method.MethodConfig):
    """Settings of low-rank adapters. The defaults are those of SAPT (arXiv 2401.08295) for T5 on Long Sequence.

    Args:
        r: Rank of an adapter.
        lora_alpha: What an adapter adds is scaled by `lora_alpha / r`.
        target_modules: Names of layers, separated by commas, or "auto" (queries and values).
    """

    r: method.PositiveInt = 8
    lora_alpha: method.NonNegative = 32.0
    target_modules: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora_alpha:
            raise UserError("lora_alpha: expected a number above 0, got 0, with which blocks add nothing")


class FrozenModelNetwork(Network):
    """A frozen model with a pool of adapters, `count` of them in use, and a head that is trained if it has weights."""

    needs_wrapper = True
    no_lora_reason: ClassVar[str]
    count: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError(f"lora: expected none {self.no_lora_reason}")
        self.pool: Any = self.make_pool(classifier, config, seed)
        self.pool.reserve(self.count_adapters(tasks))
        self.register_buffer("count", torch.tensor(0))

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> AdapterPool:
        """Return the adapters, put into a model."""
        raise NotImplementedError

    def count_adapters(self, tasks: int) -> int:
        """Return how many adapters so many tasks need."""
        return tasks

    def start_adapter(self, adapter: int) -> None:
        """Train this adapter from now on, and no other; it and those before it are in use."""
        self.pool.set_trainable(adapter)
        self.count.fill_(adapter + 1)

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        """For a while, the model has the adapters that rows get."""
        raise NotImplementedError

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        with self.use_adapters(rows):
            return super().forward(rows)

    def generate(self, rows: dict[str, Tensor], new_tokens: int) -> Tensor:
        with self.use_adapters(rows):
            return super().generate(rows, new_tokens)


class AdapterNetwork(FrozenModelNetwork):
    """Adapters that are weighed: which of them a row gets, and how much, is for the method (`weights`)."""

    no_lora_reason = "with a method that has blocks of its own; --set r=… is theirs"
    pool: AdapterPool
    _forced: int | None = None

    @property
    def lengthens_input(self) -> bool:
        """Whether the model reads more than a text with them, which low-rank ones do not make it."""
        return not isinstance(self.pool, LoraAdapterPool)

    def weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return how much each row gets of each adapter in use, (row, adapter) or (adapter,): all of each."""
        return torch.ones(int(self.count), device=self.count.device) if int(self.count) else None

    @contextmanager
    def use_only(self, adapter: int) -> Iterator[None]:
        """For a while, every row gets this adapter alone."""
        before, self._forced = self._forced, adapter
        try:
            yield
        finally:
            self._forced = before

    def use_adapters(self, rows: dict[str, Tensor]) -> AbstractContextManager[None]:
        if self._forced is None:
            return self.pool.use_weights(self.weights(rows))
        weights = torch.zeros(int(self.count), device=self.count.device)
        weights[self._forced] = 1.0
        return self.pool.use_weights(weights)


class PoolNetwork(AdapterNetwork):
    """Low-rank adapters that are weighed."""

    pool: LoraAdapterPool

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> LoraAdapterPool:
        return make_lora_pool(classifier, config, seed, **self.pool_options(config))

    def pool_options(self, config: Any) -> dict[str, Any]:
        """Return what else a pool is made with."""
        return {}


def make_lora_pool(classifier: Classifier, config: LoraConfig, seed: int, **options: Any) -> LoraAdapterPool:
    """Return low-rank adapters in a model, as the settings have them."""
    targets = config.target_modules
    return LoraAdapterPool(
        classifier.encoder,
        r=config.r,
        lora_alpha=config.lora_alpha,
        target_modules=targets if targets == "auto" else [target.strip() for target in targets.split(",")],
        **options,
        seed=seed,
    )


def losses_by_adapter(learner: Learner, task: int, adapters: Iterable[int], rows: int) -> dict[int, float]:
    """Return the mean loss of at most so many training rows of a task under each of some adapters alone."""
    network = learner.network
    assert isinstance(network, AdapterNetwork)
    items, losses = learner.sample_examples(task, "train", rows), dict[int, float]()
    for adapter in adapters:
        total = 0.0
        with learner.loss_mode(), torch.no_grad(), network.use_only(adapter):
            for batch in learner.iterate_batches(items):
                total += float(learner.cross_entropy(network(batch), batch))
        losses[adapter] = total / len(items)
    return losses


def choose_initial_adapter(learner: Learner, task: int, adapter: int, rows: int) -> int | None:
    """Return the adapter before a new one under which at most so many of the task's rows lose least.

    None where the new one, which adds nothing yet, is better than all of them.
    """
    losses = losses_by_adapter(learner, task, range(adapter + 1), rows)
    best = min(losses, key=lambda index: (losses[index], -index))
    return None if best == adapter else best
