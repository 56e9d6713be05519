"""Low-rank blocks of a layer, and their mix: one product with all A's, the weights on the hidden, one with all B's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError

GATHERED = 50
"""About what it costs a row to gather a block, in products of a token with it, on a CPU: `benchmarks.gathering`."""


@dataclass(frozen=True)
class AdapterWeights:
    """How much a layer's blocks add: (group, 1, block · rank), for groups of rows that follow one another.

    `own`: of the blocks that are trained and in use, `trained`; `old`: of the first `frozen` that are not, or of those
    of them that `chosen` (group, block) names.
    """

    trained: tuple[int, ...]
    own: Tensor | None
    frozen: int
    old: Tensor | None
    chosen: Tensor | None


class Mixture:
    """How the layers of a pool mix their blocks at the moment.

    `weights` (row, block), or (block,) for all rows alike; None: there is no block, the layers are as they were.
    `top_k`: each row uses the blocks that it weighs most, None: all. In training those are of the frozen blocks, and
    what is trained is used besides; in evaluation of all, so that what is frozen makes no difference.
    """

    def __init__(self, weights: Tensor | None = None, top_k: int | None = None) -> None:
        self.weights, self.top_k = weights, top_k

    @property
    def weights(self) -> Tensor | None:
        """(row, block) or (block,)."""
        return self._weights

    @weights.setter
    def weights(self, weights: Tensor | None) -> None:
        self._weights = weights
        self._made: dict[Any, AdapterWeights] = {}

    def shares(
        self, rows: int, tokens: int, rank: int, scale: float, trained: tuple[int, ...], *, training: bool = True
    ) -> AdapterWeights:
        """The weights as a layer of that rank and scale uses them: made once for all layers, but where they train."""
        assert self._weights is not None
        weights = self._weights if self._weights.dim() > 1 else self._weights[None]
        groups, used = weights.shape
        if rows % groups:
            raise UserError(f"weights: expected a row for each of {rows} rows, or one for several, got {groups}")
        frozen = used - sum(number < used for number in trained)
        sparse = self.top_k is not None and self.top_k < frozen
        gathers = sparse and (self.top_k or 0) * (tokens + GATHERED * groups) < frozen * (tokens + GATHERED // 2)
        most = None if training or self.top_k is None or self.top_k >= used else self.top_k
        if torch.is_grad_enabled() and weights.requires_grad:
            return _shares(weights, rank, scale, trained, self.top_k if sparse else None, gathers, most)
        changes = None if weights.is_inference() else weights._version
        key = (rank, scale, trained, self.top_k, most, gathers, changes, torch.is_inference_mode_enabled())
        if key not in self._made:
            self._made[key] = _shares(weights, rank, scale, trained, self.top_k if sparse else None, gathers, most)
        return self._made[key]


class LoraAdapters(nn.Module):
    """The blocks of one layer: y = Σ_i a_i (α/r) B_i A_i x (arXiv 2401.08295, equation 7).

    `A[i]` (rank, inputs) is drawn as a linear layer's weights are, `B[i]` (outputs, rank) begins at zero. Blocks that
    are not trained lie one after the other in memory, so that mixing them is two products whatever their number. With
    `detach_old` no gradient flows through these to what the layer reads, as in the authors' code.
    """

    like: Tensor

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
        place = None if like is None else like.device
        self.register_buffer("like", torch.empty(0, device=place), persistent=False)
        self._stack: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.A)

    def reserve(self, blocks: int) -> None:
        """Have so many blocks, each drawn by the seed and its number."""
        for block in range(len(self), blocks):
            random = torch.Generator().manual_seed(self.seed + 104729 * (block + 1))
            drawn = (2 * torch.rand(self.rank, self.inputs, generator=random) - 1) / math.sqrt(self.inputs)
            self.A.append(nn.Parameter(drawn.to(self.like), requires_grad=False))
            self.B.append(nn.Parameter(self.like.new_zeros(self.outputs, self.rank), requires_grad=False))
            self._stack = None

    def open(self, *blocks: int) -> None:
        """Let these blocks be trained, and no others."""
        self.trained = tuple(sorted(blocks))
        for number in range(len(self)):
            for part in (self.A[number], self.B[number]):
                part.data = part.detach().clone(memory_format=torch.contiguous_format)
                part.requires_grad_(number in self.trained)
        self._stack = None

    def reopen(self) -> None:
        """Let those blocks be trained whose A and B require gradients, where that was said from without."""
        self.open(*(number for number, one in enumerate(self.A) if one.requires_grad))

    def drop(self, block: int) -> None:
        """Take a block away; those after it move up. Raises UserError."""
        if block not in range(len(self)):
            raise UserError(f"block: expected a number from 0 to {len(self) - 1}, got {block}")
        self.A = nn.ParameterList([one for number, one in enumerate(self.A) if number != block])
        self.B = nn.ParameterList([one for number, one in enumerate(self.B) if number != block])
        self.open(*(number - (number > block) for number in self.trained if number != block))

    def delta(self, block: int) -> Tensor:
        """(outputs, inputs): what a block with the weight 1 adds to the layer's matrix."""
        return self.scale * self.B[block].detach() @ self.A[block].detach()

    def forward(self, states: Tensor, out: Tensor, mixture: Mixture) -> Tensor:
        """What the layer gives, (row, token, outputs) or (row, outputs), with the blocks' mix added to `out`."""
        weights = mixture.weights
        if weights is None:
            return out
        if weights.shape[-1] > len(self):
            raise UserError(f"weights: expected one for each of at most {len(self)} blocks, got {weights.shape[-1]}")
        tokens = states.numel() // self.inputs
        shares = mixture.shares(len(states), tokens, self.rank, self.scale, self.trained, training=self.training)
        groups = 1 if weights.dim() == 1 else len(weights)
        read = (self.dropout(states) if self.training else states).reshape(groups, -1, self.inputs)
        found = out.reshape(groups, -1, self.outputs)
        if shares.own is not None:
            found = _add(read, found, *self._own(shares.trained), shares.own)
        if shares.old is not None:
            down, up = self.stacked()
            read = read.detach() if self.detach_old else read
            if shares.chosen is None:
                rows = shares.frozen * self.rank
                found = _add(read, found, down[:rows], up[:rows], shares.old)
            else:
                down, up = (part.unflatten(0, (-1, self.rank))[shares.chosen].flatten(1, 2) for part in (down, up))
                found = _add_gathered(read, found, down, up, shares.old)
        return found.reshape(out.shape)

    def _own(self, trained: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """A and Bᵀ of blocks that are trained."""
        if len(trained) == 1:
            return self.A[trained[0]], self.B[trained[0]].T
        return torch.cat([self.A[number] for number in trained]), torch.cat([self.B[number].T for number in trained])

    def stacked(self) -> tuple[Tensor, Tensor]:
        """A (block · rank, inputs) and Bᵀ (block · rank, outputs) of the blocks that are not trained, in their order.

        The blocks' parameters are parts of these from then on, not copies.
        """
        if self._stack is None:
            frozen = [number for number in range(len(self)) if number not in self.trained]
            with torch.inference_mode(False):  # parameters that were made under it could never be trained
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

    def _load_from_state_dict(self, *given: Any) -> None:
        self._stack = None
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stack": None}


class MixedLayer(nn.Module):
    """A linear layer (`nn.Linear`, or GPT-2's `Conv1D`) with blocks beside it, mixed as the pool's mixture says."""

    def __init__(self, layer: nn.Module, mixture: Mixture, **options: Any) -> None:
        super().__init__()
        inputs, outputs = weight_shape(layer)
        self.base_layer = layer
        self.blocks = LoraAdapters(inputs, outputs, like=layer.weight, **options)  # type: ignore[arg-type]
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


def is_linear_layer(module: nn.Module) -> bool:
    """Whether blocks can stand beside a module."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def weight_shape(layer: nn.Module) -> tuple[int, int]:
    """How many features a linear layer reads, and how many it gives."""
    weight: Any = layer.weight
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def _cast(states: Tensor, like: Tensor) -> Tensor:
    """The states in the precision of the blocks; under autocast, which chooses one itself, as they are."""
    kind = states.device.type
    chosen = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return states if chosen else states.to(like.dtype)


def _add(read: Tensor, out: Tensor, down: Tensor, up: Tensor, shares: Tensor) -> Tensor:
    """`out` (group, token, outputs) and what the blocks A (hidden, inputs) and Bᵀ (hidden, outputs) add to it."""
    hidden = nn.functional.linear(_cast(read, down), down)
    mixed = hidden * shares.to(hidden.dtype)
    if out.dtype == mixed.dtype == up.dtype:
        return torch.addmm(out.flatten(0, 1), mixed.flatten(0, 1), up).view(out.shape)
    return out + (mixed @ _cast(up, mixed)).to(out.dtype)


def _add_gathered(read: Tensor, out: Tensor, down: Tensor, up: Tensor, shares: Tensor) -> Tensor:
    """The same with blocks of each group's own, A (group, hidden, inputs) and Bᵀ (group, hidden, outputs)."""
    hidden = _cast(read, down) @ down.transpose(1, 2)
    mixed = hidden * shares.to(hidden.dtype)
    if out.dtype == mixed.dtype == up.dtype:
        return torch.baddbmm(out, mixed, up)
    return out + (mixed @ _cast(up, mixed)).to(out.dtype)


def _shares(
    weights: Tensor,
    rank: int,
    scale: float,
    trained: tuple[int, ...],
    top_k: int | None,
    gathers: bool,
    most: int | None = None,
) -> AdapterWeights:
    """The shares that weights (group, block) give, of `top_k` blocks that are not trained or of all of them.

    Before that, of `most` of all blocks: the others have none.
    """
    used, order = weights.shape[1], weights
    if most is not None:
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter(1, weights.topk(most, dim=-1).indices, True)
        weights, order = weights.masked_fill(~kept, 0), weights.masked_fill(~kept, -torch.inf)
    own = tuple(number for number in trained if number < used)
    rest = [number for number in range(used) if number not in own]
    scaled = weights * scale
    old, chosen = _columns(scaled, rest) if rest else None, None
    if old is not None and top_k is not None:
        best = _columns(order, rest).topk(top_k, dim=-1, sorted=False).indices
        chosen = best if gathers else None
        used_of_them = old.gather(1, best)
        old = used_of_them if gathers else torch.zeros_like(old).scatter(1, best, used_of_them)
    return AdapterWeights(
        trained=own,
        own=_spread(_columns(scaled, own), rank) if own else None,
        frozen=len(rest),
        old=None if old is None else _spread(old, rank),
        chosen=chosen,
    )


def _spread(shares: Tensor, rank: int) -> Tensor:
    """(group, 1, block · rank): each block's share for all of its hidden features."""
    return shares[..., None].expand(-1, -1, rank).reshape(len(shares), 1, -1)


def _columns(shares: Tensor, blocks: Sequence[int]) -> Tensor:
    """(group, block): of these blocks alone."""
    first, last = blocks[0], blocks[-1]
    if last - first == len(blocks) - 1:
        return shares[:, first : last + 1]
    return torch.cat([shares[:, number : number + 1] for number in blocks], 1)
