"""Training the open adapter on its task, and whether the router gives the task's rows to it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.gradients import enable_gradients
from regard.errors import UserError, check_int, warn_user
from regard.models.loss import check_loss
from regard.models.model_files import restore_modes

LOW_OWN_WEIGHT = 0.8
"""Mean weight of its own adapter below which a task's rows are told to be sent elsewhere."""


@dataclass(frozen=True)
class TaskFit:
    """Result of `fit_task`: the loss of each step, mean weights of tasks' own adapters at the end, and the time."""

    losses: tuple[float, ...]
    own_weights: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How an adapter is trained: AdamW, gradients clipped, a rate that rises, then falls linearly to 0."""

    epochs: int = 3
    learning_rate: float = 1e-3
    warmup_ratio: float = 0.06
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_int("epochs", self.epochs, least=1)
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning_rate: expected a number above 0, got {self.learning_rate}")


@enable_gradients()
def train_adapter(
    parameters: Sequence[nn.Parameter],
    batches: Any,
    loss: Callable[[Mapping[str, Any]], Tensor],
    plan: TrainingOptions,
    *,
    count: Callable[[Mapping[str, Any]], int] = lambda batch: 1,
) -> tuple[float, ...]:
    """Train parameters on batches, which have a length; return the loss of each step.

    `count` returns how many losses that of a batch is the mean of: one of none, as of texts that were cut before their
    answers, is no step, and its loss NaN.

    Raises:
        UserError: A loss is no tensor of one number that depends on the parameters, or it or a gradient is not finite;
            the parameters are those of the step before. Or no batch has a loss.
    """
    steps, losses = plan.epochs * len(batches), list[float]()
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay)
    for batch in (batch for _ in range(plan.epochs) for batch in batches):
        step = len(losses)
        rate = plan.learning_rate * min(1.0, (step + 1) / max(1.0, plan.warmup_ratio * steps)) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if not count(batch):
            losses.append(math.nan)
            if len(losses) == len(batches) and all(map(math.isnan, losses)):
                raise UserError("batches: expected at least one label, got none")
            continue
        value = loss(batch)
        check_loss(value)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters, plan.max_grad_norm))
        losses.append(float(value.detach()))
        if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
            optimizer.zero_grad(set_to_none=True)
            got = f"a loss of {losses[-1]:g} and a gradient of norm {norm:g} in step {step + 1} of {steps}"
            raise UserError(f"loss: expected finite numbers, got {got}; is the learning rate too high?")
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return tuple(losses)


@contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Train inside the block; the mode of each module is restored."""
    with restore_modes(model):
        model.train()
        yield


class BatchesOnDevice:
    """Batches, as often as they are wanted, with their tensors on a device."""

    def __init__(self, batches: Any, device: torch.device) -> None:
        if isinstance(batches, Mapping) or not isinstance(batches, Sized):
            got = "one alone" if isinstance(batches, Mapping) else type(batches).__name__
            raise UserError(f"batches: expected a list of them, or a DataLoader with a length, got {got}")
        if not len(batches):
            raise UserError("batches: expected at least one, got none")
        self.batches: Any = batches
        self.device = device

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            named = check_batch(batch).items()
            yield {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in named}


def check_batch(batch: Any) -> Mapping[str, Any]:
    """Return a batch, if it is the inputs of a model by name."""
    if not isinstance(batch, Mapping):
        got = type(batch).__name__
        raise UserError(f"batches: expected the model's inputs by name in each, as a dict, got {got}")
    return batch


def refuse_share(batches: Any, why: str) -> None:
    """Raise UserError if a DataLoader deals its rows out to several processes, as far as its samplers tell.

    PyTorch's `DistributedSampler` has `num_replicas`, that of accelerate and of a Trainer's loader `num_processes`.
    """
    loader = batches.batches if isinstance(batches, BatchesOnDevice) else batches
    of_batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), of_batches, getattr(of_batches, "sampler", None))
    shares = max(getattr(one, name, 1) for one in samplers for name in ("num_replicas", "num_processes"))
    if shares > 1:
        raise UserError(f"batches: expected all rows in every process{why}, got a share of {shares}")


def own_weight(name: str, names: Sequence[str], means: Tensor) -> float:
    """Return the weight of an adapter among the mean weights (adapter,) of its task's rows; warn if it is low."""
    usage = dict(zip(names, means.tolist(), strict=True))
    weight = usage.pop(name)
    if weight < LOW_OWN_WEIGHT:
        other = max(usage, key=lambda other: usage[other])
        warn_user(
            f"{name}: expected an own weight of at least {LOW_OWN_WEIGHT}, got {weight:.2f}; "
            f"the router takes its rows for those of {other} ({usage[other]:.2f})"
        )
    return weight
