"""Projections that compute only what is used: constant heads have no use for queries and keys.

A layer is thinned by putting a `PartialLinear` in the place of its own: it holds the rows that are used and gives the
width that the host expects, with zeros where nothing will look. Which layers those are is told by their names, and for
one projection that makes queries, keys and values together by comparing its output with the values of a real call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.hooks.fused_projection import FusedOrder

if TYPE_CHECKING:
    from regard.hooks.layers import AttentionLayer

SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"), ("query_proj", "key_proj"))
"""Names of the layers for queries and for keys, by family."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


class PartialLinear(nn.Module):
    """Some rows of a linear layer, with zeros for the others: (…, inputs) → (…, outputs)."""

    def __init__(self, layer: nn.Linear | Conv1D, rows: Sequence[int]) -> None:
        super().__init__()
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        self.outputs = weight.shape[0]
        self.runs = _runs(rows)
        self.bias: nn.Parameter | None = None
        with torch.no_grad():
            kept = torch.tensor(list(rows), dtype=torch.long, device=weight.device)
            self.weight = nn.Parameter(weight[kept].clone(), requires_grad=weight.requires_grad)
            if layer.bias is not None:
                self.bias = nn.Parameter(layer.bias[kept].clone(), requires_grad=layer.bias.requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        """The rows that are held, in their places."""
        shape = (*inputs.shape[:-1], self.outputs)
        if not self.runs:
            return inputs.new_zeros(()).expand(shape)
        found = torch.nn.functional.linear(inputs, self.weight, self.bias)
        if found.shape == shape:
            return found
        result = found.new_zeros(shape)
        done = 0
        for start, stop in self.runs:
            result[..., start:stop] = found[..., done : done + stop - start]
            done += stop - start
        return result


def _runs(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers in ascending order as (start, stop) of stretches without a gap."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def prune_projections(place: AttentionLayer, constant: Sequence[int]) -> dict[str, nn.Module]:
    """What to put in the place of a module's projections, by name; empty if they were not recognised.

    Queries of constant heads go, and the keys of groups whose heads are all constant.
    """
    fixed = set(constant)
    shares = place.heads // place.groups
    queries = [head for head in range(place.heads) if head not in fixed]
    keys = sorted({head // shares for head in queries})
    if queries and _normed_together(place):
        return {}
    if place.fused is not None:
        layer = getattr(place.module, place.fused.name)
        return {place.fused.name: PartialLinear(layer, _fused_rows(place, place.fused.order, queries, keys))}
    found: dict[str, nn.Module] = {}
    for names in SEPARATE:
        layers: list[Any] = [getattr(place.module, name, None) for name in names]
        wide = (place.heads * place.width, place.groups * place.width)
        if all(type(layer) is nn.Linear and layer.out_features == out for layer, out in zip(layers, wide, strict=True)):
            for name, layer, kept in zip(names, layers, (queries, keys), strict=True):
                found[name] = PartialLinear(layer, _rows(kept, place.width))
            break
    return found


def _normed_together(place: AttentionLayer) -> bool:
    """Whether queries or keys of all heads are normalised as one vector, so that no head can be left out."""
    norms = (getattr(place.module, name, None) for name in NORMS)
    return any(getattr(norm, "weight", None) is not None and norm.weight.numel() > place.width for norm in norms)  # type: ignore[union-attr]


def _rows(heads: Iterable[int], width: int, first: int = 0, step: int = 0) -> list[int]:
    return [first + head * (step or width) + i for head in heads for i in range(width)]


def _fused_rows(place: AttentionLayer, order: FusedOrder, queries: Sequence[int], keys: Sequence[int]) -> list[int]:
    """The rows of a fused projection that are used: some queries, some keys, all values."""
    width, heads, groups = place.width, place.heads, place.groups
    if order == "parts":
        return (
            _rows(queries, width)
            + _rows(keys, width, heads * width)
            + _rows(range(groups), width, (heads + groups) * width)
        )
    parts = (queries, keys, range(heads))
    return sorted(row for part, kept in enumerate(parts) for row in _rows(kept, width, part * width, 3 * width))
