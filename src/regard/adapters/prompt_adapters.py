"""Soft prompts: trained vectors in place of words, one prompt for each task."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import UserError, check_int


class PromptAdapters(nn.Module):
    """Soft prompts `P[i]` (length, width), and the MLP that reparametrizes those that are trained.

    A live prompt is read as P' = MLP(P) + P. Closing folds it: P becomes P', a plain tensor, and the MLP is free for
    the next prompt. A folded prompt that is trained again gets an MLP that adds nothing yet; without the residual sum
    it is trained as a plain tensor (residual prompt tuning, arXiv 2305.03937, section 3).

    Args:
        width, length: Number of features, and of vectors in a prompt.
        hidden: Hidden features of the MLP (ReLU, then a layer norm); 0 for none.
        residual: Add P to the output of the MLP.
        words: Embeddings (word, width) from which a new prompt is sampled; by default it is sampled from U(−0.5, 0.5).
            Prompts have their dtype, float32 or wider.
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
        for name, value, min_value in (("width", width, 1), ("length", length, 1), ("hidden", hidden, 0)):
            check_int(name, value, least=min_value)
        self.width, self.length, self.residual, self.seed = width, length, residual, seed
        self._words = (words,)
        self._like = torch.empty(0)
        if words is not None:
            self._like = words.new_empty(0, dtype=torch.promote_types(words.dtype, torch.float32))
        self.P = nn.ParameterList()
        self.mlp: nn.Sequential | None = None
        if hidden:
            layers = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.LayerNorm(width)
            self.mlp = nn.Sequential(*layers).to(self._like).requires_grad_(False)
            self._reset_mlp(0)
        for name in ("live", "folded"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.bool, device=self._like.device))

    def __len__(self) -> int:
        return len(self.P)

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(index for index, prompt in enumerate(self.P) if prompt.requires_grad)

    def reserve(self, blocks: int) -> None:
        """Add prompts until there are `blocks`, initialized with the seed and their index."""
        for block in range(len(self), blocks):
            generator = torch.Generator().manual_seed(self.seed + 104729 * (block + 1))
            self.P.append(nn.Parameter(self._initial_prompt(generator), requires_grad=False))
        flags = self.live.new_zeros(len(self) - len(self.live))
        self.live, self.folded = torch.cat([self.live, flags]), torch.cat([self.folded, flags])

    def set_trainable(self, *blocks: int) -> None:
        """Train these prompts only; fold the others, and reset the MLP unless it is theirs."""
        if self.mlp is not None and not torch.equal(self._reparametrized(blocks), self.live):
            self.fold()
            live = self._reparametrized(blocks)
            self._reset_mlp(min(blocks, default=0), adds=not bool((live & self.folded).any()))
            self.live.copy_(live)
        for index, prompt in enumerate(self.P):
            prompt.requires_grad_(index in blocks)
        if self.mlp is not None:
            self.mlp.requires_grad_(bool(self.live.any()))

    def _reparametrized(self, blocks: Sequence[int]) -> Tensor:
        """Return the mask (prompt,) of those that the MLP reparametrizes."""
        mask = torch.zeros_like(self.live)
        mask[list(blocks)] = True
        return mask if self.residual else mask & ~self.folded

    @torch.no_grad()
    def fold(self) -> None:
        """Fold live prompts: each becomes P'."""
        for index in self.live.nonzero().flatten().tolist():
            self.P[index].copy_(self.prompt(index))
            self.folded[index] = True
        self.live.zero_()
        self.requires_grad_(False)

    @torch.no_grad()
    def copy(self, block: int, other: int) -> None:
        """Copy prompt `other` into prompt `block`, which gets an MLP that adds nothing yet if it is trained."""
        self.P[block].copy_(self.prompt(other))
        self.folded[block] = True
        if self.live[block]:
            self.live[block] = False
            self.set_trainable(*self.trained)

    def delete(self, block: int) -> None:
        """Remove a prompt; later ones move up."""
        remaining = [index for index in range(len(self)) if index != block]
        self.P = nn.ParameterList([self.P[index] for index in remaining])
        self.live, self.folded = self.live[remaining], self.folded[remaining]

    def prompt(self, block: int) -> Tensor:
        """Return P' of a prompt, (length, width)."""
        return self.concatenate([block])

    def mix(self, weights: Tensor) -> Tensor:
        """Return Σ_i a_i P'_i, (row, length, width), by weights (row, prompt) of the first prompts, or (prompt,)."""
        rows = weights[None] if weights.dim() == 1 else weights
        if not 0 < rows.shape[1] <= len(self):
            raise UserError(f"weights: expected one for each of at most {len(self)} adapters, got {rows.shape[1]}")
        prompts = self.concatenate(range(rows.shape[1])).unflatten(0, (-1, self.length))
        with torch.autocast(prompts.device.type, enabled=False):
            return torch.einsum("rb,blw->rlw", rows.to(prompts.dtype), prompts)

    def concatenate(self, blocks: Sequence[int]) -> Tensor:
        """Concatenate P' of prompts: (prompt · length, width)."""
        live = self.live.tolist()
        return torch.cat([self._reparametrize(index) if live[index] else self.P[index] for index in blocks])

    def _reparametrize(self, block: int) -> Tensor:
        prompt: Tensor = self.P[block]
        if self.mlp is None:
            return prompt
        return self.mlp(prompt) + prompt if self.residual else self.mlp(prompt)

    def _initial_prompt(self, generator: torch.Generator) -> Tensor:
        words, device = self._words[0], self.live.device
        if words is None:
            return (torch.rand(self.length, self.width, generator=generator) - 0.5).to(device)
        indices = torch.randint(len(words), (self.length,), generator=generator)
        return words.detach()[indices.to(words.device)].to(self._like.dtype).to(device, copy=True)

    @torch.no_grad()
    def _reset_mlp(self, block: int, *, adds: bool = True) -> None:
        """Initialize the MLP with U(−1, 1) / √inputs; its layer norm scales by 0 unless `adds`."""
        generator = torch.Generator().manual_seed(self.seed + 15485863 * (block + 1))
        for layer in self.mlp or ():
            if isinstance(layer, nn.Linear):
                for weights in (layer.weight, layer.bias):
                    values = 2 * torch.rand(weights.shape, generator=generator) - 1
                    weights.copy_(values / math.sqrt(layer.in_features))
            elif isinstance(layer, nn.LayerNorm):
                layer.reset_parameters()
                layer.weight.fill_(float(adds))
