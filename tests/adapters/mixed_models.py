"""A layer of a few features with blocks that all add something, in float64."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.lora import LoraAdapters, MixedLayer
from regard.adapters.mixture import Mixture

INPUTS, OUTPUTS, RANK, ALPHA = 7, 5, 2, 6.0


def filled(blocks: LoraAdapters, count: int, *trained: int, seed: int = 0) -> LoraAdapters:
    """So many blocks, of which none adds nothing."""
    random = torch.Generator().manual_seed(seed)
    blocks.reserve(count)
    with torch.no_grad():
        for part in blocks.B:
            part.copy_(torch.randn(part.shape, generator=random))
    blocks.set_trainable(*trained)
    return blocks


def layer(
    count: int, *trained: int, top_k: int | None = None, base: nn.Module | None = None, **options: Any
) -> MixedLayer:
    """A layer in float64 with so many blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = nn.Linear(INPUTS, OUTPUTS) if base is None else base
    base.requires_grad_(False)
    made = MixedLayer(base, Mixture(top_k=top_k), rank=RANK, alpha=ALPHA, **options).double()
    filled(made.adapters, count, *trained)
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(rows: int, blocks: int, seed: int = 1) -> Tensor:
    return drawn(rows, blocks, seed=seed).softmax(-1).requires_grad_()


def run(made: MixedLayer, states: Tensor, weights: Tensor | None) -> Tensor:
    made.mixture.weights = weights
    found: Tensor = made(states)
    return found
