"""Means and paired differences of methods, by hand, against SciPy, and against what must hold of any numbers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.continual.comparison import DIFFERENCES, SUMMARY, compare_methods, summarize
from regard.continual.metrics import metrics_table
from regard.errors import UserError
from tests.continual.matrices import PEAK, RISE, at_end, rows

NUMBERS = ["difference", "std", "ci_low", "ci_high", "t_test", "t_test_holm", "signed_rank", "signed_rank_holm"]
POINTS = st.integers(0, 3000).map(lambda value: value / 30)


def table(values: Mapping[str, Iterable[float]], metric: str = "average_performance", **key: Any) -> pd.DataFrame:
    """A table of metrics: the values of each method, seed by seed from 0."""
    made = [(method, seed, value) for method, each in values.items() for seed, value in enumerate(each)]
    told = {"stream": "letters", "order": "0-1", "scenario": "til", "metric": metric, **key}
    return pd.DataFrame(made, columns=["method", "seed", "value"]).assign(**told)


def one(found: pd.DataFrame) -> dict[str, Any]:
    """The only row of a table."""
    assert len(found) == 1
    return dict(found.iloc[0])


# -- means -----------------------------------------------------------------------------------------------


def test_a_mean_by_hand() -> None:
    found = one(summarize(table({"replay": [70, 72, 74]})))
    half = 4.30265273 * 2 / math.sqrt(3)
    assert list(found) == list(SUMMARY)
    assert (found["method"], found["scenario"], found["metric"], found["n"]) == (
        "replay",
        "til",
        "average_performance",
        3,
    )
    assert (found["mean"], found["std"]) == (72, 2)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((72 - half, 72 + half))


def test_seeds_and_orders_are_runs_alike() -> None:
    both = pd.concat([table({"replay": [70, 72]}), table({"replay": [74]}, order="1-0")])
    assert one(summarize(both))["n"] == 3


def test_streams_methods_settings_and_metrics_are_kept_apart() -> None:
    parts = [{}, {"stream": "words"}, {"scenario": "cil"}, {"metric": "bwt"}]
    found = summarize(pd.concat([table({"a": [70 + i], "b": [10 + i]}, **part) for i, part in enumerate(parts)]))
    assert found["n"].tolist() == [1] * 8
    assert sorted(found["mean"]) == [10, 11, 12, 13, 70, 71, 72, 73]


def test_what_is_not_defined_is_left_out_and_never_0() -> None:
    found = summarize(table({"a": [70, math.nan, 72], "joint": [math.nan] * 3})).set_index("method")
    assert (found.loc["a", "n"], found.loc["a", "mean"]) == (2, 71)
    assert found.loc["joint", "n"] == 0
    assert found.loc["joint", ["mean", "std", "ci_low", "ci_high"]].isna().all()


def test_one_run_has_no_interval() -> None:
    found = one(summarize(table({"a": [70]})))
    assert found["mean"] == 70
    assert all(math.isnan(found[name]) for name in ("std", "ci_low", "ci_high"))


@pytest.mark.exhaustive
@settings(max_examples=20, deadline=None)
@given(st.lists(POINTS, min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_the_order_of_the_seeds_is_nothing(values: list[float], chance: Any) -> None:
    first = table({"a": values, "b": [value / 2 for value in values]})
    places = list(range(len(first)))
    chance.shuffle(places)
    second = first.iloc[places]
    for function, keys in ((summarize, ["method"]), (lambda each: compare_methods(each, "a"), ["method", "against"])):
        told, found = (function(each).sort_values(keys).set_index(keys) for each in (first, second))
        numeric = [name for name in ("n", "mean", "std", "ci_low", "ci_high", *NUMBERS) if name in told]
        pd.testing.assert_frame_equal(told[numeric], found[numeric], check_index_type=False)


# -- differences -----------------------------------------------------------------------------------------


def test_a_difference_by_hand() -> None:
    found = one(compare_methods(table({"finetune": [60, 80, 70], "replay": [61, 82, 73]})))
    half = 4.30265273 / math.sqrt(3)
    assert list(found) == list(DIFFERENCES)
    assert (found["method"], found["against"], found["n"]) == ("replay", "finetune", 3)
    assert (found["difference"], found["std"]) == (2, 1)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((2 - half, 2 + half))
    assert found["overlaps"]
    t = 2 * math.sqrt(3)
    assert found["t_test"] == pytest.approx(2 / ((2 + t * t) * (1 + t / math.sqrt(2 + t * t))))
    assert found["t_test_holm"] == found["t_test"]
    assert math.isnan(found["signed_rank"])


def test_runs_are_paired_so_that_what_they_share_is_no_noise() -> None:
    found = one(compare_methods(table({"a": [10, 50, 90, 30], "b": [11, 51.1, 90.9, 31]})))
    assert not found["overlaps"]
    assert 0.5 < found["ci_low"] < found["ci_high"] < 1.5


def test_pairs_are_of_one_seed_and_one_order() -> None:
    parts = [table({"a": [10, 20, 99], "b": [11, 23]}), table({"a": [30], "b": [35]}, order="1-0")]
    found = one(compare_methods(pd.concat(parts).sample(frac=1, random_state=1), against="a"))
    assert (found["n"], found["difference"]) == (3, 3)


def test_against_one_method_or_each_against_those_before_it() -> None:
    three = table({"a": [1, 2], "b": [2, 4], "c": [5, 5]})
    every, to_b = (
        compare_methods(three, against)[["method", "against"]].to_numpy().tolist() for against in (None, "b")
    )
    assert every == [["b", "a"], ["c", "a"], ["c", "b"]]
    assert to_b == [["a", "b"], ["c", "b"]]


def test_methods_with_nothing_in_common_have_no_row() -> None:
    apart = pd.concat([table({"a": [1, 2]}), table({"b": [1, 2]}, stream="words"), table({"c": [1]}, order="1-0")])
    assert compare_methods(apart).empty
    assert list(compare_methods(apart).columns) == list(DIFFERENCES)
    assert compare_methods(table({"a": [1, 2], "joint": [math.nan, math.nan]}), "joint").empty


def test_one_pair_has_a_difference_and_nothing_to_hold_it_against() -> None:
    found = one(compare_methods(table({"a": [1], "b": [4]})))
    assert (found["n"], found["difference"], found["overlaps"]) == (1, 3, pd.NA)
    assert all(math.isnan(found[name]) for name in NUMBERS[1:])


def test_methods_that_are_the_same_have_no_test() -> None:
    found = one(compare_methods(table({"a": [1, 5, 3], "b": [1, 5, 3]})))
    assert (found["difference"], found["ci_low"], found["ci_high"], found["overlaps"]) == (0, 0, 0, True)
    assert math.isnan(found["t_test"])


def test_equal_differences_do_not_exclude_0() -> None:
    found = one(compare_methods(table({"a": [50.0, 62.5], "b": [62.5, 75.0]})))
    assert (found["difference"], found["overlaps"]) == (12.5, pd.NA)
    assert all(math.isnan(found[name]) for name in ("ci_low", "ci_high", "t_test"))


def test_comparisons_of_one_metric_are_corrected_together() -> None:
    chance = np.random.default_rng(4)
    base = chance.normal(70, 3, 8)
    values = {"a": base, "b": base + chance.normal(2, 1, 8), "c": base + chance.normal(1, 1, 8)}
    both = pd.concat([table(values), table({name: values[name] for name in "ab"}, metric="bwt")])
    found = compare_methods(both, against="a").set_index(["metric", "method"])
    for test in ("t_test", "signed_rank"):
        small, large = sorted(found.loc["average_performance", test])
        assert sorted(found.loc["average_performance", f"{test}_holm"]) == pytest.approx(
            [2 * small, max(2 * small, large)]
        )
        assert found.loc[("bwt", "b"), f"{test}_holm"] == found.loc[("bwt", "b"), test]


def test_the_tests_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="the package scipy is not installed")
    chance = np.random.default_rng(5)
    a, b = chance.normal(70, 5, 9), chance.normal(73, 5, 9)
    found = one(compare_methods(table({"a": a, "b": b})))
    told = stats.ttest_rel(b, a)
    assert found["t_test"] == pytest.approx(told.pvalue)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx(tuple(told.confidence_interval(0.95)))
    assert found["signed_rank"] == pytest.approx(stats.wilcoxon(b, a, method="exact").pvalue)


@pytest.mark.exhaustive
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(POINTS, POINTS, POINTS), min_size=2, max_size=8))
def test_what_a_seed_does_to_all_methods_alike_makes_no_difference(values: list[tuple[float, float, float]]) -> None:
    a, b, shift = (np.array(each) for each in zip(*values, strict=True))
    plain, shifted = (one(compare_methods(table({"a": a + by, "b": b + by}))) for by in (0, shift))
    assert [shifted[name] for name in NUMBERS] == pytest.approx(
        [plain[name] for name in NUMBERS], abs=1e-6, nan_ok=True
    )


@pytest.mark.exhaustive
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(POINTS, POINTS), min_size=2, max_size=8))
def test_turned_round_a_difference_changes_its_sign(values: list[tuple[float, float]]) -> None:
    both = table(dict(zip("ab", zip(*values, strict=True), strict=True)))
    there, back = one(compare_methods(both, "a")), one(compare_methods(both, "b"))
    turned = (-back["difference"], -back["ci_high"])
    assert (there["difference"], there["ci_low"]) == pytest.approx(turned, nan_ok=True)
    assert str(there["overlaps"]) == str(back["overlaps"])  # NA equals nothing
    assert [there[name] for name in NUMBERS[4:]] == pytest.approx([back[name] for name in NUMBERS[4:]], nan_ok=True)


# -- from runs to tables, and mistakes -------------------------------------------------------------------


def test_the_tables_of_runs() -> None:
    runs = [rows(PEAK, seed=seed) for seed in (0, 1)]
    runs += [at_end([90, 90, 90], seed=0), rows(RISE, seed=2, order="0-1-2")]
    metrics = metrics_table(pd.concat(runs))
    means = summarize(metrics).set_index(["method", "metric"])
    assert (means.loc[("finetune", "average_performance"), "n"], means.loc[("finetune", "forgetting"), "mean"]) == (
        2,
        7.5,
    )
    assert (means.loc[("joint", "average_performance"), "n"], means.loc[("joint", "forgetting"), "n"]) == (1, 0)
    found = compare_methods(metrics, against="finetune").set_index("metric")
    assert found.index.tolist() == ["average_performance"]
    assert found.loc["average_performance", "difference"] == pytest.approx(90 - 215 / 3)


def test_mistakes_are_said() -> None:
    good = table({"a": [1, 2], "b": [2, 4]})
    with pytest.raises(UserError, match=r"against: expected a method of the table \(a, b\), got c"):
        compare_methods(good, against="c")
    with pytest.raises(UserError, match="missing: metric, value"):
        summarize(good.drop(columns=["value", "metric"]))
    with pytest.raises(UserError, match="expected one value for each run, several are of stream letters"):
        compare_methods(pd.concat([good, good]))


def test_a_table_without_rows_has_none() -> None:
    empty = table({})
    assert list(summarize(empty).columns) == list(SUMMARY)
    assert summarize(empty).empty
    assert compare_methods(empty).empty
