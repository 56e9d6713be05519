"""Positions of tokens: in queries and keys (rotary), in the input (sinusoidal), or in the scores (by distance)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

POSITIONS = ("rotary", "none", "sinusoidal", "learned", "alibi", "t5", "t5-bucket-number")
"""`t5-bucket-number` adds the number of the bucket itself, as the code released with Gu et al. 2025 does."""
NUM_BUCKETS, MAX_DISTANCE = 32, 128
NO_SCORE = -1000.0
"""In the place of log 0, which fused kernels would multiply by zero: its exponential is zero as well."""


def rotary_angles(
    positions: Int[Tensor, "*lead token"], width: int, base: float = 10_000.0
) -> tuple[Float[Tensor, "*lead token width"], Float[Tensor, "*lead token width"]]:
    """Return cosine and sine of the rotary angles (arXiv 2104.09864) in float32, half-widths repeated as in Llama."""
    inverse = 1.0 / base ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "batch head token width"],
    cosine: Float[Tensor, "#batch token width"],
    sine: Float[Tensor, "#batch token width"],
) -> Float[Tensor, "batch head token width"]:
    """Rotate queries or keys by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine[:, None].to(x.dtype) + torch.cat([-second, first], dim=-1) * sine[:, None].to(x.dtype)


def sinusoidal_table(length: int, width: int) -> Float[Tensor, "length width"]:
    """Return the table of Vaswani et al. 2017: sines in even columns, cosines in odd ones."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()[:, : width // 2]
    return table


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    """Return 2^(−8h/H) for h from 1 to H (Press et al. 2022)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


def pseudo_logits(
    positions: Int[Tensor, "batch query"], heads: int, length: int, dtype: torch.dtype
) -> Float[Tensor, "batch head query"]:
    """Return log Σ_j exp(−γ_h j) over the positions j behind each query, to `length` − 1 (StableMask, Yin et al. 2024).

    Their scores over the diagonal fall by γ a column from the first, in rows as long as in training whatever the input,
    so that a row does not depend on what comes later. γ of each head is its slope of ALiBi, as in their code.
    """
    decay = alibi_slopes(heads).to(positions.device, dtype)[:, None]
    later = (length - 1 - positions).clamp(min=0)[:, None]
    logits = (
        torch.log(-torch.expm1(-decay * later)) - torch.log(-torch.expm1(-decay)) - decay * (positions[:, None] + 1)
    )
    return logits.clamp(min=NO_SCORE)


def t5_buckets(distances: Int[Tensor, "*lead"]) -> Int[Tensor, "*lead"]:
    """Return the bucket of each distance to an earlier key: exact below 16, then logarithmic to 128 (1910.10683)."""
    exact = NUM_BUCKETS // 2
    distances = distances.clamp(min=0)
    logarithmic = (distances.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (NUM_BUCKETS - exact)
    return torch.where(distances < exact, distances, (exact + logarithmic).long().clamp(max=NUM_BUCKETS - 1))
