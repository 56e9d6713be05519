"""Soft prompts: vectors that are learnt in place of words, one block of them a task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import UserError, check_int


class PromptAdapters(nn.Module):
    """Soft prompts, `P[i]` (length, width) each, and what re-parametrises those that are trained.

    P' = MLP(P) + P with an MLP of `hidden` features, ReLU, and a layer norm behind it (arXiv 2305.03937, section 3),
    the sum without P where `residual` is false; with `hidden` 0 prompts are what they are. `live` says which blocks
    have not been folded yet, so that a block closed is a plain tensor, and the MLP is that of the next one. A block
    that was folded is opened as what it is: with an MLP that adds nothing yet or, without the sum, as a plain tensor.

    A prompt begins as rows of `words` (word, width) that the seed and its number choose, or as a draw from
    U(−0.5, 0.5); it has the precision of the words, and that of float32 at least.
    """

    live: Tensor
    folded: Tensor

    def __init__(
        self,
        width: int,
        length: int = 10,
        hidden: int = 800,
        residual: bool = True,
        *,
        words: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (("width", width, 1), ("length", length, 1), ("hidden", hidden, 0)):
            check_int(name, value, least=least)
        self.width, self.length, self.residual, self.seed = width, length, residual, seed
        self._words = (words,)
        self._like = torch.empty(0)
        if words is not None:
            exact = torch.promote_types(words.dtype, torch.float32)
            self._like = torch.empty(0, dtype=exact, device=words.device)
        self.P = nn.ParameterList()
        self.mlp: nn.Sequential | None = None
        if hidden:
            parts = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.LayerNorm(width)
            self.mlp = nn.Sequential(*parts).to(self._like)
            self.mlp.requires_grad_(False)
            self._redraw(0)
        for name in ("live", "folded"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.bool, device=self._like.device))

    def __len__(self) -> int:
        return len(self.P)

    @property
    def trained(self) -> tuple[int, ...]:
        """The blocks that are trained."""
        return tuple(number for number, one in enumerate(self.P) if one.requires_grad)

    def reserve(self, blocks: int) -> None:
        """Have so many blocks, each drawn by the seed and its number."""
        for block in range(len(self), blocks):
            random = torch.Generator().manual_seed(self.seed + 104729 * (block + 1))
            self.P.append(nn.Parameter(self._begun(random), requires_grad=False))
        more = self.live.new_zeros(len(self) - len(self.live))
        self.live, self.folded = torch.cat([self.live, more]), torch.cat([self.folded, more])

    def open(self, *blocks: int) -> None:
        """Let these blocks be trained, and no others, which are folded; the MLP begins anew unless it is theirs."""
        unknown = [number for number in blocks if number not in range(len(self))]
        if unknown:
            raise UserError(f"block: expected a number from 0 to {len(self) - 1}, got {unknown[0]}")
        if self.mlp is not None and not torch.equal(self._through(blocks), self.live):
            self.close()
            new = self._through(blocks)
            self._redraw(min(blocks, default=0), adds=not bool((new & self.folded).any()))
            self.live.copy_(new)
        for number, one in enumerate(self.P):
            one.requires_grad_(number in blocks)
        if self.mlp is not None:
            self.mlp.requires_grad_(bool(self.live.any()))

    def _through(self, blocks: Sequence[int]) -> Tensor:
        """(block,): which of these the MLP is for."""
        found = torch.zeros_like(self.live)
        found[list(blocks)] = True
        return found if self.residual else found & ~self.folded

    @torch.no_grad()
    def close(self) -> None:
        """Fold what is open: each prompt becomes P', and needs no MLP."""
        for number in self.live.nonzero().flatten().tolist():
            self.P[number].copy_(self.prompt(number))
            self.folded[number] = True
        self.live.zero_()
        self.requires_grad_(False)

    @torch.no_grad()
    def copy(self, block: int, other: int) -> None:
        """Let a block be what another is; if it is open, with an MLP that adds nothing yet."""
        self.P[block].copy_(self.prompt(other))
        self.folded[block] = True
        if self.live[block]:
            self.live[block] = False
            self.open(*self.trained)

    def drop(self, block: int) -> None:
        """Take a block away; those after it move up."""
        kept = [number for number in range(len(self)) if number != block]
        self.P = nn.ParameterList([self.P[number] for number in kept])
        self.live, self.folded = self.live[kept], self.folded[kept]

    def prompt(self, block: int) -> Tensor:
        """(length, width): a block as it is read."""
        return self.joined([block])

    def mixed(self, weights: Tensor) -> Tensor:
        """Σ_i a_i P'_i of the first blocks: (row, length, width) by weights (row, block), one row by (block,)."""
        shares = weights[None] if weights.dim() == 1 else weights
        if not 0 < shares.shape[1] <= len(self):
            raise UserError(f"weights: expected one for each of at most {len(self)} blocks, got {shares.shape[1]}")
        prompts = self.joined(range(shares.shape[1])).unflatten(0, (-1, self.length))
        with torch.autocast(prompts.device.type, enabled=False):
            return torch.einsum("rb,blw->rlw", shares.to(prompts.dtype), prompts)

    def joined(self, blocks: Sequence[int]) -> Tensor:
        """(blocks · length, width): blocks as they are read, one behind the other."""
        live = self.live.tolist()
        return torch.cat([self._made(number) if live[number] else self.P[number] for number in blocks])

    def _made(self, block: int) -> Tensor:
        """What the MLP makes of a block."""
        plain: Tensor = self.P[block]
        made: Tensor = plain if self.mlp is None else self.mlp(plain)
        return made + plain if self.residual and self.mlp is not None else made

    def _begun(self, random: torch.Generator) -> Tensor:
        words = self._words[0]
        device = self.live.device
        if words is None:
            return (torch.rand(self.length, self.width, generator=random) - 0.5).to(device)
        chosen = torch.randint(len(words), (self.length,), generator=random)
        return words.detach()[chosen.to(words.device)].to(self._like.dtype).to(device, copy=True)

    @torch.no_grad()
    def _redraw(self, block: int, *, adds: bool = True) -> None:
        """Begin with a new MLP: maps from U(−1, 1) / √inputs, as linear layers are drawn; 0 where it `adds` nothing."""
        random = torch.Generator().manual_seed(self.seed + 15485863 * (block + 1))
        for part in self.mlp or ():
            if isinstance(part, nn.Linear):
                for weights in (part.weight, part.bias):
                    drawn = 2 * torch.rand(weights.shape, generator=random) - 1
                    weights.copy_(drawn / math.sqrt(part.in_features))
            elif isinstance(part, nn.LayerNorm):
                part.reset_parameters()
                part.weight.fill_(float(adds))
