"""Patterns of attention matrices, by rules on the shares of a row's mass; PAPA (arXiv 2211.03495) judges by eye."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.errors import UserError

Pattern = Literal["diagonal", "previous token", "next token", "special tokens", "broad", "zero"]
PATTERNS: tuple[Pattern, ...] = ("diagonal", "previous token", "next token", "special tokens", "broad", "zero")

MIN_EXCESS = 0.2  # excess that a pattern needs: 0 for a uniform row, 1 for a row with all its mass in the pattern
MAJORITY = 0.5  # share of the mass above which special tokens prevail in a matrix, or one offset in its band
BRIGHTER = 2.0  # how many times larger the mean weight on a diagonal is than in its neighborhood
NEIGHBORHOOD = 5  # the neighborhood of the band are the offsets from 2 to this one, on both sides
_OFFSETS = {"diagonal": 0, "previous token": -1, "next token": 1}


def classify_pattern(matrix: Tensor, separators: Sequence[int] = ()) -> Pattern:
    """Return the pattern of one matrix (query, key); see `classify_patterns`."""
    if matrix.dim() != 2:
        raise UserError(f"pattern: expected one matrix (query, key), got the shape {tuple(matrix.shape)}")
    return classify_patterns(matrix, separators)[0]


def classify_patterns(matrices: Tensor, separators: Sequence[int] = ()) -> list[Pattern]:
    """Return the pattern of each matrix (…, query, key), leading axes in row-major order.

    The band (offsets −1, 0 and 1) competes with the special columns. The excess of each is (share − uniform) /
    (1 − uniform), of its share of the mass and that of a uniform row. The larger excess names the pattern.

    * "zero": the matrix has no mass.
    * "broad": no excess is at least `MIN_EXCESS`.
    * "special tokens": the special columns.
    * "previous token", "next token": the band, with more than `MAJORITY` of its mass at this offset.
    * "diagonal": the band otherwise.

    `separators` are special columns beside the first; negative ones count from the end.
    """
    shares, uniform = _shares(matrices, separators)
    excess = {
        key: (shares[key] - uniform[key]) / (1 - uniform[key]).clamp_min(1e-12) for key in ("band", "special tokens")
    }
    band = (excess["band"] >= MIN_EXCESS) & (excess["band"] >= excess["special tokens"])
    special = excess["special tokens"] >= MIN_EXCESS  # where the band does not win
    code = torch.full_like(band, PATTERNS.index("broad"), dtype=torch.long)
    code[special] = PATTERNS.index("special tokens")
    code[band] = PATTERNS.index("diagonal")
    for name in ("previous token", "next token"):
        code[band & (shares[name] > MAJORITY * shares["band"])] = PATTERNS.index(name)
    code[shares["band"].isnan()] = PATTERNS.index("zero")
    return [PATTERNS[index] for index in code.flatten().tolist()]


def mass_shares(matrices: Tensor, separators: Sequence[int] = ()) -> dict[str, Tensor]:
    """Return shares of the mass of a row of matrices (…, query, key), averaged over rows, by name.

    Rows without mass are left out; a matrix without mass has NaN. `separators` are as in `classify_patterns`.

    Returns:
        Shares of shape (…): "diagonal", "previous token" and "next token" at the offsets 0, −1 and 1, "band" at all
        three, "special tokens" in the special columns, and "elsewhere".
    """
    return _shares(matrices, separators)[0]


def has_diagonal(matrices: Tensor, separators: Sequence[int] = ()) -> Tensor:
    """Return whether the diagonal of each matrix (…, query, key) is brighter than its neighborhood, as (…).

    The largest mean weight among the offsets −1, 0 and 1 must be more than `BRIGHTER` times the mean weight at the
    offsets from 2 to `NEIGHBORHOOD` on both sides. Special columns are left out.
    """
    weights, has_mass = _normalize_rows(matrices)
    offset = offsets(weights)
    counted = _visible_mask(weights) & ~_special_columns(weights, separators) & has_mass[..., None]
    band = torch.stack([_masked_mean(weights, counted & (offset == step)) for step in (-1, 0, 1)])
    neighborhood = _masked_mean(weights, counted & (offset.abs() >= 2) & (offset.abs() <= NEIGHBORHOOD))
    return band.nan_to_num(0).amax(0) > BRIGHTER * neighborhood


def is_on_special_tokens(matrices: Tensor, separators: Sequence[int] = ()) -> Tensor:
    """Return whether most mass of each matrix (…, query, key) is on special tokens, as (…)."""
    return mass_shares(matrices, separators)["special tokens"] > MAJORITY


def pattern_fractions(matrices: Mapping[str, Tensor], separators: Sequence[int] = ()) -> dict[str, float]:
    """Return the fractions of heads with `has_diagonal` and `is_on_special_tokens`, given matrices by layer."""
    if not matrices:
        raise UserError("patterns: expected the matrices of at least one layer, got none")
    layers = list(matrices.values())
    predicates = {"has_diagonal": has_diagonal, "on_special": is_on_special_tokens}
    return {
        name: float(torch.cat([predicate(layer, separators).flatten() for layer in layers]).double().mean())
        for name, predicate in predicates.items()
    }


def _shares(matrices: Tensor, separators: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the shares of the matrices by name, and those of rows that are uniform over the visible keys."""
    weights, has_mass = _normalize_rows(matrices)
    visible, special, offset = _visible_mask(weights), _special_columns(weights, separators), offsets(weights)
    uniform = visible / visible.sum(-1, keepdim=True)
    regions = {name: offset == step for name, step in _OFFSETS.items()}
    regions["band"] = offset.abs() <= 1
    regions["special tokens"] = special
    regions["elsewhere"] = ~(special | regions["band"])
    shares, uniform_shares = (
        {name: ((rows * region).sum(-1) * has_mass).sum(-1) / has_mass.sum(-1) for name, region in regions.items()}
        for rows in (weights, uniform)
    )
    return shares, uniform_shares


def _normalize_rows(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of absolute values that sum to one, in float64, and which of them have any mass."""
    if matrices.dim() < 2 or not bool(matrices.isfinite().all()):
        reason = "entries that are not finite" if matrices.dim() >= 2 else f"the shape {tuple(matrices.shape)}"
        raise UserError(f"patterns: expected finite matrices (…, query, key), got {reason}")
    size = matrices.detach().double().abs()
    largest = size.amax(-1, keepdim=True)
    size = size / largest.masked_fill(largest == 0, 1)
    total = size.sum(-1, keepdim=True)
    return size / total.masked_fill(total == 0, 1), total[..., 0] > 0


def offsets(weights: Tensor) -> Tensor:
    """Return the position of each key minus that of each query, (query, key), of matrices (…, query, key)."""
    query, key = (torch.arange(count, device=weights.device) for count in weights.shape[-2:])
    return key - query[:, None]


def _visible_mask(weights: Tensor) -> Tensor:
    """Return which keys a query may see; a matrix with nothing above its diagonal counts as causal."""
    above = offsets(weights) > 0
    return ~above | (weights * above).ne(0).any(-1).any(-1)[..., None, None]


def _special_columns(weights: Tensor, separators: Sequence[int]) -> Tensor:
    """Return which columns hold special tokens, (key,)."""
    keys = weights.shape[-1]
    unknown = [column for column in separators if not -keys <= column < keys]
    if unknown:
        raise UserError(f"separators: expected columns of a matrix with {keys}, got {', '.join(map(str, unknown))}")
    special = torch.zeros(keys, dtype=torch.bool, device=weights.device)
    special[[0, *separators]] = True
    return special


def _masked_mean(weights: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the counted entries; NaN if there are none."""
    return (weights * counted).sum((-2, -1)) / counted.sum((-2, -1))
