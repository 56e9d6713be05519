"""The measures against matrices worked out by hand, against plain loops, and against what must hold of any matrix."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.continual.metrics import COLUMNS, TITLES, accuracy_matrix, compute_metrics, metrics_table
from regard.errors import UserError
from tests.continual.matrices import PEAK, RISE, Triangle, at_end, own, rows

SCORES = st.floats(0, 100, allow_nan=False)


@st.composite
def triangles(draw: st.DrawFn, least: int = 1) -> list[list[float]]:
    """The scores of a run of up to six tasks."""
    tasks = draw(st.integers(least, 6))
    return [draw(st.lists(SCORES, min_size=i, max_size=i)) for i in range(1, tasks + 1)]


def of(triangle: Triangle, **others: dict[str, float]) -> dict[str, float | None]:
    """The measures of a run."""
    return compute_metrics(accuracy_matrix(rows(triangle), "til"), **others)


def value(table: pd.DataFrame, metric: str, **key: object) -> float:
    """The one value of a metric among the rows with this key."""
    found = table[table["metric"] == metric]
    for name, wanted in key.items():
        found = found[found[name] == wanted]
    assert len(found) == 1
    return float(found["value"].iloc[0])


# -- by hand ---------------------------------------------------------------------------------------------


def test_three_tasks_whose_first_is_best_in_the_middle() -> None:
    matrix = accuracy_matrix(rows(PEAK, unlearnt=[50, 40, 55]), "til")
    found = compute_metrics(
        matrix,
        separate={"a": 82, "b": 88, "c": 66},
        joint={"a": 78, "b": 91, "c": 63},
        initial={"a": 50, "b": 50, "c": 33},
    )
    assert found == pytest.approx(
        {
            "average_performance": (70 + 85 + 60) / 3,
            "forgetting_rate": ((84 - 70) + (90 - 85)) / 2,
            "forgetting": ((80 - 70) + (90 - 85)) / 2,
            "bwt": -7.5,
            "fwt": ((80 - 82) + (90 - 88) + (60 - 66)) / 3,
            "learning_accuracy": (80 + 90 + 60) / 3,
            "intransigence": ((78 - 80) + (91 - 90) + (63 - 60)) / 3,
            "zero_shot_transfer": ((40 - 50) + (55 - 33)) / 2,
            "area": (80 + (84 + 90) / 2 + (70 + 85 + 60) / 3) / 3,
        },
        rel=1e-14,
    )


def test_two_tasks_of_which_the_second_helps_the_first() -> None:
    found = of(RISE, separate={"a": 70, "b": 70})
    told = {
        "average_performance": 70,
        "forgetting_rate": -5,
        "forgetting": -5,
        "bwt": 5,
        "fwt": -2.5,
        "learning_accuracy": 67.5,
        "area": 65,
    }
    assert {name: found[name] for name in told} == pytest.approx(told, rel=1e-14)


def test_with_one_task_nothing_is_forgotten_and_nothing_transferred() -> None:
    found = of([[72.0]], separate={"a": 70}, joint={"a": 71}, initial={"a": 50})
    undefined = dict.fromkeys(("forgetting_rate", "forgetting", "bwt", "zero_shot_transfer"))
    assert found == {
        **undefined,
        "average_performance": 72,
        "fwt": 2,
        "learning_accuracy": 72,
        "intransigence": -1,
        "area": 72,
    }


def test_the_titles_are_those_of_the_measures() -> None:
    assert list(of(RISE)) == list(TITLES)


# -- the matrix ------------------------------------------------------------------------------------------


def test_a_matrix_has_a_row_before_training_and_nothing_above_the_task_at_hand() -> None:
    frame = rows(PEAK, order="2-0-1", unlearnt=[50, 40, 55], n=7).sample(frac=1, random_state=1)
    matrix = accuracy_matrix(frame, "til")
    none = math.nan
    told = [[50, none, none], [80, 40, none], [84, 90, 55], [70, 85, 60]]
    np.testing.assert_array_equal(matrix.scores, told)
    assert matrix.tasks == ("c", "a", "b")
    assert matrix.rows.tolist() == [7, 7, 7]
    assert (matrix.learned.tolist(), matrix.final.tolist()) == ([80, 90, 60], [70, 85, 60])
    assert matrix.before_learning.tolist() == [50, 40, 55]
    assert matrix.finished


def test_settings_are_kept_apart() -> None:
    both = pd.concat([rows(PEAK), rows(RISE, order="0-1-2", scenario="cil")])
    assert len(accuracy_matrix(both, "til")) == 3
    assert accuracy_matrix(both, "cil").tasks == ("a", "b")


def test_a_run_on_its_way_has_the_tasks_that_it_has_learnt() -> None:
    matrix = accuracy_matrix(rows(PEAK[:2], order="0-1-2", unlearnt=[50, 40, 55]), "til")
    assert matrix.scores.shape == (3, 2)
    assert not matrix.finished
    assert compute_metrics(matrix)["forgetting"] == -4


def test_a_run_that_has_learnt_nothing_defines_nothing() -> None:
    start = rows((), order="0-1", unlearnt=[50])
    matrix = accuracy_matrix(start, "til")
    assert (len(matrix), matrix.scores.shape) == (0, (1, 0))
    assert set(compute_metrics(matrix).values()) == {None}


def test_models_of_single_tasks_keep_their_scores() -> None:
    found = compute_metrics(accuracy_matrix(own([80, 90, 70]), "til"))
    assert [found[name] for name in ("average_performance", "forgetting", "forgetting_rate")] == [80, 0, 0]
    assert found["area"] == pytest.approx((80 + 85 + 80) / 3)
    scored = accuracy_matrix(rows(RISE, method="separate"), "til")
    assert scored.final.tolist() == [65, 75], "what was scored stands"
    assert np.isnan(accuracy_matrix(own([80, 90, 70]), "til").scores[np.triu_indices(3)]).all()
    other = compute_metrics(accuracy_matrix(own([80, 90, 70], method="finetune"), "til"))
    assert [other[name] for name in ("average_performance", "forgetting", "learning_accuracy")] == [None, None, 80]


def change(**values: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A mistake: the first row gets these values."""

    def changed(frame: pd.DataFrame) -> pd.DataFrame:
        first = frame.index == frame.index[0]
        return frame.assign(**{name: frame[name].astype(object).mask(first, new) for name, new in values.items()})

    return changed


@pytest.mark.parametrize(
    "mistake, message",
    [
        (lambda frame: frame.drop(columns=["n", "seed"]), "missing: seed, n"),
        (lambda frame: frame.iloc[:0], "at least one row, the table is empty"),
        (lambda frame: frame.assign(score=math.nan), "expected score in every row, got none in 6"),
        (change(score=None), "expected score in every row, got none in 1"),
        (lambda frame: frame.assign(score=frame["score"] + 40), "expected score from 0 to 100, got 120"),
        (lambda frame: frame.assign(n=0), "expected n of at least 1, got 0"),
        (lambda frame: pd.concat([frame, frame.iloc[:1]]), "each score once, several are of stream letters"),
        (lambda frame: pd.concat([frame, rows(PEAK, seed=1)]), "the rows of one run, got those of 2"),
        (lambda frame: frame.assign(scenario="cil"), r"scenario: expected one that was scored \(cil\), got til"),
        (lambda frame: frame.assign(order="first"), 'numbers of tasks as in "2-0-1"'),
        (lambda frame: frame.assign(order="0-1"), "expected 2 tasks as in the order 0-1, got a task 3"),
        (lambda _: rows(RISE, order="0-1-2", unlearnt=[50] * 3).assign(order="0-1"), "order 0-1, got a task 3"),
        (lambda frame: frame[frame["task_index"] != 2], "at each task_index from 1 to 3, got 1 a"),
        (lambda frame: frame.assign(task="a"), "expected one task, with one n, at each task_index"),
        (change(n=99), r"expected one task, with one n, at each task_index .* 1 a \(n 99\), 1 a \(n 100\)"),
    ],
)
def test_what_is_wrong_with_rows_is_said(mistake: Callable[[pd.DataFrame], pd.DataFrame], message: str) -> None:
    with pytest.raises(UserError, match=message):
        accuracy_matrix(mistake(rows(PEAK)), "til")


# -- against loops, and whatever the numbers -------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(triangles(least=2))
def test_the_measures_are_those_of_plain_loops(a: list[list[float]]) -> None:
    last, old = len(a), range(len(a) - 1)
    found = of(a)
    assert found["average_performance"] == pytest.approx(sum(a[-1]) / last)
    assert found["bwt"] == pytest.approx(sum(a[-1][j] - a[j][j] for j in old) / (last - 1), abs=1e-9)
    best = [max(a[i][j] for i in range(j, last - 1)) for j in old]
    assert found["forgetting_rate"] == pytest.approx(sum(best[j] - a[-1][j] for j in old) / (last - 1), abs=1e-9)
    assert found["area"] == pytest.approx(sum(sum(scores) / len(scores) for scores in a) / last)


@settings(max_examples=50, deadline=None)
@given(triangles(least=2))
def test_forgetting_is_backward_transfer_turned_round_and_less_than_from_the_best(a: list[list[float]]) -> None:
    found = of(a)
    assert found["forgetting"] is not None
    assert found["bwt"] is not None
    assert found["forgetting_rate"] is not None
    assert found["forgetting"] == -found["bwt"]
    assert found["forgetting_rate"] >= found["forgetting"] - 1e-9


@pytest.mark.exhaustive
@settings(max_examples=25, deadline=None)
@given(st.lists(SCORES, min_size=2, max_size=6))
def test_where_no_score_changes_nothing_is_forgotten(scores: list[float]) -> None:
    found = of([scores[: i + 1] for i in range(len(scores))])
    assert (found["forgetting"], found["bwt"], found["forgetting_rate"]) == (0, 0, 0)
    assert found["average_performance"] == found["learning_accuracy"]


@pytest.mark.exhaustive
@settings(max_examples=25, deadline=None)
@given(triangles(least=2), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_is_nothing(a: list[list[float]], chance: object) -> None:
    frame = rows(a)
    places = list(range(len(frame)))
    chance.shuffle(places)  # type: ignore[attr-defined]
    shuffled = frame.iloc[places]
    assert compute_metrics(accuracy_matrix(shuffled, "til")) == compute_metrics(accuracy_matrix(frame, "til"))


# -- tables of runs --------------------------------------------------------------------------------------


def test_each_run_is_held_against_the_models_of_its_own_seed() -> None:
    scores = pd.concat(
        [
            rows(RISE, seed=0),
            rows(RISE, seed=1),
            rows(RISE, seed=2),
            own([70, 70], seed=0),
            own([50, 60], seed=1),
            at_end([80, 80], seed=0),
            own([0, 0], seed=2, stream="others"),
        ]
    )
    table = metrics_table(scores)
    key = {"method": "finetune", "stream": "letters"}
    assert value(table, "fwt", seed=0, **key) == -2.5
    assert value(table, "fwt", seed=1, **key) == 12.5
    assert math.isnan(value(table, "fwt", seed=2, **key))
    assert value(table, "intransigence", seed=0, **key) == 12.5
    assert math.isnan(value(table, "intransigence", seed=1, **key))


def test_each_setting_is_held_against_the_models_in_the_same() -> None:
    both = [rows(RISE), rows(RISE, scenario="cil"), at_end([80, 80]), at_end([40, 50], scenario="cil")]
    found = metrics_table(pd.concat(both))
    values = [value(found, "intransigence", method="finetune", scenario=scenario) for scenario in ("til", "cil")]
    assert values == [12.5, -22.5]


def test_tasks_are_found_by_name_in_whatever_order_the_others_learnt_them() -> None:
    turned = own([75, 60], order="1-0")
    assert value(metrics_table(pd.concat([rows(RISE), turned])), "fwt", method="finetune") == 0
    same = own([50, 75], order="0-1")
    assert value(metrics_table(pd.concat([rows(RISE), turned, same])), "fwt", method="finetune") == 5
    third = rows(((60,), (65, 75), (0, 0, 0)), order="0-1-2")
    assert math.isnan(value(metrics_table(pd.concat([third, turned])), "fwt", method="finetune"))


def test_several_orders_of_the_others_are_averaged_when_none_is_the_same() -> None:
    others = pd.concat([own([60, 75, 1], order="0-1-2"), own([2, 80, 71], order="2-1-0")])
    run = rows(((60,), (60, 1.5), (60, 1.5, 75)), order="0-2-1")
    found = metrics_table(pd.concat([run, others]))
    assert value(found, "fwt", method="finetune") == pytest.approx(((60 - 65.5) + (1.5 - 1.5) + (75 - 77.5)) / 3)


def test_others_are_taken_at_their_last_and_not_before_they_learnt() -> None:
    joint = rows(((1,), (80, 90)), method="joint", unlearnt=[50, 50])
    for others in (joint, joint.iloc[::-1]):
        assert value(metrics_table(pd.concat([rows(RISE), others])), "intransigence", method="finetune") == 85 - 67.5
    on_its_way = rows(((70,),), method="separate", order="0-1", unlearnt=[50, 50])
    assert math.isnan(value(metrics_table(pd.concat([rows(RISE), on_its_way])), "fwt", method="finetune"))


def test_a_model_of_all_tasks_has_its_average_alone() -> None:
    table = metrics_table(pd.concat([at_end([80, 90]), own([70, 70])]))
    found = table[table["method"] == "joint"].set_index("metric")["value"]
    assert found["average_performance"] == 85
    assert found.drop("average_performance").isna().all()


def test_chance_is_what_zero_shot_scores_are_held_against() -> None:
    scores = rows(PEAK, unlearnt=[50, 40, 55])
    assert math.isnan(value(metrics_table(scores), "zero_shot_transfer"))
    assert value(metrics_table(scores, initial={"a": 50, "b": 50, "c": 33}), "zero_shot_transfer") == 6


def test_a_table_says_of_which_run_and_setting_each_value_is() -> None:
    scores = pd.concat([rows(PEAK, seed=3), rows(RISE, seed=4, scenario="cil"), rows(RISE, seed=5, order="0-1-2")])
    table = metrics_table(scores)
    assert list(table.columns) == ["stream", "method", "seed", "order", "scenario", "metric", "value"]
    assert set(map(tuple, table[["seed", "scenario"]].to_numpy())) == {(3, "til"), (4, "cil"), (5, "til")}
    assert len(table) == 3 * len(TITLES)
    assert value(table, "average_performance", seed=4) == 70
    assert table[table["seed"] == 5]["value"].isna().all(), "a run on its way has no measures"


def test_the_columns_are_those_of_the_design() -> None:
    assert set(rows(PEAK).columns) == set(COLUMNS)
