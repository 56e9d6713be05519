"""Intervals, relative drops and curves against plain formulas."""

import math
import statistics

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.commands.replace.scores import (
    axis_places,
    curves,
    drop_interval,
    fraction_name,
    intervals,
    relative_drop,
    shown_constants,
)
from regard.errors import UserError
from regard.runs.intervals import t_quantile
from tests.commands.replace import replaced_run

KEY = {"model": "m", "task": "sst2", "metric": "accuracy"}


def table(*rows: tuple[str, str, float, int, float], **key: str) -> pd.DataFrame:
    """Scores from (constants, rank_heads_by, fraction, seed, score)."""
    made = pd.DataFrame(rows, columns=["constants", "rank_heads_by", "dynamic_fraction", "seed", "score"])
    return made.assign(**{**KEY, **key})


def inside(bound: float, freedom: int, steps: int = 20_000) -> float:
    """The mass of Student's t between −bound and bound, by Simpson's rule over its density."""
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    x = np.linspace(0, bound, steps + 1)
    density = np.exp(log - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    weights = np.ones(steps + 1)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float(2 * (density * weights).sum() * bound / steps / 3)


@pytest.mark.parametrize("freedom", [*range(1, 41), 60, 120, 1000])
def test_quantiles_hold_95_percent(freedom: int) -> None:
    assert inside(t_quantile(0.95, freedom), freedom) == pytest.approx(0.95, abs=1e-5)


def test_an_interval_by_hand() -> None:
    """0.80, 0.82, 0.90: mean 0.84, s = √0.0028, t(2) = 4.3027, half = t·s/√3 = 0.131449."""
    scores = table(*(("average", "lambda", 0.5, seed, score) for seed, score in enumerate((0.80, 0.82, 0.90))))
    (row,) = intervals(scores).to_dict("records")
    assert row["n"] == 3
    assert row["mean"] == pytest.approx(0.84)
    assert row["ci_low"] == pytest.approx(0.84 - 0.131449, abs=1e-6)
    assert row["ci_high"] == pytest.approx(0.84 + 0.131449, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40))
def test_intervals_against_the_formula(values: list[float]) -> None:
    scores = table(*(("average", "lambda", 0.5, seed, score) for seed, score in enumerate(values)))
    (row,) = intervals(scores).to_dict("records")
    half = t_quantile(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    assert row["mean"] == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert row["ci_high"] - row["ci_low"] == pytest.approx(2 * half, abs=1e-9)


def test_drops_of_a_score_below_0_are_of_its_size() -> None:
    """As of a correlation: from −0.2 it falls by half of that, to −0.3, which differs by seed as 60 % and 40 % do."""
    rows = [("none", "none", 1.0, seed, -0.2) for seed in (0, 1)]
    scores = table(*rows, ("average", "lambda", 0.0, 0, -0.32), ("average", "lambda", 0.0, 1, -0.28))
    drops = relative_drop(scores)
    assert drops["drop"].tolist() == [pytest.approx(50)]
    interval = drop_interval(scores, drops)
    half = t_quantile(0.95, 1) * statistics.stdev([60, 40]) / math.sqrt(2)
    assert [interval.mean, interval.ci_low, interval.ci_high] == pytest.approx([50, 50 - half, 50 + half])


def test_one_seed_has_no_interval_and_null_scores_are_left_out() -> None:
    (row,) = intervals(table(("a", "s", 0.5, 0, 0.7), ("a", "s", 0.5, 1, math.nan))).to_dict("records")
    assert (row["n"], row["mean"]) == (1, 0.7)
    assert math.isnan(row["ci_low"])
    assert math.isnan(row["ci_high"])


def test_drops_by_hand() -> None:
    scores = table(
        ("none", "none", 1.0, 0, 0.8),
        ("none", "none", 1.0, 1, 0.9),
        ("average", "lambda", 0.0, 0, 0.7),
        ("average", "lambda", 0.0, 1, 0.66),
        ("average", "lambda", 0.5, 0, 0.935),
    )
    found = relative_drop(scores).set_index("dynamic_fraction")
    assert found.loc[0.0, "drop"] == pytest.approx(20)
    assert found.loc[0.5, "drop"] == pytest.approx(-10)
    assert set(found["unit"]) == {"%"}
    assert found["original"].tolist() == pytest.approx([0.85, 0.85])


def test_drops_of_log_perplexities_are_differences() -> None:
    scores = table(("none", "none", 1.0, 0, -2.0), ("zeros", "none", 0.0, 0, -3.5), metric="negative_log_perplexity")
    (row,) = relative_drop(scores).to_dict("records")
    assert (row["drop"], row["unit"]) == (1.5, "nats")


def test_drops_of_negative_scores_count_by_size() -> None:
    scores = table(("none", "none", 1.0, 0, -0.5), ("zeros", "none", 0.0, 0, -0.6), metric="mcc")
    assert relative_drop(scores)["drop"].tolist() == pytest.approx([20])


def test_drops_without_a_measure_of_size_are_null() -> None:
    zero = table(("none", "none", 1.0, 0, 0.0), ("zeros", "none", 0.0, 0, 0.1))
    none = table(("zeros", "none", 0.0, 0, 0.1))
    for scores in (zero, none):
        assert relative_drop(scores)["drop"].isna().all()


@pytest.mark.parametrize("seeds", [1, 3])
def test_drops_of_an_original_score_of_0_have_no_interval(seeds: int) -> None:
    """Such as Matthews' correlation of one answer alone; other rows keep theirs."""
    rows = []
    for task, original in (("a", 0.0), ("b", 0.8)):
        for seed in range(seeds):
            key = {**KEY, "task": task, "metric": "mcc", "seed": seed}
            of_original = {"constants": "none", "rank_heads_by": "none", "dynamic_fraction": 1.0, "score": original}
            of_zeros = {"constants": "zeros", "rank_heads_by": "none", "dynamic_fraction": 0.0, "score": 0.2}
            rows += [{**key, **of_original}, {**key, **of_zeros}]
    scores = pd.DataFrame(rows)
    drops = relative_drop(scores)
    undefined = drop_interval(scores, drops[drops["task"] == "a"])
    assert math.isnan(undefined.mean)
    assert math.isnan(undefined.ci_low)
    assert drop_interval(scores, drops).mean == pytest.approx(75)


def test_every_curve_begins_at_the_untouched_model() -> None:
    scores = replaced_run.scores()
    found = curves(scores)
    means = intervals(scores)
    for (task, _, _), curve in found.groupby(["task", "constants", "rank_heads_by"]):
        assert curve["dynamic_fraction"].tolist() == [1, 0.5, 0.125, 0]
        whole = means[(means["task"] == task) & (means["constants"] == "none")]
        assert curve["mean"].iloc[0] == whole["mean"].iloc[0]
    assert found.groupby(["task", "constants", "rank_heads_by"]).ngroups == 9


def test_orders_share_the_end_where_no_head_is_dynamic() -> None:
    scores = replaced_run.scores()
    without = scores[~((scores["rank_heads_by"] == "random") & (scores["dynamic_fraction"] == 0))]
    found = curves(without)
    ends = found[(found["dynamic_fraction"] == 0) & (found["constants"] == "average") & (found["task"] == "cola")]
    assert set(ends["rank_heads_by"]) == {"lambda", "random"}
    assert ends["mean"].nunique() == 1


def test_what_the_run_is_about() -> None:
    scores = replaced_run.scores()
    assert shown_constants(scores, {}) == ("average", "lambda")
    assert shown_constants(scores, replaced_run.record(constants=["zeros", "identity"])) == ("identity", "lambda")
    assert shown_constants(scores, replaced_run.record(rank_heads_by="random")) == ("average", "random")
    assert shown_constants(scores[scores["dynamic_fraction"] == 1], {}) == ("none", "none")


@pytest.mark.parametrize(
    "fraction, name", [(1.0, "1"), (0.5, "1/2"), (1 / 16, "1/16"), (0.75, "3/4"), (0.0, "0"), (0.123456, "0.123")]
)
def test_fractions_are_named(fraction: float, name: str) -> None:
    assert fraction_name(fraction) == name


def test_places_are_powers_of_two_with_one_for_zero() -> None:
    assert axis_places([0.0, 1.0, 0.125, 0.5, 0.5]) == {1.0: 0, 0.5: 1, 0.125: 3, 0.0: 4.5}
    assert axis_places([0.0]) == {0.0: 1.5}


def test_mistakes_are_named() -> None:
    scores = replaced_run.scores()
    with pytest.raises(UserError, match="missing: seed"):
        intervals(scores.drop(columns="seed"))
    with pytest.raises(UserError, match="empty"):
        intervals(scores.iloc[:0])
    with pytest.raises(UserError, match="several are of model example/tiny, task cola"):
        intervals(pd.concat([scores, scores]))


def test_the_interval_of_a_mean_over_models_of_one_text_is_no_narrower_than_theirs() -> None:
    """They lose at the same parts of it: ±0.1 and ±0.3 nats are ±0.2 together, not ±0.16."""
    rows = []
    for model, width in (("a", 0.1), ("b", 0.3)):
        own = {**KEY, "model": model, "metric": "negative_log_perplexity", "seed": 0}
        rows.append({**own, "constants": "none", "rank_heads_by": "none", "dynamic_fraction": 1.0, "score": -3.0})
        replaced = {"constants": "average", "rank_heads_by": "lambda", "dynamic_fraction": 0.0, "score": -3.5}
        rows.append({**own, **replaced, "drop_half_width": width})
    scores = pd.DataFrame(rows)
    interval = drop_interval(scores, relative_drop(scores))
    assert interval.ci_low == pytest.approx(0.3)
    assert interval.ci_high == pytest.approx(0.7)


@pytest.mark.parametrize("drop", [0.0, 0.05])
def test_equal_drops_of_all_seeds_have_no_interval_unless_they_are_0(drop: float) -> None:
    """Of few rows, seeds often lose as many: no width would then exclude 0 whatever the number of seeds."""
    rows = [("none", "none", 1.0, seed, score) for seed, score in enumerate((0.75, 0.8, 0.85))]
    rows += [("average", "lambda", 0.0, seed, score - drop) for *_, seed, score in rows]
    scores = table(*rows)
    interval = drop_interval(scores, relative_drop(scores))
    assert interval.mean == pytest.approx(100 * drop / 0.8)
    expected = 0.0 if drop == 0 else math.nan
    assert (interval.ci_low, interval.ci_high) == pytest.approx((expected, expected), nan_ok=True)
