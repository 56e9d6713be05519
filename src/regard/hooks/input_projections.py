"""Projections of queries and keys, recognized by their names, and smaller ones for modules with constant heads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.attention.call import AttentionCall, as_tensor
from regard.attention.quantized import is_quantized
from regard.attention.tracing import is_traced
from regard.hooks.modules import AttentionLayer, Fused
from regard.hooks.off_loaded import hooks_of
from regard.hooks.split_weights import is_sharded

FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj", "qkv", "in_proj")
SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"), ("query_proj", "key_proj"))
"""Names of the layers for queries and for keys, by family."""
MAX_INDEXED_TOKENS = 64
"""Most tokens whose rows are put in place by one index: more repay a copy of each stretch of rows."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def find_fused_projection(module: nn.Module, outputs: Mapping[nn.Module, Tensor], call: AttentionCall) -> Fused | None:
    """Return the projection of an attention module whose output of this forward holds the values of its call."""
    heads, groups, width = call.query.shape[1], call.value.shape[1], call.value.shape[-1]
    values = call.value.transpose(1, 2).flatten(2)
    bias = getattr(module, "v_bias", 0)  # some models add that of the values afterwards
    for name in FUSED:
        layer: Any = getattr(module, name, None)
        output = outputs.get(layer) if _is_plain(layer, nn.Linear, Conv1D) else None
        if output is None or output.shape[-1] != (heads + 2 * groups) * width:
            continue
        if output.shape[:-1].numel() != values.shape[:-1].numel():  # of several images, of which this is one
            continue
        if torch.allclose(output[..., -groups * width :] + bias, values):
            return name, "parts"
        by_head = output.unflatten(-1, (heads, 3, width)) if heads == groups else None
        if by_head is not None and torch.allclose(by_head[..., 2, :].flatten(2) + bias, values):
            return name, "heads"
    return None


def named_projections(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that project queries or keys by their names."""
    names = (*FUSED, *(name for pair in SEPARATE for name in pair))
    return [part for name in names if (part := module._modules.get(name)) is not None]


class PartialLinear(nn.Module):
    """Some rows of a linear layer, with zeros for the others: (…, inputs) → (…, outputs).

    Its weight has the layout of the layer's, (rows, inputs), or (inputs, rows) of a `Conv1D`. `parts` are the rows as
    numbers of parts of the output, each of `step` features: all of a head, as a rule.
    """

    def __init__(self, layer: nn.Linear | Conv1D, rows: Sequence[int]) -> None:
        super().__init__()
        weight = layer.weight
        self.is_transposed = isinstance(layer, Conv1D)
        self.outputs, self.runs = weight.shape[self.is_transposed], _find_runs(rows)
        self.step = math.gcd(self.outputs, *(bound for run in self.runs for bound in run))
        self.parts = tuple(row // self.step for row in rows if not row % self.step)
        self.bias: nn.Parameter | None = None
        with torch.no_grad():
            index = torch.tensor(list(rows), dtype=torch.long, device=weight.device)
            held = weight.index_select(int(self.is_transposed), index)
            self.weight = nn.Parameter(held, requires_grad=weight.requires_grad)
            if layer.bias is not None:
                self.bias = nn.Parameter(layer.bias[index].clone(), requires_grad=layer.bias.requires_grad)

    def extra_repr(self) -> str:
        """Say what to do about an adapter; the message of PEFT's refusal quotes it."""
        rows = sum(stop - start for start, stop in self.runs)
        advice = "give other modules an adapter, or merge one before heads are replaced"
        return f"{rows} of {self.outputs} rows, of heads that are not constant; {advice}"

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (*inputs.shape[:-1], self.outputs)
        if not self.runs:
            return inputs.new_zeros(shape)  # of their own: a host may clip them in place, or read pairs as complex
        rows = self._multiply(inputs)
        if rows.shape == shape:
            return rows
        if not is_traced() and inputs.shape[:-1].numel() <= MAX_INDEXED_TOKENS:
            by_part = rows.new_zeros(*shape[:-1], self.outputs // self.step, self.step)
            index, held = as_tensor(self.parts, rows.device), rows.view(*shape[:-1], -1, self.step)
            return by_part.index_copy_(-2, index, held).view(shape)
        output = rows.new_zeros(shape)
        offset = 0
        for start, stop in self.runs:
            output[..., start:stop] = rows[..., offset : offset + stop - start]
            offset += stop - start
        return output

    @torch.no_grad()
    def write_to(self, original: nn.Module) -> None:
        """Write the rows that are held, which may have been trained, into the projection that they are of."""
        rows = [row for start, stop in self.runs for row in range(start, stop)]
        for name, held in self.named_parameters():
            whole = original.get_parameter(name)
            index = (slice(None), rows) if self.is_transposed and name == "weight" else (rows,)
            if held.is_meta or whole[index].equal(held):
                continue  # what is not trained stays as it is, and may be shared
            whole[index] = held

    def _multiply(self, inputs: Tensor) -> Tensor:
        if not self.is_transposed or self.bias is None:
            return torch.nn.functional.linear(inputs, self.weight.T if self.is_transposed else self.weight, self.bias)
        rows = torch.addmm(self.bias, inputs.reshape(-1, inputs.shape[-1]), self.weight)
        return rows.view(*inputs.shape[:-1], rows.shape[-1])


def _find_runs(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as (start, stop) of stretches without a gap."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def read_key_heads(layer: AttentionLayer, constant_heads: Sequence[int]) -> tuple[int, ...]:
    """Return the key heads that the other heads of a layer read."""
    heads = range(layer.heads)
    return tuple(sorted({head * layer.groups // layer.heads for head in heads if head not in set(constant_heads)}))


def prune_projections(layer: AttentionLayer, constant_heads: Sequence[int]) -> dict[str, nn.Module]:
    """Return projections to put into an attention module, by name; empty if its own are not recognized.

    Queries of constant heads go, and keys that constant heads alone read.
    """
    width, num_heads, groups = layer.width, layer.heads, layer.groups
    queries = [head for head in range(num_heads) if head not in set(constant_heads)]
    keys = read_key_heads(layer, constant_heads)
    weights = [getattr(getattr(layer.module, name, None), "weight", None) for name in NORMS]
    is_normalised_as_one = bool(queries) and any(weight is not None and weight.numel() > width for weight in weights)
    if layer.own_scores or layer.lends_keys or is_normalised_as_one or is_sharded(layer.module):
        return {}  # they are used for more, those of all heads are normalized as one vector, or rows are elsewhere
    if layer.fused is not None:
        name, order = layer.fused
        is_by_head = order == "heads"
        firsts = (0, width, 2 * width) if is_by_head else (0, num_heads * width, (num_heads + groups) * width)
        parts = zip((queries, keys, range(groups)), firsts, strict=True)
        step = 3 * width if is_by_head else width
        rows = sorted(row for heads, first in parts for row in _rows(heads, width, step, first))
        return {name: PartialLinear(getattr(layer.module, name), rows)}
    for names in SEPARATE:
        projections: list[Any] = [getattr(layer.module, name, None) for name in names]
        sizes = zip(projections, (num_heads * width, groups * width), strict=True)
        if all(_is_plain(projection, nn.Linear) and projection.out_features == size for projection, size in sizes):
            return {
                name: PartialLinear(projection, _rows(heads, width, width))
                for name, projection, heads in zip(names, projections, (queries, keys), strict=True)
            }
    return {}


def _is_plain(projection: Any, *kinds: type[nn.Module]) -> bool:
    """Return whether a projection is of one of some classes, and rows of its weight, in memory, can be taken out."""
    return type(projection) in kinds and not is_quantized(projection.weight) and not any(hooks_of(projection))


def _rows(heads: Iterable[int], width: int, step: int, first: int = 0) -> list[int]:
    return [first + head * step + i for head in heads for i in range(width)]
