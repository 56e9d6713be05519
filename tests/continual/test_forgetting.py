"""What counts as forgotten: verdicts worked out by hand, over one run and over several."""

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.continual.forgetting import ForgottenTask, check, explain_nothing_to_check, find_drops
from regard.errors import UserError
from regard.runs.intervals import fall_interval, paired_correlation
from tests.continual.matrices import PEAK, RISE, at_end, own, rows

T_2 = 4.30265273
"""The 0.975 quantile of Student's t for two degrees of freedom."""


def two(before: float, after: float, **key: Any) -> pd.DataFrame:
    """A run of two tasks, the first of which goes from one score to another."""
    return rows(((before,), (after, 90.0)), **key)


def one(found: list[ForgottenTask]) -> ForgottenTask:
    """The only one."""
    assert len(found) == 1
    return found[0]


# -- one run ---------------------------------------------------------------------------------------------


def test_a_task_that_lost_much_over_many_rows_has_dropped() -> None:
    found = one(check(two(95, 80, n=400, seed=7)))
    low, high = fall_interval(0.95, 0.80, 400)
    assert (found.ci_low, found.ci_high) == pytest.approx((100 * low, 100 * high))
    assert 1 < found.ci_low < 15 < found.ci_high
    assert (found.task, found.before, found.after, found.drop) == ("a", 95, 80, 15)
    assert (found.stream, found.method, found.scenario) == ("letters", "finetune", "til")
    assert (found.n, found.seeds, found.verdict) == (400, (7,), "dropped")


def test_a_drop_that_its_rows_do_not_bear_out_cannot_be_told() -> None:
    found = one(check(two(95, 92, n=100)))
    assert (found.verdict, found.drop) == ("cannot tell", 3)
    assert found.ci_low < 1
    assert one(check(two(95, 92, n=100_000))).verdict == "dropped"


def test_rows_that_are_known_to_have_changed_narrow_the_interval() -> None:
    frame = two(95, 93, n=400)
    counted = frame.assign(lost=[0.0, 9.0, 0.0], gained=[0.0, 1.0, 0.0])
    assert list(frame["after_task"]) == [1, 2, 2]
    found, unknown = one(find_drops(counted)), one(find_drops(frame))
    low, high = fall_interval(0.95, 0.93, 400, correlation=paired_correlation(0.95, 400, 9, 1))
    assert (found.ci_low, found.ci_high) == pytest.approx((100 * low, 100 * high))
    assert found.ci_high - found.ci_low < 0.7 * (unknown.ci_high - unknown.ci_low)
    assert (found.drop, found.before, found.after) == (unknown.drop, unknown.before, unknown.after)
    assert one(find_drops(frame.assign(lost=float("nan"), gained=float("nan")))) == unknown
    assert one(find_drops(counted[::-1])) == found, "the order of the rows is nothing"


def test_rows_that_changed_are_those_of_the_scenario() -> None:
    parts = [
        two(95, 93, n=400, scenario=scenario).assign(lost=[0.0, lost, 0.0], gained=[0.0, lost - 8, 0.0])
        for scenario, lost in (("til", 9.0), ("cil", 20.0))
    ]
    for frame in (pd.concat(parts), pd.concat(parts[::-1])):
        for scenario, expected in zip(("til", "cil"), parts, strict=True):
            alone = one(find_drops(expected, scenario=scenario))
            assert one(find_drops(frame, scenario=scenario)) == alone
    assert one(find_drops(parts[0])).ci_high < one(find_drops(parts[1], scenario="cil")).ci_high


def test_a_drop_within_the_margin_is_none() -> None:
    assert check(two(95, 94.5, n=10)) == []
    assert check(two(95, 94, n=10**6)) == []
    assert one(check(two(95, 94.5, n=10**6), margin=0)).verdict == "dropped"


def test_a_task_is_kept_if_its_rows_bear_that_out() -> None:
    assert one(find_drops(two(95, 94.5, n=10))).verdict == "cannot tell"
    assert one(find_drops(two(95, 94.5, n=10**6))).verdict == "kept"
    assert one(find_drops(two(95, 97, n=100))).verdict == "cannot tell"


def test_the_margin_is_held_against_the_whole_interval() -> None:
    frame = two(95, 80, n=400)
    found = one(find_drops(frame))
    assert one(check(frame, margin=found.ci_low - 0.01)).verdict == "dropped"
    assert one(check(frame, margin=found.ci_low + 0.01)).verdict == "cannot tell"
    assert one(find_drops(frame, margin=found.ci_high - 0.01)).verdict == "cannot tell"
    assert one(find_drops(frame, margin=found.ci_high)).verdict == "kept"
    assert check(frame, margin=15) == []


def test_a_task_is_held_against_its_score_when_it_was_learnt_and_not_its_best() -> None:
    peak = rows(((80.0,), (95.0, 90.0), (79.5, 90.0, 60.0)), n=10**6)
    assert check(peak) == []
    assert [(each.task, each.before, each.drop) for each in find_drops(peak)] == [("a", 80, 0.5), ("b", 90, 0)]


def test_the_last_task_is_not_old() -> None:
    assert [each.task for each in find_drops(rows(PEAK))] == ["a", "b"]
    assert [each.task for each in find_drops(rows(PEAK, order="2-0-1"))] == ["c", "a"]


def test_a_run_on_its_way_is_checked_as_far_as_it_went() -> None:
    found = one(find_drops(two(90, 50, order="0-1-2", unlearnt=[50, 50, 50])))
    assert (found.task, found.verdict) == ("a", "dropped")


def test_a_task_that_rises_is_kept() -> None:
    found = one(find_drops(rows(RISE, n=1000)))
    assert (found.drop, found.verdict) == (-5, "kept")


# -- several runs ----------------------------------------------------------------------------------------


def test_over_seeds_the_interval_is_of_their_drops() -> None:
    frame = pd.concat([two(90, 90 - drop, seed=seed, n=50 + seed) for seed, drop in enumerate((4, 5, 6))])
    half = T_2 / math.sqrt(3)
    found = one(check(frame))
    assert (found.before, found.after, found.drop) == (90, 85, 5)
    assert (found.ci_low, found.ci_high) == pytest.approx((5 - half, 5 + half))
    assert (found.n, found.seeds, found.verdict) == (50, (0, 1, 2), "dropped")
    assert one(check(frame, margin=3)).verdict == "cannot tell"
    assert check(frame, margin=5) == []
    assert one(check(frame, margin=3, confidence=0.5)).verdict == "dropped"


def test_no_interval_has_drops_that_scores_cannot_have() -> None:
    """Student's of two seeds reached from −331 to 431 points."""
    found = one(check(pd.concat([two(100, 100 - drop, seed=seed) for seed, drop in enumerate((20, 80))])))
    assert (found.drop, found.ci_low, found.ci_high, found.verdict) == (50, -100, 100, "cannot tell")


def test_seeds_that_agree_to_the_row_are_no_more_sure_than_one() -> None:
    frame = pd.concat([two(92 + seed, 90 + seed, seed=seed) for seed in (0, 1)])
    found = one(check(frame))
    low, high = fall_interval(0.925, 0.905, 100)
    assert (found.ci_low, found.ci_high) == pytest.approx((100 * low, 100 * high))
    assert found.verdict == "cannot tell"


def test_seeds_that_agree_are_paired_as_loosely_as_the_loosest_of_them_and_not_at_all_if_one_is_unknown() -> None:
    changes = {1: (9.0, 1.0), 2: (12.0, 4.0)}
    runs = {seed: two(95, 93, n=400, seed=seed) for seed in changes}
    counted = [
        frame.assign(lost=[0.0, changes[seed][0], 0.0], gained=[0.0, changes[seed][1], 0.0])
        for seed, frame in runs.items()
    ]
    loose = paired_correlation(0.95, 400, 12, 4)
    assert 0 < loose < paired_correlation(0.95, 400, 9, 1)
    for frames, correlation in ((counted, loose), (counted[::-1], loose), ([counted[0], runs[2]], None)):
        found = one(find_drops(pd.concat(frames)))
        low, high = fall_interval(0.95, 0.93, 400, correlation=correlation)
        assert (found.ci_low, found.ci_high) == pytest.approx((100 * low, 100 * high))


def test_only_runs_in_which_a_task_is_old_tell_of_it() -> None:
    frame = pd.concat([two(90, 60, seed=1), two(80, 40, seed=2, order="1-0"), two(90, 58, seed=3)])
    by_task = {each.task: each for each in find_drops(frame)}
    assert (by_task["a"].seeds, by_task["a"].drop) == ((1, 3), 31)
    assert (by_task["b"].seeds, by_task["b"].drop) == ((2,), 40)


def test_a_seed_with_two_orders_is_two_runs() -> None:
    three = rows(((90.0,), (80.0, 90.0), (70.0, 90.0, 90.0)), seed=4)
    other = rows(((90.0,), (80.0, 90.0), (60.0, 90.0, 90.0)), seed=4, order="0-2-1")
    assert find_drops(pd.concat([three, other]))[0].seeds == (4, 4)


def test_methods_streams_and_settings_are_kept_apart() -> None:
    parts = [two(90, 50), two(90, 89.5, method="replay"), two(90, 40, stream="words"), two(90, 10, scenario="cil")]
    frame = pd.concat(parts)
    assert [(each.stream, each.method, each.drop) for each in check(frame)] == [
        ("letters", "finetune", 40),
        ("words", "finetune", 50),
    ]
    assert [each.drop for each in check(frame, scenario="cil")] == [80]


@pytest.mark.exhaustive
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5), st.floats(0, 30))
def test_whatever_the_scores_the_verdict_is_that_of_the_interval(scores: list[tuple[int, int]], margin: float) -> None:
    frame = pd.concat([two(before, after, seed=seed) for seed, (before, after) in enumerate(scores)])
    found = one(find_drops(frame, margin))
    assert found.ci_low - 1e-9 <= found.drop <= found.ci_high + 1e-9
    is_open = found.ci_low <= margin < found.ci_high
    assert found.verdict == ("cannot tell" if is_open else "dropped" if found.drop > margin else "kept")
    assert one(find_drops(frame.iloc[::-1], margin)).drop == pytest.approx(found.drop)
    assert check(frame, margin) == ([found] if found.drop > margin else [])


# -- nothing to check, and mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame, reason",
    [
        (rows([[80.0]]), "no run has learnt a second task, the most is 1"),
        (rows((), order="0-1", unlearnt=[50]), "no run has learnt a second task, the most is 0"),
        (at_end([80, 90]), "no task was scored just after it was learnt"),
        (two(90, 10, scenario="cil"), "no score is of the scenario til"),
    ],
)
def test_nothing_to_check_has_a_reason(frame: pd.DataFrame, reason: str) -> None:
    assert check(frame) == []
    assert explain_nothing_to_check(frame) == f"nothing to check: {reason}"


def test_where_there_is_something_to_check_there_is_no_reason() -> None:
    assert explain_nothing_to_check(two(90, 90)) is None
    assert explain_nothing_to_check(pd.concat([two(90, 90), at_end([80, 90])])) is None


def test_models_of_single_tasks_forget_nothing() -> None:
    found = find_drops(own([80, 90, 70]))
    assert [(each.task, each.drop, each.verdict) for each in found] == [("a", 0, "kept"), ("b", 0, "kept")]


@pytest.mark.parametrize("margin", [-1, math.nan, math.inf])
def test_a_margin_is_a_number_of_points(margin: float) -> None:
    with pytest.raises(UserError, match="margin: expected a number of points of at least 0"):
        check(two(90, 80), margin)


def test_mistakes_are_said() -> None:
    with pytest.raises(UserError, match="confidence: expected a number between 0 and 1, got 95"):
        check(two(90, 80), confidence=95)
    with pytest.raises(UserError, match="missing: n"):
        check(two(90, 80).drop(columns="n"))
    with pytest.raises(UserError, match="matrix: expected at least one row"):
        explain_nothing_to_check(two(90, 80).iloc[:0])
