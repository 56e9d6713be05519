"""The experiment on pre-scaling where accuracy has room: its rule and its page."""

import pandas as pd
import pytest

from experiments.prescale.room import METHODS, ROWS, SEEDS
from experiments.prescale.room_page import PROBING, SCALING, Tables, describe_answer, gain_table, judge, make_page

STREAM = next(iter(ROWS))


def tables(gain: float, spread: float, probing: float = 80.0) -> Tables:
    """All runs: pre-scaling is above probing by so much, and from seed to seed by so much more or less."""
    rows = []
    for stream in ROWS:
        for method in METHODS:
            for number, seed in enumerate(SEEDS):
                more = gain + spread * (-1) ** number if method == SCALING else 0.0
                scores = {"AP til": probing + more, "AP cil": 40.0}
                rows.append({"stream": stream, "method": method, "seed": seed, **scores, "cpu_seconds": 60.0})
    return Tables(pd.DataFrame(rows, columns=list(Tables.columns)), {})


@pytest.mark.parametrize(
    "gain, spread, verdict",
    [
        (3.0, 1.0, "adds"),
        (-3.0, 1.0, "takes"),
        (0.1, 0.5, "adds less than a point"),
        (0.5, 1.0, "cannot be told"),  # ± 2.571 · √(6/5) / √6 = ± 1.15, times the spread
    ],
)
def test_the_rule_reads_the_interval(gain: float, spread: float, verdict: str) -> None:
    assert judge(tables(gain, spread), STREAM) == verdict
    answer = describe_answer(tables(gain, spread))
    assert answer.startswith(f"{verdict.capitalize()} on `{STREAM}`, ")
    assert f"Gains above {gain + spread * 2.571 * (6 / 5) ** 0.5 / 6**0.5:.1f}, " in answer


def test_a_stream_at_the_ceiling_decides_nothing() -> None:
    assert judge(tables(3.0, 1.0, probing=97.0), STREAM) == "no room"


def test_seeds_that_are_missing_decide_nothing() -> None:
    some = tables(3.0, 1.0).runs
    fewer = Tables(some[~((some["method"] == PROBING) & (some["seed"] == SEEDS[-1]))], {})
    assert judge(fewer, STREAM) is None
    assert describe_answer(fewer) == "The runs are not complete."
    assert gain_table(fewer).rows[0][-1] == "–"
    assert make_page(tables(3.0, 1.0)).to_markdown().count("| adds |") == len(ROWS)
