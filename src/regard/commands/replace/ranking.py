"""Which heads to keep: orders over all heads, those that need their attention most first (PAPA, figure 5)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.constants import Constants, Head
from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.layers import eval_mode


@dataclass(frozen=True)
class HeadRanking:
    """Heads, the first to stay dynamic first, with the value each was ranked by (larger: kept longer)."""

    heads: tuple[Head, ...]
    values: tuple[float, ...]

    @classmethod
    def by(cls, values: Mapping[Head, float]) -> HeadRanking:
        """The heads by falling value; of equal ones those of later layers first."""
        ranked = sorted(values, key=lambda head: (values[head], head), reverse=True)
        return cls(tuple(ranked), tuple(values[head] for head in ranked))

    def constant(self, dynamic_fraction: float) -> list[Head]:
        """The heads to replace so that this fraction of them stays dynamic, rounded to whole heads."""
        if not 0 <= dynamic_fraction <= 1:
            raise UserError(f"dynamic-fractions: expected numbers from 0 to 1, got {dynamic_fraction:g}")
        return sorted(self.heads[round(dynamic_fraction * len(self.heads)) :])

    def reversed(self) -> HeadRanking:
        """The same from the other end."""
        return HeadRanking(self.heads[::-1], tuple(-value for value in self.values[::-1]))


def rank_by_input_dependence(constants: Constants) -> HeadRanking:
    """By the share of each head's squared weights that its average does not explain: from averaging alone."""
    found = constants.input_dependence()
    return HeadRanking.by({head: float(found[head[:2]][head[2]]) for head in constants.heads})


def rank_by_output_norm(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], constants: Constants) -> HeadRanking:
    """By the mean norm of what each head adds to the residual stream, one forward over the data."""
    with eval_mode(model), watching(model, "head_output_norm") as seen:
        for batch in batches:
            model(**batch)
    rows = seen.frame("head_output_norm")
    rows = rows[rows["head"].notna() & rows["position"].isna()]
    norms = {(row.site, int(row.layer), int(row.head)): float(row.value) for row in rows.itertuples()}
    return HeadRanking.by({head: norms[head] for head in constants.heads})


def rank_by_layer(constants: Constants, *, first_replaced: bool) -> HeadRanking:
    """Layer by layer: the first (or the last) layers are replaced first."""
    sign = 1 if first_replaced else -1
    return HeadRanking.by({head: float(sign * head[1]) for head in constants.heads})


def rank_randomly(constants: Constants, seed: int) -> HeadRanking:
    """Drawn with the seed."""
    heads = random.Random(seed).sample(constants.heads, len(constants.heads))
    return HeadRanking(tuple(heads), tuple(float(rank) for rank in range(len(heads), 0, -1)))


def rank_by_gate(shares: Mapping[Any, Tensor]) -> HeadRanking:
    """By σ(l), the trained share of attention in each head."""
    return HeadRanking.by(
        {(*place, head): float(share) for place, layer in shares.items() for head, share in enumerate(layer)}
    )


RANKINGS = ("lambda", "input-dependence", "output-norm", "first-layers", "last-layers", "random", "reversed")
LABELLED = frozenset({"lambda", "reversed"})
"""Orders that need training on labels; reversed is lambda's from the other end."""


def rank_heads(
    name: str,
    *,
    constants: Constants,
    seed: int,
    lambdas: Callable[[], HeadRanking],
    norms: Callable[[], HeadRanking],
) -> HeadRanking:
    """The order of that name; `lambdas` and `norms` are asked only where they are needed."""
    if name in LABELLED:
        found = lambdas()
        return found.reversed() if name == "reversed" else found
    if name == "input-dependence":
        return rank_by_input_dependence(constants)
    if name == "output-norm":
        return norms()
    if name == "random":
        return rank_randomly(constants, seed)
    if name in ("first-layers", "last-layers"):
        return rank_by_layer(constants, first_replaced=name == "first-layers")
    raise UserError(f"rank-heads-by: expected one of {', '.join(RANKINGS)}, got {name!r}")
