"""Shared attention: routes examples to adapters by their input embeddings."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard.errors import UserError, check_choice

ProjectionOrder = Literal["published", "paper"]
ORDERS: tuple[ProjectionOrder, ...] = get_args(ProjectionOrder)


class SharedAttention(nn.Module):
    """SAPT's attention over adapters: one key for each adapter, one query for each row.

    The weights are a = softmax(k_i · q / τ) over adapters. The query q comes from the query vector e through two linear
    maps without bias and a layer norm (arXiv 2401.08295, equations 4 to 6). The first `count` keys are in use.

    Args:
        width, hidden_size: Number of features of a query vector, and between the two maps.
        projection_order: Position of the SiLU: "published" (after both maps, as in the code) or "paper" (between them).
        temperature: τ; √width by default.
    """

    count: Tensor

    def __init__(
        self,
        width: int,
        *,
        hidden_size: int = 100,
        projection_order: ProjectionOrder = "published",
        temperature: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("projection_order", projection_order, ORDERS)
        self.projection_order, self.seed = projection_order, seed
        self.temperature = math.sqrt(width) if temperature is None else temperature
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(_uniform((hidden_size, width), 1 / math.sqrt(width), generator))
        self.up = nn.Parameter(_uniform((width, hidden_size), 1 / math.sqrt(hidden_size), generator))
        self.norm = nn.LayerNorm(width)
        self.keys = nn.ParameterList()
        self.register_buffer("count", torch.tensor(0))

    @property
    def width(self) -> int:
        return self.down.shape[1]

    def reserve(self, blocks: int) -> None:
        """Add keys until there are `blocks`, sampled from U(−1, 1) with the seed and the index of the adapter."""
        for block in range(len(self.keys), blocks):
            generator = torch.Generator().manual_seed(self.seed + 7919 * (block + 1))
            self.keys.append(nn.Parameter(_uniform((self.width,), 1.0, generator).to(self.down), requires_grad=False))

    def use(self, blocks: int) -> None:
        self.reserve(blocks)
        self.count.fill_(blocks)

    def set_trainable(self, block: int | None) -> None:
        """Train the maps and the key of one adapter only; None freezes everything."""
        for index, key in enumerate(self.keys):
            key.requires_grad_(index == block)
        for shared in (self.down, self.up, *self.norm.parameters()):
            shared.requires_grad_(block is not None)

    def delete(self, block: int) -> None:
        """Remove a key; later ones move up."""
        self.count -= (self.count > block).to(self.count.dtype)
        self.keys = nn.ParameterList(key for index, key in enumerate(self.keys) if index != block)

    def shared_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.state_dict().items() if name in ("down", "up") or "norm" in name}

    def adapter_tensors(self) -> dict[str, list[Tensor]]:
        return {"keys": list(self.keys)}

    def query(self, vectors: Tensor) -> Tensor:
        """Return the queries q (row, width) of query vectors e (row, width)."""
        inner = nn.functional.linear(vectors.to(self.down), self.down)
        if self.projection_order == "published":
            mapped = nn.functional.silu(nn.functional.linear(inner, self.up))
        else:
            mapped = nn.functional.linear(nn.functional.silu(inner), self.up)
        return self.norm(mapped)

    def scores(self, vectors: Tensor, blocks: Sequence[int] | None = None) -> Tensor:
        """Return k_i · q / τ (row, adapter) without autocast, of the adapters in use or of `blocks`."""
        used = range(int(self.count)) if blocks is None else blocks
        if not len(used):
            raise UserError("adapters: expected at least one that is in use, got none; add one")
        keys = torch.stack([self.keys[index] for index in used])
        with torch.autocast(vectors.device.type, enabled=False):
            return self.query(vectors) @ keys.T / self.temperature

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the weights a (row, adapter) of the adapters in use; they sum to 1."""
        scores = self.scores(vectors)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * bound
