"""A model with a pool of adapters, an adapter a task: what methods that train adapters train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from regard.adapters.lora_pool import LoraAdapterPool
from regard.continual import method
from regard.continual.network import Network
from regard.errors import UserError
from regard.models.classifier import Classifier


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


class AdapterPool(Protocol):
    """Adapters in a model, which are opened to be trained and weighed row by row, of whatever they are made."""

    def __len__(self) -> int: ...

    def reserve(self, adapters: int) -> None:
        """Have so many adapters."""

    def set_trainable(self, *adapters: int) -> None:
        """Let these adapters be trained, and no others."""

    def copy(self, adapter: int, other: int) -> None:
        """Let an adapter be what another is."""

    def use_weights(self, weights: Tensor | None) -> AbstractContextManager[None]:
        """For a while, the model mixes its adapters with these weights, (row, adapter) or (adapter,)."""

    def disable(self) -> AbstractContextManager[None]:
        """For a while, the model is as it was found."""

    def remove(self) -> None:
        """Leave the model as it was found."""


class AdapterNetwork(Network):
    """A frozen model with adapters, and a head that is trained where it has anything to train.

    `count` adapters are in use. Which of them a row gets, and how much, is for the method: `weights`.
    """

    needs_wrapper = True
    count: Tensor

    def __init__(self, classifier: Classifier, *, tasks: int, config: Any, seed: int) -> None:
        super().__init__(classifier, tasks=tasks, config=config, seed=seed)
        if classifier.config.lora:
            raise UserError("lora: expected none with a method that has blocks of its own; --set r=… is theirs")
        self._pool = (self.make_pool(classifier, config, seed),)
        self.pool.reserve(self.count_adapters(tasks))
        self.register_buffer("count", torch.tensor(0))
        self._forced: int | None = None

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> AdapterPool:
        """Return the adapters, put into a model."""
        raise NotImplementedError

    @property
    def pool(self) -> AdapterPool:
        """The adapters."""
        return self._pool[0]

    @property
    def lengthens_input(self) -> bool:
        """Whether the model reads more than a text with them, which low-rank ones do not make it."""
        return not isinstance(self.pool, LoraAdapterPool)

    def count_adapters(self, tasks: int) -> int:
        """Return how many adapters so many tasks need."""
        return tasks

    def start_adapter(self, adapter: int) -> None:
        """Train this adapter from now on, and no other; it and those before it are in use."""
        self.pool.set_trainable(adapter)
        self.count.fill_(adapter + 1)

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

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the logits, with the adapters weighed."""
        with self.pool.use_weights(self._weights(rows)):
            return super().forward(rows)

    def generate(self, rows: dict[str, Tensor], new_tokens: int) -> Tensor:
        """Return the answers to prompts, with the adapters weighed by the prompt, once for all tokens of an answer."""
        with self.pool.use_weights(self._weights(rows)):
            return super().generate(rows, new_tokens)

    def _weights(self, rows: dict[str, Tensor]) -> Tensor | None:
        if self._forced is None:
            return self.weights(rows)
        weights = torch.zeros(int(self.count), device=self.count.device)
        weights[self._forced] = 1.0
        return weights


class PoolNetwork(AdapterNetwork):
    """A frozen model with low-rank adapters."""

    def make_pool(self, classifier: Classifier, config: Any, seed: int) -> LoraAdapterPool:
        """Return the adapters, put into a model."""
        return make_lora_pool(classifier, config, seed, **self.pool_options(config))

    @property
    def pool(self) -> LoraAdapterPool:
        """The adapters."""
        return cast(LoraAdapterPool, self._pool[0])

    def pool_options(self, config: Any) -> dict[str, Any]:
        """Return what else a pool is made with."""
        return {}


def make_lora_pool(classifier: Classifier, config: LoraConfig, seed: int, **options: Any) -> LoraAdapterPool:
    """Low-rank adapters in a model, as the settings have them."""
    targets = config.target_modules
    return LoraAdapterPool(
        classifier.encoder,
        r=config.r,
        lora_alpha=config.lora_alpha,
        target_modules=targets if targets == "auto" else [target.strip() for target in targets.split(",")],
        **options,
        seed=seed,
    )
