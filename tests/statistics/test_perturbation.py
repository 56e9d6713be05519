"""The perturbation spread of changes made up by hand."""

import math
from dataclasses import replace

import pytest
import torch

from regard.statistics import Observation, PerturbationSpread
from regard.statistics.perturbation import relative_change, tokens_before


def layer(site: str, replaced: list[list[int]], change: list[list[float]], length: list[int]) -> Observation:
    tensors = {"replaced": torch.tensor(replaced), "relative_change": torch.tensor(change, dtype=torch.float64)}
    sizes = torch.tensor(length)
    return Observation(site=site, layer=0, causal=site == "decoder", length=sizes, keys=sizes, tensors=tensors)


CHANGE = [[0.5, 8.0, 1.0, 2.0], [4.0, 6.0, 7.0, 1e30]]
REPLACED = [[0, 1, 0, 0], [1, 0, 0, 1]]


def values(observation: Observation) -> dict[tuple[str, int | None], tuple[float, int]]:
    statistic = PerturbationSpread()
    statistic.update([observation])
    return {(row.statistic, row.position): (row.value, row.n) for row in statistic.result()}


def test_a_causal_layer_counts_the_tokens_after_the_replaced_one() -> None:
    observation = layer("decoder", REPLACED, CHANGE, [4, 3])
    assert tokens_before(observation).tolist() == [[True, False, False, False], [False] * 4]
    assert values(observation) == {
        ("perturbation_spread", None): ((1.5 + 6.5) / 2, 2),
        ("perturbation_spread", 1): (6.0, 1),
        ("perturbation_spread", 2): (4.0, 2),
        ("perturbation_spread", 3): (2.0, 1),
        ("perturbation_spread_own", None): (6.0, 2),
    }


def test_another_layer_counts_all_other_tokens() -> None:
    observation = layer("encoder", REPLACED, CHANGE, [4, 3])
    assert not tokens_before(observation).any()
    found = values(observation)
    assert found["perturbation_spread", None] == (pytest.approx((3.5 / 3 + 6.5) / 2), 2)
    assert found["perturbation_spread", 0] == (0.5, 1)


def test_all_tokens_count_where_none_of_the_text_was_replaced() -> None:
    """The second text has three tokens, behind which anything may stand."""
    observation = layer("decoder", [[0] * 4, [0, 0, 0, 1]], CHANGE, [4, 3])
    found = values(observation)
    assert found["perturbation_spread", None] == (pytest.approx((11.5 / 4 + 17 / 3) / 2), 2)
    assert ("perturbation_spread_own", None) not in found


def test_a_token_without_a_norm_does_not_count() -> None:
    hidden = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    change = relative_change(hidden, torch.tensor([[3.0, 9.0], [0.0, 0.0], [0.0, 1.0]]))
    assert change[0] == 1.0
    assert [math.isfinite(value) for value in change.tolist()] == [True, False, False]
    observation = layer("encoder", [[0, 1, 0]], [[1.0, math.nan, math.inf]], [3])
    assert values(observation) == {("perturbation_spread", None): (1.0, 1), ("perturbation_spread", 0): (1.0, 1)}
    nothing = replace(observation, tensors={**observation.tensors, "relative_change": torch.full((1, 3), math.nan)})
    assert values(nothing) == {}
