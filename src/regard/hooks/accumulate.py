"""Reductions of one layer, joined over the steps of a cached forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.hooks.alignment import SampleAlignment
from regard.hooks.reductions import REDUCTIONS

CONCAT_DIM = {"query": 2, "token": 1}
"""The dimension of the steps, by `Reduction.axis`."""


@dataclass
class LayerAccumulator:
    """The reductions of one layer so far, over the steps of the open sequences.

    `queries` are those of all steps, from position `first_query` on; `keys` are the most of a step; `virtual_key` says
    whether a learned key stands beside them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    queries: int = 0
    first_query: int = 0
    keys: int = 0
    virtual_key: bool = False
    kept_hidden: list[Tensor] = field(default_factory=list)
    """Hidden states of the latest steps of one token, which are not reduced yet."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device if self.tensors else torch.device("cpu")

    def add_attention(
        self, tensors: dict[str, Tensor], *, queries: slice, first_key: int, keys: int, virtual_key: bool
    ) -> None:
        """Add the reductions of a call of some queries: its first key stands at `first_key`, `keys` hold tokens."""
        self.first_query = self.first_query if self.steps else queries.start
        self.steps += 1
        self.queries += queries.stop - queries.start
        self.virtual_key = virtual_key
        self.keys = max(self.keys, first_key + keys)
        self.add_tensors(tensors, first_key=first_key, keys=keys)

    def add_tensors(self, tensors: dict[str, Tensor], *, first_key: int = 0, keys: int | None = None) -> None:
        """Add further reductions of the latest call, or those of hidden states, by sample as sums over its tokens."""
        for name, tensor in tensors.items():
            reduction = REDUCTIONS[name]
            if reduction.axis in ("key", "call"):
                tensor = tensor[..., :keys]
            if reduction.axis == "key":
                is_sum = reduction.steps == "add"
                self.tensors[name] = _join_keys(self.tensors.get(name), tensor, first_key, is_sum=is_sum)
            elif reduction.steps == "whole" and self.steps > 1:
                self.tensors.pop(name, None)
            else:
                before = self.tensors.get(name)
                if before is not None and reduction.steps == "add":
                    tensor = before + tensor
                elif before is not None:
                    tensor = torch.cat([before, tensor], dim=CONCAT_DIM[reduction.axis])
                self.tensors[name] = tensor

    def append(self, part: LayerAccumulator, first: int, num_first_keys: int) -> None:
        """Add a part of a sample, whose tokens see each other alone and begin at position `first`."""
        tensors = {name: tensor for name, tensor in part.tensors.items() if REDUCTIONS[name].source != "hidden"}
        if "first_mass" in tensors:
            mass = torch.nn.functional.pad(tensors["first_mass"], (min(first, num_first_keys), 0))
            tensors["first_mass"] = mass[..., :num_first_keys]
        queries = slice(first, first + part.queries)
        self.add_attention(tensors, queries=queries, first_key=first, keys=part.keys, virtual_key=part.virtual_key)

    def take_back(self, tensors: dict[str, Tensor], queries: int) -> None:
        """Forget the latest call, of so many queries, before which the tensors were these."""
        self.tensors, self.steps, self.queries = tensors, self.steps - 1, self.queries - queries

    def add_hidden_rows(self, part: LayerAccumulator, rows: slice) -> None:
        """Add the reductions of a sample's hidden states, which are rows of those of several samples."""
        for name, tensor in part.tensors.items():
            if REDUCTIONS[name].source == "hidden":
                sample = tensor[:, rows]
                self.tensors[name] = sample.sum(1) if REDUCTIONS[name].axis == "sample" else sample

    def align(self, queries: SampleAlignment, keys: SampleAlignment, *, packed: bool) -> dict[str, Tensor]:
        """Return the tensors by sample instead of by row; of packed rows those that are known of them."""
        by_axis = {"key": keys.align_keys, "query": queries.align_queries, "token": queries.align_tokens}
        aligned = {}
        for name, tensor in self.tensors.items():
            reduction = REDUCTIONS[name]
            if reduction.packed or not packed:
                if reduction.axis == "key" and tensor.shape[-1] < self.keys:
                    tensor = torch.nn.functional.pad(tensor, (0, self.keys - tensor.shape[-1]))
                align = by_axis.get(reduction.axis)
                aligned[name] = tensor if align is None else align(tensor)
        return aligned


def _join_keys(before: Tensor | None, tensor: Tensor, first: int, *, is_sum: bool) -> Tensor:
    """Add a step to sums by key, or write it over what is known of its keys; the first stands at `first`."""
    if before is None and first == 0:
        return tensor
    total = first + tensor.shape[-1]
    if before is None:
        before = tensor.new_zeros(*tensor.shape[:-1], 0)
    joined = torch.nn.functional.pad(before, (0, max(total - before.shape[-1], 0)))
    if is_sum:
        joined[..., first:total] += tensor
    else:
        joined[..., first:total] = tensor
    return joined
