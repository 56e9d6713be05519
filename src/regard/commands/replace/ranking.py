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
from regard.hooks.layers import evaluating


@dataclass(frozen=True)
class Order:
    """Heads, the first to stay dynamic first, with the value each was ranked by (larger: kept longer)."""

    heads: tuple[Head, ...]
    values: tuple[float, ...]

    @classmethod
    def by(cls, values: Mapping[Head, float]) -> Order:
        """The heads by falling value; of equal ones those of later layers first."""
        ranked = sorted(values, key=lambda head: (values[head], head), reverse=True)
        return cls(tuple(ranked), tuple(values[head] for head in ranked))

    def constant(self, fraction_dynamic: float) -> list[Head]:
        """The heads to replace so that this fraction of them stays dynamic, rounded to whole heads."""
        if not 0 <= fraction_dynamic <= 1:
            raise UserError(f"fractions: expected numbers from 0 to 1, got {fraction_dynamic:g}")
        return sorted(self.heads[round(fraction_dynamic * len(self.heads)) :])

    def reversed(self) -> Order:
        """The same from the other end."""
        return Order(self.heads[::-1], tuple(-value for value in self.values[::-1]))


def by_input_dependence(constants: Constants) -> Order:
    """By the share of each head's squared weights that its average does not explain: from averaging alone."""
    found = constants.input_dependence()
    return Order.by({head: float(found[head[:2]][head[2]]) for head in constants.heads})


def by_output_norm(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], constants: Constants) -> Order:
    """By the mean norm of what each head adds to the residual stream, one forward over the data."""
    with evaluating(model), watching(model, "head_output_norm") as seen:
        for batch in batches:
            model(**batch)
    rows = seen.frame("head_output_norm")
    rows = rows[rows["head"].notna() & rows["position"].isna()]
    norms = {(row.site, int(row.layer), int(row.head)): float(row.value) for row in rows.itertuples()}
    return Order.by({head: norms[head] for head in constants.heads})


def by_layer(constants: Constants, *, first_replaced: bool) -> Order:
    """Layer by layer: the first (or the last) layers are replaced first."""
    sign = 1 if first_replaced else -1
    return Order.by({head: float(sign * head[1]) for head in constants.heads})


def at_random(constants: Constants, seed: int) -> Order:
    """Drawn with the seed."""
    heads = random.Random(seed).sample(constants.heads, len(constants.heads))
    return Order(tuple(heads), tuple(float(rank) for rank in range(len(heads), 0, -1)))


def by_share(shares: Mapping[Any, Tensor]) -> Order:
    """By σ(l), the trained share of attention in each head."""
    return Order.by(
        {(*place, head): float(share) for place, layer in shares.items() for head, share in enumerate(layer)}
    )


ORDERS = ("lambda", "input-dependence", "output-norm", "first-layers", "last-layers", "random", "reversed")
LABELLED = frozenset({"lambda", "reversed"})
"""Orders that need training on labels; reversed is lambda's from the other end."""


def order(
    name: str,
    *,
    constants: Constants,
    seed: int,
    lambdas: Callable[[], Order],
    norms: Callable[[], Order],
) -> Order:
    """The order of that name; `lambdas` and `norms` are asked only where they are needed."""
    if name in LABELLED:
        found = lambdas()
        return found.reversed() if name == "reversed" else found
    if name == "input-dependence":
        return by_input_dependence(constants)
    if name == "output-norm":
        return norms()
    if name == "random":
        return at_random(constants, seed)
    if name in ("first-layers", "last-layers"):
        return by_layer(constants, first_replaced=name == "first-layers")
    raise UserError(f"select: expected one of {', '.join(ORDERS)}, got {name!r}")
