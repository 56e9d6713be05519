"""The first token, and the sink beside the tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.statistics import STATISTICS, Observation, SinkRate
from regard.statistics.first import FirstAlpha, TokenFirst, VirtualSink


def observed(weights: Tensor, **tensors: Tensor) -> Observation:
    """One causal layer of one sample from its matrices (head, query, key)."""
    length = torch.tensor([weights.shape[1]])
    missing = 1 - weights.sum(-1)
    tensors |= {"column_mass": weights.sum(1)[None], "virtual_sink_mass": missing[None]}
    return Observation(site="decoder", layer=0, causal=True, length=length, keys=length, tensors=tensors)


def test_alpha_of_the_first_token_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]]])
    statistic = FirstAlpha()
    statistic.update([observed(weights)])
    (row,) = statistic.result()
    assert row.value == pytest.approx(0.6)
    assert (row.statistic, row.layer, row.head, row.position) == ("alpha", 0, 0, None)


def test_queries_before_a_key_of_a_prefix_are_counted_where_they_see_it() -> None:
    """Both tokens of a prefix are seen by all three queries: the second gets 0.9 + 0.8 + 0.7, of three and not two."""
    weights = torch.tensor([[[0.1, 0.9, 0.0], [0.2, 0.8, 0.0], [0.1, 0.7, 0.2]]], dtype=torch.float64)
    early = torch.tensor([[[0.0, 1.0, 0.0]]])
    statistic = SinkRate([0.79], 1)
    statistic.update([observed(weights, early_query_count=early)])
    assert {row.position: row.value for row in statistic.result() if row.head == 0} == {0: 0.0, 1: 100.0, 2: 0.0}
    stricter = SinkRate([0.81], 1)
    stricter.update([observed(weights, early_query_count=early)])
    assert {row.position: row.value for row in stricter.result() if row.head == 0} == {0: 0.0, 1: 0.0, 2: 0.0}


def test_what_stands_in_front_is_a_sink_and_no_position() -> None:
    """A token in front takes 1, 0.8 and 0.3 of three queries; of two given tokens the first gets 0.2 and 0.6."""
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.3, 0.6, 0.1]]], dtype=torch.float64)
    layer = observed(weights, hidden_norm=torch.tensor([[9.0, 3.0, 2.0]]))
    statistics = [TokenFirst(each, 2) for each in (FirstAlpha(), SinkRate([0.35], 2), STATISTICS["hidden_norm"]())]
    found = {}
    for statistic in (*statistics, VirtualSink(0.5, 2)):
        statistic.update([layer])
        found |= {(row.statistic, row.head, row.position): row.value for row in statistic.result()}
    assert found == {
        ("alpha", 0, None): pytest.approx(0.4),
        ("sink_rate", None, 0): 100.0,
        ("sink_rate", 0, 0): 100.0,
        ("hidden_norm", None, 0): 3.0,
        ("hidden_norm", None, 1): 2.0,
        ("hidden_norm_sink_ratio", None, None): 1.5,
        ("virtual_alpha", 0, None): pytest.approx(2.1 / 3),
        ("virtual_alpha_rate", 0, None): 100.0,
    }


@pytest.mark.parametrize("epsilon, rate", [(0.34, 100.0), (0.36, 0.0)])
def test_what_goes_to_no_token_by_hand(epsilon: float, rate: float) -> None:
    weights = torch.tensor([[[0.5, 0.0], [0.4, 0.4]]], dtype=torch.float64)
    statistic = VirtualSink(epsilon, 2)
    statistic.update([observed(weights)])
    found = {row.statistic: (row.value, row.epsilon) for row in statistic.result()}
    assert found == {"virtual_alpha": (pytest.approx(0.35), None), "virtual_alpha_rate": (rate, epsilon)}


@pytest.mark.parametrize("epsilon, rate", [(0.56, 100.0), (0.57, 0.0)])
def test_the_query_of_a_learned_key_sees_itself_alone(epsilon: float, rate: float) -> None:
    """Two queries give the key 0.5 and 0.2, its own gives it 1: of three the mean is 1.7 / 3."""
    weights = torch.tensor([[[0.5, 0.0], [0.4, 0.4]]], dtype=torch.float64)
    statistic = VirtualSink(epsilon, 2)
    statistic.update([replace(observed(weights), virtual_key=True)])
    found = {row.statistic: row.value for row in statistic.result()}
    assert found == {"virtual_alpha": pytest.approx(1.7 / 3), "virtual_alpha_rate": rate}


def test_without_anything_in_front_it_is_the_statistic_itself() -> None:
    weights = torch.rand(2, 12, 12).tril().softmax(-1)
    plain, given = SinkRate(), TokenFirst(SinkRate(), 12)
    plain.update([observed(weights)])
    given.update([observed(weights)])
    assert given.result() == plain.result()
