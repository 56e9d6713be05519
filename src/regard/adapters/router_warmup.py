"""Opening the gate: teaching the shared attention to know a new task's rows before its block is trained.

A block begins with B = 0, so whatever weight it gets changes nothing, and nothing in a row's loss asks for more of it:
old blocks that are a little right keep what they have, and the new one never learns. The attention reads frozen
embeddings alone, so that it can be taught by itself, on query vectors, at the cost of a few products a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.adapters.attention import SharedAttention
from regard.adapters.reflection import divergence
from regard.errors import UserError


class PastTask(NamedTuple):
    """An earlier task: the mean weights (block,) that its rows had, and vectors (row, width) that stand for them."""

    target: Tensor
    vectors: Tensor


def knowing(attention: SharedAttention, vectors: Tensor, earlier: Sequence[PastTask], own: int = -1) -> Tensor:
    """−log a_own, the mean over vectors of the own block's task, and the divergences of other tasks, added up.

    Each task counts the same, as in a classification of rows by their task.
    """
    known = -attention.scores(vectors).log_softmax(-1)[:, own].mean()
    return known + sum(divergences(attention, earlier), torch.zeros_like(known))


def divergences(attention: SharedAttention, earlier: Sequence[PastTask]) -> list[Tensor]:
    """How far the weights of each earlier task are from where they were."""
    if not earlier:
        return []
    scores = attention.scores(torch.cat([one.vectors for one in earlier]))
    parts = scores.split([len(one.vectors) for one in earlier])
    return [divergence(one.target, part) for one, part in zip(earlier, parts, strict=True)]


def warm_up_router(
    attention: SharedAttention,
    vectors: Tensor,
    earlier: Sequence[PastTask],
    *,
    steps: int,
    rate: float,
    batch: int = 64,
    warmup: float = 0.06,
    seed: int = 0,
    own: int | None = None,
) -> float:
    """Teach a key and the maps to know a task's rows by their vectors (row, width); the loss at the end.

    `own`: the task's block, the one that is open unless it is said. AdamW without decay, its rate rising for a share of
    `steps` and falling linearly to 0, on at most `batch` vectors of each task a step, drawn by `seed`. Nothing else of
    a model is needed, or changed. Raises UserError where no block is open, and without vectors.
    """
    opened = [number for number, key in enumerate(attention.keys) if key.requires_grad]
    if not opened:
        raise UserError("attention: expected one with an open block, got none; open a block, or add one")
    if not len(vectors):
        raise UserError("vectors: expected at least one of the task's rows, got none")
    own = opened[0] if own is None else own
    random = torch.Generator().manual_seed(seed)
    trained = [one for one in attention.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1.0, warmup * steps)) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        some = [PastTask(one.target, _drawn(one.vectors, batch, random)) for one in earlier]
        loss = knowing(attention, _drawn(vectors, batch, random), some, own)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _drawn(vectors: Tensor, most: int, random: torch.Generator) -> Tensor:
    """At most so many of the vectors."""
    if len(vectors) <= most:
        return vectors
    return vectors[torch.randperm(len(vectors), generator=random)[:most].to(vectors.device)]
