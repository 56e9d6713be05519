"""The steps of one sequence added together: a forward with a cache goes on where the last one stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.hooks.alignment import SampleAlignment

ADDED = frozenset({"column_mass", "column_square", "cosine_sum", "norm_sum", "pair_count", "early_count"})
WRITTEN = frozenset({"key_norm", "value_norm", "value_output_norm"})
JOINED_BY_HEAD = frozenset({"lse", "entropy", "distance", "row_sum", "virtual_sink_mass", "first_mass", "output_norm"})
JOINED = frozenset({"hidden_norm", "hidden"})
ONLY_WHOLE = frozenset({"spectral_bound", "weights"})
"""Known only of sequences that came in one piece."""
BY_KEY = ADDED | WRITTEN | {"weights"}
"""Whose last axis is that of the keys."""
ONE_A_ROW = ONLY_WHOLE | {"first_mass"}
"""Known only where each row is one sequence."""


@dataclass
class LayerAccumulator:
    """The tensors of one layer over the steps of the sequences that are open."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    keys: int = 0
    """The most keys that a step has had."""
    virtual_key: bool = False
    """Whether a learned key stands beside them."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.tensors.values())).device if self.tensors else torch.device("cpu")

    def add_attention(
        self, tensors: dict[str, Tensor], *, first_key: int, keys: int, virtual_key: bool = False
    ) -> None:
        """Add one step over its first `keys` keys, of which the first stands at `first_key` of its row."""
        self.steps += 1
        self.virtual_key = virtual_key
        self.keys = max(self.keys, first_key + keys)
        for name, found in tensors.items():
            tensor = found[..., :keys] if name in BY_KEY else found
            before = self.tensors.get(name)
            if name in ADDED or name in WRITTEN:
                self.tensors[name] = _on_keys(before, tensor, first_key, add=name in ADDED)
            elif name in JOINED_BY_HEAD:
                self.tensors[name] = tensor if before is None else torch.cat([before, tensor], dim=2)
            elif self.steps == 1:
                self.tensors[name] = tensor
        if self.steps > 1:
            for name in ONLY_WHOLE & self.tensors.keys():
                del self.tensors[name]

    def add_hidden(self, tensors: dict[str, Tensor]) -> None:
        """Add one step of hidden states; `direction` comes as a sum per sample."""
        for name, tensor in tensors.items():
            before = self.tensors.get(name)
            if before is None:
                self.tensors[name] = tensor
            else:
                self.tensors[name] = torch.cat([before, tensor], dim=1) if name in JOINED else before + tensor

    def aligned(self, queries: SampleAlignment, keys: SampleAlignment, *, packed: bool) -> dict[str, Tensor]:
        """The tensors by sample instead of by row."""
        found = {}
        for name, tensor in self.tensors.items():
            if name in ADDED or name in WRITTEN:
                found[name] = keys.last_axis(tensor)
            elif packed and name in ONE_A_ROW:
                continue
            elif name in JOINED_BY_HEAD:
                found[name] = queries.queries(tensor)
            elif name in JOINED:
                found[name] = queries.tokens(tensor)
            else:
                found[name] = tensor
        return found


def _on_keys(before: Tensor | None, tensor: Tensor, first: int, *, add: bool) -> Tensor:
    if before is None and first == 0:
        return tensor
    total = first + tensor.shape[-1]
    if before is None:
        before = tensor.new_zeros(*tensor.shape[:-1], 0)
    grown = torch.nn.functional.pad(before, (0, max(total - before.shape[-1], 0)))
    if add:
        grown[..., first:total] += tensor
    else:
        grown[..., first:total] = tensor
    return grown
