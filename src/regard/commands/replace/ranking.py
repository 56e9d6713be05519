"""Rankings of heads: those that need attention most come first (PAPA, figure 5)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from regard.constants import Constants, Head, classify_patterns, count_dynamic
from regard.errors import warn_user
from regard.hooks import watching
from regard.hooks.layers import eval_no_grad


@dataclass(frozen=True)
class HeadRanking:
    """Heads, the one that stays dynamic longest first, with the values they are ranked by."""

    heads: tuple[Head, ...]
    values: tuple[float, ...]

    @classmethod
    def by(cls, values: Mapping[Head, float]) -> HeadRanking:
        """Rank heads by descending value; among equals later layers first."""
        ranked = sorted(values, key=lambda head: (values[head], head), reverse=True)
        return cls(tuple(ranked), tuple(values[head] for head in ranked))

    def constant(self, dynamic_fraction: float) -> list[Head]:
        """Return the heads to replace so that this fraction stays dynamic, rounded to whole heads."""
        return sorted(self.heads[count_dynamic(dynamic_fraction, len(self.heads)) :])

    def reversed(self) -> HeadRanking:
        return HeadRanking(self.heads[::-1], tuple(-value for value in self.values[::-1]))


def rank_by_input_dependence(constants: Constants) -> HeadRanking:
    """Rank by the fraction of each head's squared weights that its average does not explain."""
    dependence = constants.input_dependence()
    return HeadRanking.by({head: float(dependence[head[:2]][head[2]]) for head in constants.heads})


def rank_by_output_norm(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], constants: Constants) -> HeadRanking:
    """Rank by the mean norm of what each head adds to the residual stream."""
    with eval_no_grad(model), watching(model, "head_output_norm") as observer:
        for batch in batches:
            model(**batch)
    rows = observer.frame("head_output_norm")
    rows = rows[rows["head"].notna() & rows["position"].isna()]
    norms = {(row.site, int(row.layer), int(row.head)): float(row.value) for row in rows.itertuples()}
    return HeadRanking.by({head: norms[head] for head in constants.heads})


def rank_by_layer(constants: Constants, *, first_replaced: bool) -> HeadRanking:
    """Rank by layer: the first (or the last) layers are replaced first."""
    sign = 1 if first_replaced else -1
    return HeadRanking.by({head: float(sign * head[1]) for head in constants.heads})


def rank_randomly(constants: Constants, seed: int) -> HeadRanking:
    """Rank in random order."""
    heads = random.Random(seed).sample(constants.heads, len(constants.heads))
    return HeadRanking(tuple(heads), tuple(float(rank) for rank in range(len(heads), 0, -1)))


def rank_by_gate(gates: Mapping[Any, Tensor]) -> HeadRanking:
    """Rank by σ(l), the trained gate between attention and constant."""
    values = {(*place, head): float(gate) for place, layer in gates.items() for head, gate in enumerate(layer)}
    return HeadRanking.by(values)


Ranker = Callable[[Constants], HeadRanking]


def rank_heads(name: str, constants: Constants, seed: int, lambdas: Ranker, norms: Ranker) -> HeadRanking:
    """Return the ranking of a name; `lambdas` and `norms` are called only if needed."""
    rankers: dict[str, Ranker] = {
        "lambda": lambdas,
        "reversed": lambda constants: lambdas(constants).reversed(),
        "input-dependence": rank_by_input_dependence,
        "output-norm": norms,
        "random": partial(rank_randomly, seed=seed),
        "first-layers": partial(rank_by_layer, first_replaced=True),
        "last-layers": partial(rank_by_layer, first_replaced=False),
    }
    return rankers[name](constants)


def warn_of_few_heads(shares: Sequence[float], heads: int) -> None:
    """Warn of fractions that are rounded to no head, or to all."""
    for share in shares:
        count = count_dynamic(share, heads)
        if 0 < share < 1 and count in (0, heads):
            rounded, same = ("all", 1) if count else ("none", 0)
            warn_user(
                f"dynamic-fractions: {share:g} of {heads} heads is rounded to {rounded} of them; its scores are those "
                f"of {same}"
            )


def list_heads(averages: Constants, ranking: HeadRanking) -> list[tuple[Any, ...]]:
    """Return the rows of the table of heads, in their order: the first is replaced last."""
    patterns = {}
    for (site, layer), matrix in averages.matrices.items():
        for head, pattern in enumerate(classify_patterns(matrix, averages.origin.separators)):
            patterns[site, layer, head] = str(pattern)
    ranked = enumerate(zip(ranking.heads, ranking.values, strict=True))
    return [(*head, rank, value, patterns[head]) for rank, (head, value) in ranked]
