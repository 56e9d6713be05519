"""The formulas of shared attention and of mixed blocks as the paper states them: a row and a block at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.adapters.attention import SharedAttention
from regard.adapters.lora import LoraAdapters


def silu(values: Tensor) -> Tensor:
    return values / (1 + torch.exp(-values))


def layer_norm(values: Tensor, scale: Tensor, shift: Tensor, epsilon: float = 1e-5) -> Tensor:
    centred = values - values.sum() / len(values)
    return centred / torch.sqrt((centred**2).sum() / len(values) + epsilon) * scale + shift


def highest(embedded: Tensor, real: Tensor) -> Tensor:
    """The vector e of each row: of each feature the highest value among the real tokens."""
    found = []
    for row in range(len(embedded)):
        tokens = [embedded[row, place] for place in range(embedded.shape[1]) if bool(real[row, place])]
        found.append(torch.stack([torch.stack(values).max() for values in zip(*tokens, strict=True)]))
    return torch.stack(found)


def attention(shared: SharedAttention, vectors: Tensor, blocks: int, temperature: float) -> Tensor:
    """The weights a of each row over the first so many blocks."""
    rows = []
    for e in vectors:
        inner = shared.down @ e
        mapped = silu(shared.up @ inner) if shared.projection_order == "published" else shared.up @ silu(inner)
        q = layer_norm(mapped, shared.norm.weight, shared.norm.bias)
        scores = [torch.exp((shared.keys[number] * q).sum() / temperature) for number in range(blocks)]
        rows.append(torch.stack([one / sum(scores) for one in scores]))
    return torch.stack(rows)


def chosen(weights: Sequence[float], frozen: Sequence[int], top_k: int | None) -> list[int]:
    """Of the blocks that are not trained, those that are used: the highest weights."""
    return sorted(frozen, key=lambda number: -weights[number])[: len(frozen) if top_k is None else top_k]


def mixed(
    blocks: LoraAdapters,
    states: Tensor,
    out: Tensor,
    weights: Tensor,
    *,
    top_k: int | None = None,
    detach_old: bool = False,
) -> Tensor:
    """The output y of each row: W x, and what each block that is used adds to it."""
    rows = []
    for row in range(len(states)):
        share = weights if weights.dim() == 1 else weights[row * len(weights) // len(states)]
        given = out[row]
        frozen = [number for number in range(len(share)) if number not in blocks.trained]
        used = {*chosen(share.tolist(), frozen, top_k), *(one for one in blocks.trained if one < len(share))}
        for number in sorted(used):
            old = number not in blocks.trained
            x = states[row].detach() if old and detach_old else states[row]
            delta = blocks.B[number] @ blocks.A[number]
            given = given + share[number] * blocks.scale * (x @ (delta.detach() if old else delta).T)
        rows.append(given)
    return torch.stack(rows)
