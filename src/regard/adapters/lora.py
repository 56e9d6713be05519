"""Low-rank blocks of a layer, and their mix: one product with all A's, the weights on the hidden, one with all B's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError


@dataclass(eq=False)
class Mixture:
    """How the layers of a pool mix their blocks at the moment.

    `weights` (row, block), or (block,) for all rows alike; None: there is no block, the layers are as they were.
    `top_k`: of the blocks that are not trained each row uses those that it weighs most, None: all.
    """

    weights: Tensor | None = None
    top_k: int | None = None


class LoraBlocks(nn.Module):
    """The blocks of one layer: y = Σ_i a_i (α/r) B_i A_i x (arXiv 2401.08295, equation 7).

    `A[i]` (rank, inputs) is drawn as a linear layer's weights are, `B[i]` (outputs, rank) begins at zero. Blocks that
    are not trained lie one after the other in memory, so that mixing them is two products whatever their number. With
    `detach_old` no gradient flows through these to what the layer reads, as in the authors' code.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        detach_old: bool = False,
        like: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.rank, self.seed = inputs, outputs, rank, seed
        self.scale, self.detach_old = alpha / rank, detach_old
        self.dropout = nn.Dropout(dropout)
        self.A, self.B = nn.ParameterList(), nn.ParameterList()
        self.trained: tuple[int, ...] = ()
        self._like = torch.empty(0) if like is None else like.new_empty(0)
        self._stack: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.A)

    def reserve(self, blocks: int) -> None:
        """Have so many blocks, each drawn by the seed and its number."""
        device = self.A[0].device if len(self.A) else self._like.device
        for block in range(len(self), blocks):
            random = torch.Generator().manual_seed(self.seed + 104729 * (block + 1))
            drawn = (2 * torch.rand(self.rank, self.inputs, generator=random) - 1) / math.sqrt(self.inputs)
            self.A.append(nn.Parameter(drawn.to(device), requires_grad=False))
            self.B.append(nn.Parameter(torch.zeros(self.outputs, self.rank, device=device), requires_grad=False))
            self._stack = None

    def open(self, *blocks: int) -> None:
        """Let these blocks be trained, and no others."""
        self.trained = tuple(sorted(blocks))
        for number in range(len(self)):
            for part in (self.A[number], self.B[number]):
                part.data = part.detach().clone(memory_format=torch.contiguous_format)
                part.requires_grad_(number in self.trained)
        self._stack = None

    def drop(self, block: int) -> None:
        """Take a block away; those after it move up."""
        self.A = nn.ParameterList([one for number, one in enumerate(self.A) if number != block])
        self.B = nn.ParameterList([one for number, one in enumerate(self.B) if number != block])
        self.open(*(number - (number > block) for number in self.trained if number != block))

    def delta(self, block: int) -> Tensor:
        """(outputs, inputs): what a block with the weight 1 adds to the layer's matrix."""
        return self.scale * self.B[block].detach() @ self.A[block].detach()

    def forward(self, states: Tensor, out: Tensor, mixture: Mixture) -> Tensor:
        """What the layer gives, (row, token, outputs) or (row, outputs), with the blocks' mix added to `out`."""
        if mixture.weights is None:
            return out
        weights = _for_rows(mixture.weights, len(states)) * self.scale
        blocks = weights.shape[1]
        if blocks > len(self):
            raise UserError(f"weights: expected one for each of at most {len(self)} blocks, got {blocks}")
        read = self.dropout(states)
        flat = read.flatten(1, -2) if read.dim() > 2 else read[:, None]
        found = out.reshape(len(out), -1, self.outputs)
        for number in self.trained:
            if number < blocks:
                hidden = nn.functional.linear(_cast(flat, self.A[number]), self.A[number])
                mixed = hidden * weights[:, number, None, None].to(hidden.dtype)
                found = found + nn.functional.linear(mixed, self.B[number]).to(found.dtype)
        frozen = [number for number in range(blocks) if number not in self.trained]
        if frozen:
            found = self._add_frozen(flat.detach() if self.detach_old else flat, found, weights[:, frozen], mixture)
        return found.reshape(out.shape)

    def _add_frozen(self, flat: Tensor, out: Tensor, weights: Tensor, mixture: Mixture) -> Tensor:
        """The mix of the first blocks that are not trained, weighed (row, block), added to `out`."""
        count, width = weights.shape[1], self.rank
        down, up = self.stacked()
        if mixture.top_k is not None and mixture.top_k < count:
            best = weights.topk(mixture.top_k, dim=-1)
            down = down.unflatten(0, (-1, width))[best.indices].flatten(1, 2)
            up = up.unflatten(0, (-1, width))[best.indices].flatten(1, 2)
            shares, many = best.values, mixture.top_k
            hidden = _cast(flat, down) @ down.transpose(1, 2)
        else:
            down, up, shares, many = down[: count * width], up[: count * width], weights, count
            hidden = nn.functional.linear(_cast(flat, down), down)
        mixed = (hidden.unflatten(-1, (many, width)) * shares[:, None, :, None].to(hidden.dtype)).flatten(-2)
        return out + (mixed @ _cast(up, mixed)).to(out.dtype)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """A (block · rank, inputs) and Bᵀ (block · rank, outputs) of the blocks that are not trained, in their order.

        The blocks' parameters are parts of these from then on, not copies.
        """
        if self._stack is None:
            frozen = [number for number in range(len(self)) if number not in self.trained]
            down = torch.cat([self.A[number].detach() for number in frozen])
            up = torch.cat([self.B[number].detach().T for number in frozen])
            for place, number in enumerate(frozen):
                here = slice(place * self.rank, (place + 1) * self.rank)
                self.A[number].data, self.B[number].data = down[here], up[here].T
            self._stack = down, up
        return self._stack

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._stack = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stack": None}


class MixedLayer(nn.Module):
    """A linear layer (`nn.Linear`, or GPT-2's `Conv1D`) with blocks beside it, mixed as the pool's mixture says."""

    def __init__(self, layer: nn.Module, mixture: Mixture, **options: Any) -> None:
        super().__init__()
        inputs, outputs = shape_of(layer)
        self.base_layer = layer
        self.blocks = LoraBlocks(inputs, outputs, like=layer.weight, **options)  # type: ignore[arg-type]
        self.mixture = mixture

    @property
    def weight(self) -> Tensor:
        """The matrix of the layer below."""
        found: Tensor = self.base_layer.weight  # type: ignore[assignment]  # as all layers that are adapted have
        return found

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer below."""
        found: Tensor | None = self.base_layer.bias  # type: ignore[assignment]
        return found

    def forward(self, states: Tensor) -> Tensor:
        """What the layer gives with its blocks."""
        found: Tensor = self.blocks(states, self.base_layer(states), self.mixture)
        return found


def is_linear(module: nn.Module) -> bool:
    """Whether blocks can stand beside a module."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """How many features a linear layer reads, and how many it gives."""
    weight: Any = layer.weight
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def _cast(states: Tensor, like: Tensor) -> Tensor:
    """The states in the precision of the blocks; under autocast, which chooses one itself, as they are."""
    return states if torch.is_autocast_enabled(states.device.type) else states.to(like.dtype)


def _for_rows(weights: Tensor, rows: int) -> Tensor:
    """(row, block): the weights for so many rows, each repeated where a row has become several (beams)."""
    if weights.dim() == 1:
        return weights.expand(rows, -1)
    if rows % len(weights):
        raise UserError(f"weights: expected a row for each of {rows} rows, or one for several, got {len(weights)}")
    return weights if rows == len(weights) else weights.repeat_interleave(rows // len(weights), 0)
