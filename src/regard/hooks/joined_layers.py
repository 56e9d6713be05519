"""Layers of the same shape as one observation: what statistics compute of it costs as much as of one small layer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention.device_choice import choose_for
from regard.errors import UserError
from regard.hooks.reductions import REDUCTIONS
from regard.statistics import Observation, Statistic
from regard.statistics.observation import join_observations

MAX_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Most entries of joined layers: beyond, single layers are so large that joining them saves nothing."""


def join_layers(layers: Iterable[Observation]) -> list[Observation]:
    """Return observations with as many layers in each as are of one shape, and all reductions that may be joined."""
    groups: dict[Any, list[list[Observation]]] = {}
    for whole in layers:
        layer = whole.select(lambda name: REDUCTIONS[name].joins_layers)
        entries = sum(tensor.numel() for tensor in layer.tensors.values())
        parts = groups.setdefault(layer.signature, [[]])
        most = choose_for(layer.length.device, MAX_ENTRIES)
        if (len(parts[-1]) + 1) * entries > most and parts[-1]:
            parts.append([])
        parts[-1].append(layer)
    joined = (part for parts in groups.values() for part in parts)
    return [join_observations(part, torch.cat, tuple(layer.layer for layer in part[1:])) for part in joined]


def takes_joined(statistic: Statistic) -> bool:
    """Return whether a statistic takes joined layers, and these hold all that it needs."""
    return statistic.joins_layers and all(REDUCTIONS[need].joins_layers for need in statistic.needs)


def check_finite(layers: Sequence[Observation], joined: Sequence[Observation], batch: int) -> None:
    """Raise a UserError if a reduction of a batch is not finite, of `layers` that were also joined."""
    tensors = [tensor for _, tensor in _should_be_finite(joined)]
    tensors += [tensor for name, tensor in _should_be_finite(layers) if not REDUCTIONS[name].joins_layers]
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]  # a tenth of the time; not finite if an entry is not
    if not sums or bool(torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all()):  # read once
        return
    for layer in layers:
        for name, tensor in _should_be_finite([layer]):
            if not bool(tensor.isfinite().all()):
                where = f"{name} of layer {layer.layer} ({layer.site}) in batch {batch}"
                raise UserError(f"non-finite activations: {where}; check the model and its precision")


def _should_be_finite(layers: Iterable[Observation]) -> Iterator[tuple[str, Tensor]]:
    """Yield the reductions that are finite as long as activations are."""
    for layer in layers:
        for name, tensor in layer.tensors.items():
            if tensor.is_floating_point() and REDUCTIONS[name].finite:
                yield name, tensor
