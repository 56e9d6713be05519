"""Projections without the queries and keys that constant heads do not use, recognized by their names."""

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
        self.runs = _find_runs(rows)
        self.bias: nn.Parameter | None = None
        with torch.no_grad():
            index = torch.tensor(list(rows), dtype=torch.long, device=weight.device)
            self.weight = nn.Parameter(weight[index].clone(), requires_grad=weight.requires_grad)
            if layer.bias is not None:
                self.bias = nn.Parameter(layer.bias[index].clone(), requires_grad=layer.bias.requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the rows that are held."""
        shape = (*inputs.shape[:-1], self.outputs)
        if not self.runs:
            return inputs.new_zeros(()).expand(shape)
        rows = torch.nn.functional.linear(inputs, self.weight, self.bias)
        if rows.shape == shape:
            return rows
        output = rows.new_zeros(shape)
        offset = 0
        for start, stop in self.runs:
            output[..., start:stop] = rows[..., offset : offset + stop - start]
            offset += stop - start
        return output


def _find_runs(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as (start, stop) of stretches without a gap."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def prune_projections(layer: AttentionLayer, constant_heads: Sequence[int]) -> dict[str, nn.Module]:
    """Return projections to put into an attention module, by name; empty if its own are not recognized.

    Queries of constant heads go, and keys that constant heads alone read.
    """
    constant = set(constant_heads)
    queries = [head for head in range(layer.heads) if head not in constant]
    keys = sorted({head * layer.groups // layer.heads for head in queries})
    if queries and _has_joint_norm(layer):
        return {}
    if layer.fused is not None:
        projection = getattr(layer.module, layer.fused.name)
        return {layer.fused.name: PartialLinear(projection, _fused_rows(layer, layer.fused.order, queries, keys))}
    outputs = (layer.heads * layer.width, layer.groups * layer.width)
    for names in SEPARATE:
        projections: list[Any] = [getattr(layer.module, name, None) for name in names]
        pairs = list(zip(projections, outputs, strict=True))
        if all(type(projection) is nn.Linear and projection.out_features == size for projection, size in pairs):
            return {
                name: PartialLinear(projection, _rows(heads, layer.width))
                for name, projection, heads in zip(names, projections, (queries, keys), strict=True)
            }
    return {}


def _has_joint_norm(layer: AttentionLayer) -> bool:
    """Return whether queries or keys of all heads are normalized as one vector, so that no head can be left out."""
    norms: list[Any] = [getattr(layer.module, name, None) for name in NORMS]
    weights = [getattr(norm, "weight", None) for norm in norms]
    return any(weight is not None and weight.numel() > layer.width for weight in weights)


def _rows(heads: Iterable[int], width: int, first: int = 0, step: int = 0) -> list[int]:
    return [first + head * (step or width) + i for head in heads for i in range(width)]


def _fused_rows(layer: AttentionLayer, order: FusedOrder, queries: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Return the rows of a fused projection that are used: some queries, some keys, all values."""
    width, heads, groups = layer.width, layer.heads, layer.groups
    if order == "parts":
        return (
            _rows(queries, width)
            + _rows(keys, width, heads * width)
            + _rows(range(groups), width, (heads + groups) * width)
        )
    parts = (queries, keys, range(heads))
    return sorted(row for i, part in enumerate(parts) for row in _rows(part, width, i * width, 3 * width))
