"""How far learning one task undoes another: the gradients of their losses against each other (Bai et al. 2024)."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.model_files import eval_mode

COLUMNS = ("task_index_a", "task_index_b", "dot", "cosine")
"""The columns of what `make_interference_table` gives."""
SLICE = 1 << 20
"""Parameters multiplied at once in float64."""
FEATURES = 1 << 20
"""Numbers kept of a gradient; a longer one is projected on so many, with errors of a thousandth of the norms."""
Rows = TypeVar("Rows")


def compute_gradients(
    module: nn.Module,
    tasks: Sequence[Iterable[Rows]],
    loss: Callable[[nn.Module, Rows], Tensor],
    count: Callable[[Rows], int],
    *,
    parameters: Iterable[nn.Parameter] | None = None,
    max_features: int = FEATURES,
) -> Float[Tensor, "task feature"]:
    """Compute the gradient of each task's mean loss, on the CPU, in float32 (float64 of float64 parameters).

    Of more than `max_features` parameters a random projection is kept, the same for all tasks. It preserves dot
    products on average, with a standard error of about |a| |b| / √max_features.

    The module is in evaluation mode; its modes, `.grad` and the random state stay. `tasks` are the batches of each
    task; `loss` returns the sum of a batch's losses, and `count` their number.
    """
    candidates = module.parameters() if parameters is None else parameters
    trainable = [parameter for parameter in dict.fromkeys(candidates) if parameter.requires_grad]
    if not trainable:
        raise UserError("parameters: expected at least one that requires gradients, got none")
    dtype = reduce(torch.promote_types, [parameter.dtype for parameter in trainable], torch.float32)
    total_size = sum(parameter.numel() for parameter in trainable)
    gradients = torch.zeros(len(tasks), min(total_size, max_features), dtype=dtype)
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), eval_mode(module), torch.enable_grad():
        for index, batches in enumerate(tasks):
            sums = [torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for parameter in trainable]
            total = 0
            for rows in batches:
                total += count(rows)
                step = torch.autograd.grad(loss(module, rows), trainable, allow_unused=True, materialize_grads=True)
                for target, gradient in zip(sums, step, strict=True):
                    target += gradient
            if not total:
                raise UserError(f"tasks: expected rows of every task, got none of task {index + 1}")
            gradient = torch.cat([parameter.flatten().cpu() for parameter in sums]) / total
            gradients[index] = gradient if total_size <= max_features else project(gradient, max_features)
    return gradients


def project(vector: Float[Tensor, " parameter"], features: int) -> Float[Tensor, " feature"]:
    """Return a random projection of a vector: numbers with random signs, summed over every `features`-th one.

    Source:
        Count sketch (Charikar, Chen and Farach-Colton, ICALP 2002) with one row, whose buckets are dealt out in turn.
    """
    projected = vector.new_zeros(features)
    for number, part in enumerate(vector.split(features)):
        generator = torch.Generator().manual_seed(number)
        signs = torch.randint(0, 2, (len(part),), generator=generator, dtype=torch.int8) * 2 - 1
        projected[: len(part)] += part * signs
    return projected


def compute_interference(
    gradients: Float[Tensor, "task parameter"] | Sequence[Float[Tensor, " parameter"]],
) -> tuple[Float[Tensor, "task task"], Float[Tensor, "task task"]]:
    """Return the dot products of the gradients, below 0 where tasks interfere, and their cosines, in float64."""
    if not len(gradients) or {gradient.shape for gradient in gradients} != {(gradients[0].numel(),)}:
        shapes = ", ".join(str(tuple(gradient.shape)) for gradient in gradients) or "none"
        raise UserError(f"gradients: expected a vector for each task, all of one length, got {shapes}")
    dot = torch.zeros(len(gradients), len(gradients), dtype=torch.float64, device=gradients[0].device)
    for begin in range(0, gradients[0].numel(), SLICE):
        chunk = torch.stack([gradient[begin : begin + SLICE].double() for gradient in gradients])
        dot += chunk @ chunk.T
    dot = (dot + dot.T) / 2
    norm = dot.diagonal().sqrt()
    return dot, (dot / torch.outer(norm, norm)).clamp(-1, 1)


def make_interference_table(
    gradients: Float[Tensor, "task parameter"] | Sequence[Float[Tensor, " parameter"]],
) -> pd.DataFrame:
    """Return the interference of each pair of tasks, a task with itself included, each once, as rows of `COLUMNS`."""
    dot, cosine = compute_interference(gradients)
    pairs = torch.triu_indices(len(dot), len(dot)).T.tolist()
    rows = [(a + 1, b + 1, float(dot[a, b]), float(cosine[a, b])) for a, b in pairs]
    return pd.DataFrame(rows, columns=list(COLUMNS))
