"""Layers of the same shape as one observation: what statistics compute of it costs as much as of one small layer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention.device_choice import choose_for
from regard.errors import UserError
from regard.hooks.reductions import REDUCTIONS
from regard.statistics import Observation, Statistic

MAX_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Most entries of joined layers: beyond, single layers are so large that joining them saves nothing."""


def join_layers(layers: Iterable[Observation]) -> list[Observation]:
    """Return observations with as many layers in each as are of one shape, and all reductions that may be joined."""
    groups: dict[Any, list[list[Observation]]] = {}
    for layer in layers:
        tensors = {name: tensor for name, tensor in layer.tensors.items() if REDUCTIONS[name].joins_layers}
        entries = sum(tensor.numel() for tensor in tensors.values())
        parts = groups.setdefault(_signature(layer, tensors), [[]])
        most = choose_for(layer.length.device, MAX_ENTRIES)
        if (len(parts[-1]) + 1) * entries > most and parts[-1]:
            parts.append([])
        parts[-1].append(layer)
    return [_join(part) for parts in groups.values() for part in parts]


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


def _signature(layer: Observation, tensors: dict[str, Tensor]) -> Any:
    """Return what layers must have in common."""
    optional = (layer.token_ids, layer.modality, layer.query_token_ids, layer.query_modality)
    shapes = [None if tensor is None else tensor.shape for tensor in optional]
    named = [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in sorted(tensors.items())]
    return layer.site, layer.causal, layer.virtual_key, *shapes, *named


def _join(layers: Sequence[Observation]) -> Observation:
    """Return layers of one shape as one observation."""
    first = layers[0]
    return Observation(
        site=first.site,
        layer=first.layer,
        more_layers=tuple(layer.layer for layer in layers[1:]),
        causal=first.causal,
        length=torch.cat([layer.length for layer in layers]),
        keys=torch.cat([layer.keys for layer in layers]),
        token_ids=_cat([layer.token_ids for layer in layers]),
        modality=_cat([layer.modality for layer in layers]),
        query_token_ids=_cat([layer.query_token_ids for layer in layers]),
        query_modality=_cat([layer.query_modality for layer in layers]),
        virtual_key=first.virtual_key,
        tensors={
            name: torch.cat([layer.tensors[name] for layer in layers])
            for name in first.tensors
            if REDUCTIONS[name].joins_layers
        },
    )


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known) if known else None
