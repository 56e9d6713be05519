"""What pools of LoRA adapters and of soft prompts share."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from regard.adapters.lora import LoraAdapters
from regard.adapters.mixture import Mixture
from regard.adapters.off_loading import check_in_memory
from regard.adapters.prompt_adapters import PromptAdapters
from regard.adapters.recomputed import find_checkpointed, keep_weights, recomputing_with
from regard.errors import UserError


class AdapterPool:
    """Adapters in a model, in place, which one `mixture` weights. The weights of the model are frozen."""

    adapters: tuple[LoraAdapters, ...] | tuple[PromptAdapters, ...]
    """The adapters of each adapted module; with prompts a single one."""

    def __init__(self, model: Any, mixture: Mixture) -> None:
        model.requires_grad_(False)
        self.model, self.mixture = model, mixture
        self._checkpointed = find_checkpointed(model)

    def __len__(self) -> int:
        """Return the number of adapters, in use or reserved."""
        return len(self.adapters[0])

    def reserve(self, blocks: int) -> None:
        for adapters in self.adapters:
            adapters.reserve(blocks)

    def set_trainable(self, *blocks: int) -> None:
        self._check_blocks(*blocks)
        for adapters in self.adapters:
            adapters.set_trainable(*blocks)

    def delete(self, block: int) -> None:
        """Remove an adapter from every module; later ones move up."""
        self._check_blocks(block)
        for adapters in self.adapters:
            adapters.delete(block)

    def _check_blocks(self, *blocks: int) -> None:
        for block in blocks:
            if block not in range(len(self)):
                raise UserError(f"adapter: expected a number from 0 to {len(self) - 1}, got {block}")

    def check_in_memory(self) -> None:
        """Raise UserError if adapters are in meta, where values are lost, but not what they belong to."""
        for adapters in self.adapters:
            check_in_memory(adapters)

    @contextmanager
    def use_weights(self, weights: Tensor | None) -> Iterator[None]:
        """Mix with these weights for a while, (row, adapter) or (adapter,); None leaves the adapters out.

        What gradient checkpointing computes again in the backward pass has them, too.
        """
        with self.mixture.use(weights), recomputing_with(self._checkpointed, partial(keep_weights, self.mixture)):
            yield
