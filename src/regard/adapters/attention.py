"""The attention that all blocks share: from what an example's tokens are, how much of each block it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard.errors import UserError, check_choice

ProjectionOrder = Literal["published", "paper"]
ORDERS: tuple[ProjectionOrder, ...] = get_args(ProjectionOrder)


def query_vectors(embedded: Tensor, real: Tensor) -> Tensor:
    """The query vector e of each row (row, width): each feature's highest value among the real tokens (2401.08295).

    `embedded` (row, token, width) are input embeddings, `real` (row, token) says which tokens count; each row has one.
    """
    return embedded.masked_fill(~real.bool()[..., None], -torch.inf).amax(1)


class SharedAttention(nn.Module):
    """SAPT's attention over blocks (arXiv 2401.08295, equations 4 to 6): a key for each block, a query for each row.

    a = softmax over blocks of k_i · q / τ. Two maps without bias, through `hidden_size` features, and a layer norm make
    q of e. `projection_order` says where the SiLU is: behind both maps ("published", as in the authors' code), or
    between them ("paper", as in their text). τ is √width unless `temperature` is given.

    `count` of the keys are in use: those of blocks that have been added.
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
        random = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(_uniform((hidden_size, width), 1 / math.sqrt(width), random))
        self.up = nn.Parameter(_uniform((width, hidden_size), 1 / math.sqrt(hidden_size), random))
        self.norm = nn.LayerNorm(width)
        self.keys = nn.ParameterList()
        self.register_buffer("count", torch.tensor(0))

    @property
    def width(self) -> int:
        """How many features a query vector has."""
        return self.down.shape[1]

    def reserve(self, blocks: int) -> None:
        """Have keys for so many blocks, drawn from U(−1, 1) by the seed and the number of the block."""
        for block in range(len(self.keys), blocks):
            random = torch.Generator().manual_seed(self.seed + 7919 * (block + 1))
            key = nn.Parameter(_uniform((self.width,), 1.0, random).to(self.down), requires_grad=False)
            self.keys.append(key)

    def use(self, blocks: int) -> None:
        """Use the first so many blocks."""
        self.reserve(blocks)
        self.count.fill_(blocks)

    def open(self, block: int | None) -> None:
        """Let the key of one block be trained, and no other; with None no key, and no map either."""
        for number, key in enumerate(self.keys):
            key.requires_grad_(number == block)
        for shared in (self.down, self.up, *self.norm.parameters()):
            shared.requires_grad_(block is not None)

    def drop(self, block: int) -> None:
        """Take a key away; those after it move up. Raises UserError."""
        if block not in range(len(self.keys)):
            raise UserError(f"block: expected a number from 0 to {len(self.keys) - 1}, got {block}")
        kept = [key for number, key in enumerate(self.keys) if number != block]
        self.count -= (self.count > block).to(self.count.dtype)
        self.keys = nn.ParameterList(kept)

    def query(self, vectors: Tensor) -> Tensor:
        """The queries q (row, width) of query vectors e (row, width)."""
        inner = nn.functional.linear(vectors.to(self.down.dtype), self.down)
        if self.projection_order == "published":
            mapped = nn.functional.silu(nn.functional.linear(inner, self.up))
        else:
            mapped = nn.functional.linear(nn.functional.silu(inner), self.up)
        return self.norm(mapped)

    def scores(self, vectors: Tensor, blocks: Sequence[int] | None = None) -> Tensor:
        """k_i · q / τ (row, block), of the blocks that are in use or of those that are given; autocast or not."""
        used = range(int(self.count)) if blocks is None else blocks
        if not len(used):
            raise UserError("blocks: expected at least one that is in use, got none; add one")
        keys = torch.stack([self.keys[number] for number in used])
        with torch.autocast(vectors.device.type, enabled=False):
            found: Tensor = self.query(vectors) @ keys.T / self.temperature
        return found

    def forward(self, vectors: Tensor) -> Tensor:
        """The weights a (row, block) that each row gives to the blocks in use; they sum to 1."""
        scores = self.scores(vectors)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)


def _uniform(shape: tuple[int, ...], bound: float, random: torch.Generator) -> Tensor:
    """A draw from U(−bound, bound)."""
    return (2 * torch.rand(shape, generator=random) - 1) * bound
