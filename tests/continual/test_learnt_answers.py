"""Test rows that changed since their task was learnt."""

import json

from hypothesis import given
from hypothesis import strategies as st

from regard.continual.learner import Row
from regard.continual.learnt_answers import compare_with_learnt

UNKNOWN = {"lost": None, "gained": None}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_rows_are_counted_against_those_just_after_the_task(pairs: list[tuple[bool, bool]]) -> None:
    before, after = zip(*pairs, strict=True)
    learnt: list[Row] = []
    assert compare_with_learnt(learnt, 2, "til", 3, before) == {"lost": 0, "gained": 0}
    learnt = json.loads(json.dumps(learnt))  # as in a state on disk
    found = compare_with_learnt(learnt, 2, "til", 5, after)
    assert found == {"lost": pairs.count((True, False)), "gained": pairs.count((False, True))}
    assert found["lost"] - found["gained"] == sum(before) - sum(after)
    assert compare_with_learnt(learnt, 2, "cil", 5, after) == UNKNOWN, "the other scenario was not seen"
    assert compare_with_learnt(learnt, 1, "til", 5, after) == UNKNOWN, "nor the other task"
    assert len(learnt) == 1


def test_a_task_that_is_not_learnt_yet_and_grades_have_no_counts() -> None:
    learnt: list[Row] = []
    assert compare_with_learnt(learnt, 2, "til", 2, (True, False)) == UNKNOWN
    assert compare_with_learnt(learnt, 2, "til", 3, None) == UNKNOWN
    assert learnt == []
