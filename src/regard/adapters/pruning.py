"""How much the blocks are used, and what is left of a model's answers without those that nothing selects."""

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
    """How much of each block rows got: the mean and the most over rows, each (block,)."""

    mean: Tensor
    most: Tensor


@dataclass(frozen=True)
class Pruned:
    """What pruning did: the blocks that went, the mean weight of all that there were, and the mean loss of a row."""

    gone: tuple[str, ...]
    usage: dict[str, float]
    loss_before: float
    loss_after: float


def adapter_usage(adapters: AdapterModel, batches: Batches) -> Usage:
    """How much of each block the rows of batches get."""
    _check_batches(batches)
    with _looking(adapters):
        weights = [adapters.routing_weights(**batch).double().cpu() for batch in batches]
    if not weights:
        raise UserError("batches: expected at least one, got none")
    rows = torch.cat(weights)
    return Usage(rows.mean(0), rows.amax(0))


def merge_block(adapters: AdapterModel, name: str, weight: float = 1.0) -> None:
    """Add a block, times `weight`, to the model's own weights, and take it and its key away.

    With the weight that every row gave to the block the answers stay what they were but for the others' shares, which
    again sum to 1. The block is kept apart for `save_pretrained`, which still belongs to the base as it was.
    """
    number = adapters.index_of(name)
    parts = {
        layer: (mixed.blocks.A[number].detach().cpu().clone(), mixed.blocks.B[number].detach().cpu().clone())
        for layer, mixed in adapters.layers("merge").items()
    }
    if adapters.base_sha256 is None:
        adapters.base_sha256 = base_sha256(adapters.model)
    fold(adapters, MergedAdapter(name, float(weight), adapters.provenance[name], parts))
    adapters.delete_adapter(name)


def fold(adapters: AdapterModel, merged: MergedAdapter) -> None:
    """Add what was merged to the weights of each layer."""
    for name, layer in adapters.layers("merge").items():
        down, up = (part.to(layer.weight.device) for part in merged.parts[name])
        delta = merged.weight * layer.blocks.scale * up @ down
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
) -> Pruned:
    """What came of taking out the blocks to which no row of the batches gives at least `least`.

    They are dropped, or with `merge` added to the model's own weights, each times its mean weight. The block that is
    open stays. `loss` gives the mean loss of a batch's rows; without one it is what the model itself returns as loss.
    """
    _check_batches(batches)
    batches = list(batches)
    if not 0 < least < 1:
        raise UserError(f"least: expected a number between 0 and 1, got {least}")
    found, names = adapter_usage(adapters, batches), adapters.adapter_names
    before = _mean_loss(adapters, batches, loss)
    unused = [name for name, most in zip(names, found.most.tolist(), strict=True) if most < least]
    gone = tuple(name for name in unused if name != adapters.active_adapter)
    if len(gone) == len(names):
        raise UserError(
            f"least: expected a share that a block reaches, got {least}; the most is {float(found.most.max()):.4f}"
        )
    shares = dict(zip(names, found.mean.tolist(), strict=True))
    for name in gone:
        if merge:
            merge_block(adapters, name, shares[name])
        else:
            adapters.delete_adapter(name)
    after = _mean_loss(adapters, batches, loss) if gone else before
    return Pruned(gone, shares, before, after)


def _mean_loss(adapters: AdapterModel, batches: list[Mapping[str, Any]], loss: Callable[..., Any] | None) -> float:
    """The mean loss of a row."""
    total, rows = 0.0, 0
    with _looking(adapters):
        for batch in batches:
            value = getattr(adapters(**batch), "loss", None) if loss is None else loss(batch)
            if value is None:
                raise UserError("loss: expected batches with labels, or a function of a batch, got neither")
            count = len(next(iter(batch.values())))
            total, rows = total + float(value) * count, rows + count
    return total / rows


def _check_batches(batches: Any) -> None:
    if isinstance(batches, Mapping):
        raise UserError(f"batches: expected a list of them, got one alone, with {', '.join(map(str, batches))}")


@contextmanager
def _looking(adapters: AdapterModel) -> Iterator[None]:
    """Without gradients and dropout, and as it was afterwards."""
    modes = {module: module.training for module in adapters.modules()}
    adapters.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
