"""Router warm-up: training the shared attention to recognize a new task before its adapter is trained.

An adapter begins with B = 0, so its weight changes nothing, the loss does not ask for more of it, and it never learns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.adapters.attention import SharedAttention
from regard.adapters.reflection import divergence
from regard.errors import UserError


class PastTask(NamedTuple):
    """An earlier task: target weights (adapter,) and stored query vectors (row, width)."""

    target: Tensor
    vectors: Tensor


def router_loss(attention: SharedAttention, vectors: Tensor, earlier: Sequence[PastTask], index: int = -1) -> Tensor:
    """Return the mean −log a of a task's own adapter at `index`, plus the divergences of earlier tasks."""
    negative_log_weight = -attention.scores(vectors).log_softmax(-1)[:, index].mean()
    return negative_log_weight + sum(divergences(attention, earlier), torch.zeros_like(negative_log_weight))


def divergences(attention: SharedAttention, earlier: Sequence[PastTask]) -> list[Tensor]:
    """Return the divergence of each earlier task's weights from its target."""
    if not earlier:
        return []
    scores = attention.scores(torch.cat([task.vectors for task in earlier]))
    split_scores = scores.split([len(task.vectors) for task in earlier])
    return [divergence(task.target, task_scores) for task, task_scores in zip(earlier, split_scores, strict=True)]


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
    """Train the key of a task's adapter and the maps with AdamW; return the loss of the last step.

    `vectors` (row, width) are query vectors of the task's rows, of which a step samples at most `batch`, as of those of
    each earlier task. The learning rate rises to `rate` for the fraction `warmup` of `steps`, then falls linearly to 0.
    `own` is the index of the task's adapter, by default the trained one.
    """
    open_blocks = [number for number, key in enumerate(attention.keys) if key.requires_grad]
    if not open_blocks:
        raise UserError("attention: expected one with an open block, got none; open a block, or add one")
    if not len(vectors):
        raise UserError("vectors: expected at least one of the task's rows, got none")
    own = open_blocks[0] if own is None else own
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in attention.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        factor = min(1.0, (step + 1) / max(1.0, warmup * steps)) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        sampled = [task._replace(vectors=_sample_rows(task.vectors, batch, generator)) for task in earlier]
        loss = router_loss(attention, _sample_rows(vectors, batch, generator), sampled, own)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _sample_rows(vectors: Tensor, max_rows: int, generator: torch.Generator) -> Tensor:
    if len(vectors) <= max_rows:
        return vectors
    return vectors[torch.randperm(len(vectors), generator=generator)[:max_rows].to(vectors.device)]
