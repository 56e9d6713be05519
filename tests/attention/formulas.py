"""Attention as the papers write it: matrices and loops in float64, with nothing of the library."""

import math

import torch
from torch import Tensor


def output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    weighting: str = "softmax",
    normalisation: str = "none",
    shift: float = 0.0,
    logit: Tensor | None = None,
    extra_key: Tensor | None = None,
    extra_value: Tensor | None = None,
    distance: Tensor | None = None,
    slopes: Tensor | None = None,
    window: int | None = None,
    prefix: int = 0,
    top_k: int | None = None,
    offset: int = 0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Σ_j A_ij v_j, head by head and row by row: q (B, H, n, d), k and v (B, G, m, ·)."""
    batch, heads, queries, _ = q.shape
    shares = heads // k.shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            rows += [
                row(
                    q[b, h, i],
                    *seen(k[b, h // shares], v[b, h // shares], i + offset, window, prefix, real(key_mask, b)),
                    i=i + offset,
                    scale=scale,
                    weighting=weighting,
                    normalisation=normalisation,
                    shift=shift,
                    logit=None if logit is None else logit[h] if logit.ndim == 1 else logit[b, h, i],
                    extra_key=of(extra_key, h),
                    extra_value=of(extra_value, h),
                    distance=of(distance, h),
                    slope=0.0 if slopes is None else slopes[h],
                    top_k=top_k,
                )
                for i in range(queries)
            ]
    return torch.stack(rows).view(batch, heads, queries, -1)


def of(tensor: Tensor | None, head: int) -> Tensor | None:
    return None if tensor is None else tensor[head if len(tensor) > 1 else 0]


def real(key_mask: Tensor | None, sample: int) -> list[bool] | None:
    return None if key_mask is None else key_mask[sample].tolist()


def seen(
    k: Tensor, v: Tensor, i: int, window: int | None, prefix: int, there: list[bool] | None
) -> tuple[Tensor, Tensor, list[int]]:
    """The keys and values that query i sees, and where these stand."""
    there = [True] * len(k) if there is None else there
    begin = there.index(True) if True in there else 0
    at = []
    for j in range(len(k)):
        near = j <= i and (window is None or i - j < window)
        if there[j] and (near or j - begin < prefix):
            at.append(j)
    return k[at], v[at], at


def row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: list[int],
    *,
    i: int,
    scale: float,
    weighting: str,
    normalisation: str,
    shift: float,
    logit: Tensor | None,
    extra_key: Tensor | None,
    extra_value: Tensor | None,
    distance: Tensor | None,
    slope: Tensor | float,
    top_k: int | None,
) -> Tensor:
    """The output of one query."""
    gap = [max(i - j, 0) for j in at]
    s = k @ q * scale + shift - slope * torch.tensor(gap, dtype=q.dtype)
    if distance is not None:
        s = s + distance[gap]
    if top_k is not None:
        best = s.argsort(descending=True)[:top_k]
        s, v = s[best], v[best]
    beside, added = [], torch.zeros_like(v.new_zeros(v.shape[-1]))
    if extra_key is not None:
        beside = [(extra_key @ q * scale + shift).view(1)]
    elif logit is not None:
        beside = [logit.view(1)]
    elif extra_value is not None:
        added = extra_value
    if beside:
        s = torch.cat([*beside, s])
        first = torch.zeros_like(added) if extra_value is None else extra_value
        v = torch.cat([first[None], v])
    if not len(s):
        return added
    return weigh(s, weighting, normalisation) @ v + added


def weigh(s: Tensor, weighting: str, normalisation: str) -> Tensor:
    """The weights of one row: the table of Gu et al. 2025, and softpick (Zuhri et al. 2025)."""
    if weighting == "softmax":
        e = (s - s.max()).exp()
        return e / e.sum()
    if weighting == "softpick":
        m = max(float(s.detach().max()), 0.0)
        e = (s - m).exp() - math.exp(-m)
        return e.clamp(min=0) / (e.abs().sum() + 1e-8)
    a = {
        "sigmoid": lambda: 1 / (1 + (-s).exp()),
        "elu": lambda: torch.where(s > 0, s + 1, s.clamp(max=0).exp()),
        "linear": lambda: s,
    }[weighting]()
    total = a.sum()
    return {"none": a, "sum": a / (total + 1e-8), "clamped-sum": a / total.abs().clamp(min=1)}[normalisation]
