"""The pattern of a constant matrix: diagonal, previous or next token, special tokens, broad.

PAPA (arXiv 2211.03495) tells these apart by eye; here they are rules on the shares of a row's mass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.errors import UserError

Pattern = Literal["diagonal", "previous token", "next token", "special tokens", "broad", "zero"]
PATTERNS: tuple[Pattern, ...] = ("diagonal", "previous token", "next token", "special tokens", "broad", "zero")

CLEAR = 0.2
"""The excess that a pattern needs: 0 is a row that is the same everywhere, 1 a row with all its mass in the pattern."""

MOST = 0.5
"""The share of mass above which a head stands on special tokens, and of the band's above which one offset names it."""

BRIGHTER = 2.0
"""How many times brighter than its neighbourhood a diagonal is."""

NEIGHBOURHOOD = 5
"""The neighbourhood of the band reaches from offset 2 to this one, on both sides."""

_OFFSETS = {"diagonal": 0, "previous token": -1, "next token": 1}


def classify_pattern(matrix: Tensor, separators: Sequence[int] = ()) -> Pattern:
    """The pattern of one matrix (query, key); see `classify_patterns`."""
    if matrix.dim() != 2:
        raise UserError(f"pattern: expected one matrix (query, key), got the shape {tuple(matrix.shape)}")
    return classify_patterns(matrix, separators)[0]


def classify_patterns(matrices: Tensor, separators: Sequence[int] = ()) -> list[Pattern]:
    """The pattern of each matrix (…, query, key), the leading axes in row-major order.

    Compared are the band (own, previous, next token) and the special columns (the first one and `separators`; negative
    numbers count from the end), each by its excess: the share of mass beyond what a row gives that is the same
    everywhere, as a part of what is left beyond it. The larger excess names the pattern if it is at least `CLEAR`, else
    the matrix is "broad". In the band, the previous or the next token names it if more than `MOST` of the band's mass
    is there, else it is "diagonal". A matrix without any mass is "zero". A matrix may show both; `has_diagonal` and
    `is_on_special_tokens` answer for each alone.
    """
    held, even = _shares(matrices, separators)
    excess = {
        name: (held[name] - even[name]) / (1 - even[name]).clamp_min(1e-12) for name in ("band", "special tokens")
    }
    band = (excess["band"] >= CLEAR) & (excess["band"] >= excess["special tokens"])
    special = (excess["special tokens"] >= CLEAR) & ~band
    code = torch.full_like(band, PATTERNS.index("broad"), dtype=torch.long)
    code[special] = PATTERNS.index("special tokens")
    code[band] = PATTERNS.index("diagonal")
    for name in ("previous token", "next token"):
        code[band & (held[name] > MOST * held["band"])] = PATTERNS.index(name)
    code[held["band"].isnan()] = PATTERNS.index("zero")
    return [PATTERNS[number] for number in code.flatten().tolist()]


def mass_shares(matrices: Tensor, separators: Sequence[int] = ()) -> dict[str, Tensor]:
    """By name the share of a row's mass, a mean over rows, each of the shape (…) of matrices (…, query, key).

    "diagonal", "previous token" and "next token" are the offsets 0, −1 and +1, "band" is their sum, "special tokens"
    is the first column and `separators`, "elsewhere" what is in none of these. Rows without mass are left out; a matrix
    without any has NaN.
    """
    return _shares(matrices, separators)[0]


def has_diagonal(matrices: Tensor, separators: Sequence[int] = ()) -> Tensor:
    """Whether a diagonal is brighter than what is beside it: booleans (…) for matrices (…, query, key).

    The mean weight at the brightest of the offsets −1, 0 and +1 is compared with `BRIGHTER` times the mean weight at
    the offsets 2 to `NEIGHBOURHOOD` on both sides; special columns are left out of both.
    """
    weights, seen = _weights(matrices)
    offset = _offset(weights)
    counted = _visible(weights) & ~_special(weights, separators) & seen[..., None]
    band = torch.stack([_mean(weights, counted & (offset == step)) for step in (-1, 0, 1)])
    beside = _mean(weights, counted & (offset.abs() >= 2) & (offset.abs() <= NEIGHBOURHOOD))
    return band.nan_to_num(0).amax(0) > BRIGHTER * beside


def is_on_special_tokens(matrices: Tensor, separators: Sequence[int] = ()) -> Tensor:
    """Whether more than half of the mass is on special tokens: booleans (…) for matrices (…, query, key)."""
    return mass_shares(matrices, separators)["special tokens"] > MOST


def pattern_fractions(matrices: Mapping[str, Tensor], separators: Sequence[int] = ()) -> dict[str, float]:
    """The fractions of heads that `has_diagonal` and `is_on_special_tokens`, of layers (head, query, key)."""
    if not matrices:
        raise UserError("patterns: expected the matrices of at least one layer, got none")
    layers = list(matrices.values())
    return {
        "has_diagonal": float(
            torch.cat([has_diagonal(layer, separators).flatten() for layer in layers]).double().mean()
        ),
        "on_special": float(
            torch.cat([is_on_special_tokens(layer, separators).flatten() for layer in layers]).double().mean()
        ),
    }


def _shares(matrices: Tensor, separators: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The shares by name of the matrices, and of rows that are the same everywhere a query may look."""
    weights, seen = _weights(matrices)
    visible, special, offset = _visible(weights), _special(weights, separators), _offset(weights)
    even = visible / visible.sum(-1, keepdim=True).clamp_min(1)
    places = {name: offset == step for name, step in _OFFSETS.items()}
    places["band"] = offset.abs() <= 1
    places["special tokens"] = special
    places["elsewhere"] = ~(special | places["band"])
    held = {name: _over_rows((weights * place).sum(-1), seen) for name, place in places.items()}
    return held, {name: _over_rows((even * place).sum(-1), seen) for name, place in places.items()}


def _weights(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float64 that sum to one, and which of them have any mass."""
    if matrices.dim() < 2 or not bool(matrices.isfinite().all()):
        what = "entries that are not finite" if matrices.dim() >= 2 else f"the shape {tuple(matrices.shape)}"
        raise UserError(f"patterns: expected finite matrices (…, query, key), got {what}")
    size = matrices.detach().double().abs()
    size = size / _or_one(size.amax(-1, keepdim=True))
    total = size.sum(-1, keepdim=True)
    return size / _or_one(total), total[..., 0] > 0


def _or_one(size: Tensor) -> Tensor:
    return size.masked_fill(size == 0, 1)


def _offset(weights: Tensor) -> Tensor:
    """Key minus query, (query, key)."""
    query, key = (torch.arange(count, device=weights.device) for count in weights.shape[-2:])
    return key - query[:, None]


def _visible(weights: Tensor) -> Tensor:
    """Where a query may look, (…, query, key): a matrix with nothing above its diagonal is taken for a causal one."""
    above = _offset(weights) > 0
    return ~above | (weights * above).ne(0).any(-1).any(-1)[..., None, None]


def _special(weights: Tensor, separators: Sequence[int]) -> Tensor:
    """Which columns hold special tokens, (key,)."""
    keys = weights.shape[-1]
    wrong = [column for column in separators if not -keys <= column < keys]
    if wrong:
        raise UserError(f"separators: expected columns of a matrix with {keys}, got {', '.join(map(str, wrong))}")
    special = torch.zeros(keys, dtype=torch.bool, device=weights.device)
    special[[0, *separators]] = True
    return special


def _over_rows(values: Tensor, seen: Tensor) -> Tensor:
    """The mean over the rows that have mass; NaN where none has."""
    return (values * seen).sum(-1) / seen.sum(-1)


def _mean(weights: Tensor, counted: Tensor) -> Tensor:
    """The mean of the counted entries; NaN where there are none."""
    return (weights * counted).sum((-2, -1)) / counted.sum((-2, -1))
