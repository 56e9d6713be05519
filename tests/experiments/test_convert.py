"""The experiment on conversions: its runs, its rules and its tables."""

import math
from typing import Any

import pandas as pd
import pytest

from experiments.convert.page import (
    COLUMNS,
    FLOATS,
    Tables,
    choose_rate,
    describe_stages,
    layer_table,
    mean_errors,
    stage_table,
)
from experiments.convert.run import ATTENTIONS, BASES, CONTROL, DEFAULT, LAYER_RATES, SEEDS, STAGES, conversions


def tables(**changed: Any) -> Tables:
    """A run for every case, whose loss is 4 but where the control gives 3, and whose error is its rate."""
    rows = []
    for run in dict.fromkeys(conversions(list(BASES))):
        loss = 3.0 if run.attention == CONTROL else 4.0 + 0.1 * run.seed
        figures = {"untouched": 3.5, "replaced": 5.0, "matched": 4.5, "final": loss, "seconds": 1.0}
        rows.append({**run._asdict(), **figures, "error_before": 1.0, "error_after": run.layer_rate, **changed})
    return Tables(pd.DataFrame(rows, columns=list(COLUMNS["runs"])).astype(dict.fromkeys(FLOATS, float)), {})


def test_the_lowest_rate_that_is_near_enough() -> None:
    means = {1e-3: 0.5, 3e-3: 0.15, 1e-2: 0.1}
    assert choose_rate(means, 0.1) == 3e-3
    assert choose_rate(means, 0.01) == 1e-2
    assert choose_rate(means, 1.0) == 1e-3


def test_means_are_over_bases_and_attentions() -> None:
    means = mean_errors(tables())
    assert means == {rate: pytest.approx(math.log(rate)) for rate in LAYER_RATES}
    assert len(tables().values("error_after")) == len(BASES) * len(ATTENTIONS)


@pytest.mark.exhaustive
def test_losses_stand_above_the_model_that_was_trained_as_long() -> None:
    lines = stage_table(tables()).rows
    first = lines[0]
    assert first[1].startswith(f"`{CONTROL}`")
    assert first[3].startswith("-0.500 ± 0.000")
    assert len(lines) == len(BASES) * (1 + len(ATTENTIONS))
    half = 4.303 * 0.1 / math.sqrt(len(SEEDS))  # Student's t with two degrees of freedom
    assert lines[1][2] == "+1.500"
    assert lines[1][3] == f"+1.100 ± {half:.3f}"


def test_the_first_stage_pays_where_the_intervals_say_so() -> None:
    some = tables().runs
    both = some["stages"] == "both"
    some.loc[both & (some["attention"] == "sigmoid"), "final"] -= 1
    some.loc[both & (some["attention"] == "linear"), "final"] += 1
    found = describe_stages(Tables(some, {}))
    assert "less with `sigmoid`; more with `linear`; what cannot be told apart with `softmax+window=16`" in found


def test_runs_that_are_missing_leave_a_dash() -> None:
    some = tables()
    gone = (some.runs["layer_rate"] == LAYER_RATES[0]) & (some.runs["layer_rate"] != DEFAULT.layer_learning_rate)
    table = layer_table(Tables(some.runs[~gone], {}))
    assert {line[3] for line in table.rows} == {"–"}


def test_stages_have_as_many_updates() -> None:
    assert len({sum(steps) for steps in STAGES.values()}) == 1
