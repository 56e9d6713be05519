"""Usage of adapters, and pruning and merging those that no row selects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base_model import base_sha256
from regard.adapters.model import AdapterModel, MergedAdapter
from regard.errors import UserError

Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Usage:
    """Mean and maximum weight of each adapter over rows, (adapter,)."""

    mean: Tensor
    maximum: Tensor


@dataclass(frozen=True)
class PruneResult:
    """Result of pruning: removed adapters, mean weights of all adapters before, and the mean loss of a row."""

    removed: tuple[str, ...]
    usage: dict[str, float]
    loss_before: float
    loss_after: float


def adapter_usage(adapters: AdapterModel, batches: Batches) -> Usage:
    """Return the usage of each adapter over the rows of batches."""
    _check_batches(batches)
    with _inference(adapters):
        weights = [adapters.routing_weights(**batch).double().cpu() for batch in batches]
    if not weights:
        raise UserError("batches: expected at least one, got none")
    stacked = torch.cat(weights)
    return Usage(stacked.mean(0), stacked.amax(0))


def merge_adapter(adapters: AdapterModel, name: str, weight: float = 1.0) -> None:
    """Add an adapter, times `weight`, to the weights of the model, and remove it and its key.

    If every row gave the adapter that weight, outputs change only because the other weights sum to 1 again. The adapter
    is still saved by `save_pretrained`, whose files belong to the unchanged base.
    """
    index = adapters.index_of(name)
    parts = {
        layer: (mixed.adapters.A[index].detach().cpu().clone(), mixed.adapters.B[index].detach().cpu().clone())
        for layer, mixed in adapters.layers("merge").items()
    }
    if adapters.base_sha256 is None:
        adapters.base_sha256 = base_sha256(adapters.model)
    fold(adapters, MergedAdapter(name, float(weight), adapters.provenance[name], parts))
    adapters.delete_adapter(name)


def fold(adapters: AdapterModel, merged: MergedAdapter) -> None:
    """Add a merged adapter to the weights of each layer."""
    for name, layer in adapters.layers("merge").items():
        down, up = (matrix.to(layer.weight.device) for matrix in merged.parts[name])
        delta = merged.weight * layer.adapters.scale * up @ down
        with torch.no_grad():
            layer.weight.add_((delta if isinstance(layer.base_layer, nn.Linear) else delta.T).to(layer.weight.dtype))
    adapters.merged.append(merged)


def prune(
    adapters: AdapterModel,
    batches: Batches,
    loss: Callable[[Mapping[str, Any]], Any] | None = None,
    least: float = 0.01,
    *,
    merge: bool = False,
) -> PruneResult:
    """Remove adapters to which no row gives a weight of at least `least`; the active adapter stays.

    Args:
        adapters: Model with adapters.
        batches: Batches of inputs.
        loss: Mean loss of a batch's rows; by default the loss that the model returns.
        least: Smallest weight that keeps an adapter.
        merge: Add removed adapters to the weights of the model, times their mean weights.

    Raises:
        UserError: No adapter reaches `least`, or batches have no labels and there is no `loss`.
    """
    _check_batches(batches)
    batches = list(batches)
    if not 0 < least < 1:
        raise UserError(f"least: expected a number between 0 and 1, got {least}")
    usage, names = adapter_usage(adapters, batches), adapters.adapter_names
    loss_before = _mean_loss(adapters, batches, loss)
    unused = [name for name, weight in zip(names, usage.maximum.tolist(), strict=True) if weight < least]
    removed = tuple(name for name in unused if name != adapters.active_adapter)
    if len(removed) == len(names):
        highest = float(usage.maximum.max())
        raise UserError(f"least: expected a weight that an adapter reaches, got {least}; the highest is {highest:.4f}")
    mean_weights = dict(zip(names, usage.mean.tolist(), strict=True))
    for name in removed:
        if merge:
            merge_adapter(adapters, name, mean_weights[name])
        else:
            adapters.delete_adapter(name)
    loss_after = _mean_loss(adapters, batches, loss) if removed else loss_before
    return PruneResult(removed, mean_weights, loss_before, loss_after)


def _mean_loss(adapters: AdapterModel, batches: list[Mapping[str, Any]], loss: Callable[..., Any] | None) -> float:
    """Return the mean loss of a row."""
    total, num_rows = 0.0, 0
    with _inference(adapters):
        for batch in batches:
            value = getattr(adapters(**batch), "loss", None) if loss is None else loss(batch)
            if value is None:
                raise UserError("loss: expected batches with labels, or a function of a batch, got neither")
            count = len(next(iter(batch.values())))
            total, num_rows = total + float(value) * count, num_rows + count
    return total / num_rows


def _check_batches(batches: Any) -> None:
    if isinstance(batches, Mapping):
        raise UserError(f"batches: expected a list of them, got one alone, with {', '.join(map(str, batches))}")


@contextmanager
def _inference(adapters: AdapterModel) -> Iterator[None]:
    """Run without gradients and dropout; restore the modes of all modules."""
    modes = {module: module.training for module in adapters.modules()}
    adapters.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
