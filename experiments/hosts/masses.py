"""Compare the mean weight of every key with that of the weights that a host returns."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from regard.hooks import Watch

TOLERANCE = 1e-4
FIELDS_OF_WEIGHTS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
"""Fields of outputs with weights, by site."""


class Difference(Exception):
    """Regard and the host differ, or a number is impossible."""


def find_mass_difference(expected: Any, watch: Watch, mask: Tensor | None, are_means: bool = False) -> float | None:
    """Return the largest difference between the mean mass of keys and that of eager weights; None without weights.

    `are_means` says that the host returns the mean of its heads' weights in the place of each.
    """
    frame = watch.frame("column_mass")
    all_sites = {site: _weights(getattr(expected, field, None)) for site, field in FIELDS_OF_WEIGHTS.items()}
    sites = {site: weights for site, weights in all_sites.items() if weights}
    both = bool(sites)
    if not sites and (weights := _weights(getattr(expected, "attentions", None))):
        names = [name for name in dict.fromkeys(frame["site"]) if not name.startswith("cross")]
        if len(names) != 1:
            return None
        sites[names[0]] = weights
    worst = None
    for site, weights in sites.items():
        rows = _rows_of_site(frame, site, "encoder" in sites)
        layers = sorted(set(rows["layer"]))
        if site == "cross" and not layers:
            continue  # deformable attention, which samples points and has no keys
        if not both and len(layers) < len(weights) == len(frame.groupby(["site", "layer"])):
            return None  # the host returns the weights of its cross-attention among those of its self-attention
        if len(layers) != len(weights):
            raise Difference(f"{len(layers)} layers ({site}) where the host has {len(weights)}")
        for layer, matrix in zip(layers, weights, strict=True):
            query_mask = mask if site == "encoder" or not both else None
            key_mask = mask if site in ("encoder", "cross") or not both else None
            mass = _mean_mass(matrix, query_mask, key_mask)
            values = rows[rows["layer"] == layer].sort_values(["head", "position"])["value"].to_numpy()
            if values.size != mass.numel():
                return worst
            measured = torch.tensor(values).reshape(mass.shape)
            if are_means:
                mass, measured = mass.mean(0), measured.mean(0)
            difference = float((measured - mass).abs().max())
            if difference > TOLERANCE:
                raise Difference(f"weights of {site} layer {layer} differ by {difference:.1e}")
            worst = max(worst or 0.0, difference)
    return worst


def _rows_of_site(frame: pd.DataFrame, site: str, has_encoder: bool) -> pd.DataFrame:
    """Return the rows of a site of the host. A decoder that sees all queries is an encoder by its mask."""
    names = frame["site"]
    if site == "cross":
        is_cross = names.str.startswith("cross")
        return frame[is_cross if names[is_cross].nunique() == 1 else names == "cross"]
    if site == "decoder" and not (names == "decoder").any():
        is_decoder = names.str.fullmatch(r"encoder@(.*\.)?decoder")
        return frame[is_decoder if is_decoder.any() or has_encoder else names == "encoder"]
    return frame[names == site]


def _weights(attentions: Any) -> list[Tensor]:
    """Return the weights (batch, head, query, key) of the layers that have any."""
    if not isinstance(attentions, (list, tuple)):
        return []
    tensors = [tensor for tensor in attentions if isinstance(tensor, Tensor) and _are_shares(tensor)]
    return tensors if all(tensor.ndim == 4 for tensor in tensors) else []


def _are_shares(weights: Tensor) -> bool:
    """Whether these can be weights of a softmax: layers of linear attention return other matrices."""
    return bool(weights.min() >= 0) and bool(weights.sum(-1).max() <= 1 + 1e-3)


def _mean_mass(weights: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Return the mean over queries and samples of the weight of each key, (head, position)."""
    batch, heads, queries, keys = weights.shape
    total, count = torch.zeros(heads, keys, dtype=torch.float64), torch.zeros(keys, dtype=torch.float64)
    for sample in range(batch):
        matrix = weights[sample].double()
        if query_mask is not None and query_mask.shape[1] == queries:
            matrix = matrix[:, query_mask[sample].bool()]
        if key_mask is not None and key_mask.shape[1] == keys:
            matrix = matrix[:, :, key_mask[sample].bool()]
        length = matrix.shape[-1]
        total[:, :length] += matrix.mean(1)
        count[:length] += 1
    return total / count.clamp(min=1)
