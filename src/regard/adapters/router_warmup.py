"""Router warm-up: training the shared attention to recognize a new task before its adapter is trained.

An adapter begins with B = 0, so its weight changes nothing, the loss does not ask for more of it, and it never learns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.adapters.attention import SharedAttention
from regard.adapters.reflection import mean_weights, pad_target, row_divergences
from regard.attention.gradients import enable_gradients
from regard.errors import UserError

STEPS, RATE, STORED = 300, 2e-3, 100
"""Of `learn_task`: steps and learning rate of the warm-up, and the largest number of query vectors that are kept."""


class PastTask(NamedTuple):
    """An earlier task: target weights (adapter,) and stored query vectors (row, width)."""

    target: Tensor
    vectors: Tensor


class _PastRows(NamedTuple):
    """The rows of all earlier tasks: their targets (row, adapter) and query vectors, and their task and its size."""

    targets: Tensor
    vectors: Tensor
    tasks: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, earlier: Sequence[PastTask], adapters: int) -> "_PastRows":
        targets = torch.stack([pad_target(task.target, adapters) for task in earlier])
        counts = torch.tensor([len(task.vectors) for task in earlier], device=targets.device)
        if not int(counts.min()):
            raise UserError("vectors: expected at least one for each earlier task, got none")
        tasks = torch.arange(len(earlier), device=targets.device).repeat_interleave(counts)
        return cls(targets[tasks], torch.cat([task.vectors for task in earlier]), tasks, counts[tasks])

    def sample(self, count: int, generator: torch.Generator) -> "_PastRows":
        """Draw so many rows, of each task alike often; the rows as they are if there are no more."""
        if len(self.vectors) <= count:
            return self
        drawn = torch.multinomial(1 / self.sizes.cpu().double(), count, replacement=True, generator=generator)
        tasks, known = int(self.tasks[-1]) + 1, self.take(drawn.to(self.tasks.device))
        return known._replace(sizes=torch.full_like(known.sizes, count / tasks, dtype=torch.float32))

    def take(self, rows: Tensor) -> "_PastRows":
        return _PastRows(*(values[rows] for values in self))

    def losses(self, attention: SharedAttention) -> Tensor:
        """Return each row's divergence, divided by the number of rows of its task."""
        return row_divergences(self.targets, attention.scores(self.vectors)) / self.sizes


def divergences(attention: SharedAttention, earlier: Sequence[PastTask]) -> Tensor:
    """Return the divergence of each earlier task's weights from its target, (task,)."""
    if not earlier:
        return attention.down.new_zeros(0)
    rows = _PastRows.of(earlier, int(attention.count))
    losses = rows.losses(attention)
    return losses.new_zeros(len(earlier)).index_add(0, rows.tasks, losses)


@enable_gradients()
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

    The loss is the mean −log a of the rows' own adapter, plus the divergences of earlier tasks.
    `vectors` (row, width) are query vectors of the task's rows. A step samples at most `batch` of them, and as many of
    those of all earlier tasks together, each task alike often: it costs the same at any number of tasks. The learning
    rate rises to `rate` for the fraction `warmup` of `steps`, then falls linearly to 0.
    `own` is the index of the task's adapter, by default the trained one.
    """
    open_blocks = [number for number, key in enumerate(attention.keys) if key.requires_grad]
    if not open_blocks:
        raise UserError("attention: expected one with an open adapter, got none; open an adapter, or add one")
    if not len(vectors):
        raise UserError("vectors: expected at least one of the task's rows, got none")
    own = open_blocks[0] if own is None else own
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in attention.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    past_rows = _PastRows.of(earlier, int(attention.count)) if earlier else None
    loss = torch.zeros(())
    for step in range(steps):
        factor = min(1.0, (step + 1) / max(1.0, warmup * steps)) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        loss = -attention.scores(_sample_rows(vectors, batch, generator)).log_softmax(-1)[:, own].mean()
        if past_rows is not None:
            loss = loss + past_rows.sample(batch, generator).losses(attention).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def learn_task(attention: SharedAttention, block: int, vectors: Tensor, earlier: Sequence[PastTask]) -> PastTask:
    """Warm up the router for the rows of an adapter's task, freeze it, and return what later tasks reflect on."""
    attention.set_trainable(block)
    if int(attention.count) > 1:
        warm_up_router(attention, vectors, earlier, steps=STEPS, rate=RATE, own=block)
    attention.set_trainable(None)
    with torch.no_grad():
        target = mean_weights(attention(vectors))
    return PastTask(target, _sample_rows(vectors, STORED, torch.Generator().manual_seed(block)))


def _sample_rows(vectors: Tensor, max_rows: int, generator: torch.Generator) -> Tensor:
    if len(vectors) <= max_rows:
        return vectors
    return vectors[torch.randperm(len(vectors), generator=generator)[:max_rows].to(vectors.device)]
