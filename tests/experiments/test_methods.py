"""The experiment on the method by default: its rule and its page."""

from typing import Any

import pandas as pd
import pytest

from experiments.common.method_runs import earlier_settings
from experiments.methods.page import Tables, describe_choice, follows_rule, gain_table, knows_tasks, make_page
from experiments.methods.run import BESIDE, CANDIDATE, METHODS, PRESENT, ROUTED, SEEDS, STREAMS
from regard.commands.learn.config import LearnConfig


def tables(cil: float = 10.0, til: float = 0.0, **changed: Any) -> Tables:
    """All runs: the candidate is above the present method by so much, and a little more from seed to seed."""
    rows = []
    for stream in STREAMS:
        for method in METHODS:
            for number, seed in enumerate(SEEDS):
                more = (cil + number, til) if method == CANDIDATE else (0.0, 0.0)
                scores = {"AP til": 80.0 + more[1], "AP cil": 40.0 + more[0]}
                rows.append({"stream": stream, "method": method, "seed": seed, **scores, "cpu_seconds": 60.0})
    return Tables(pd.DataFrame(rows, columns=list(Tables.columns)).assign(**changed), {})


@pytest.mark.parametrize(
    "cil, til, holds", [(10.0, 0.0, True), (10.0, -2.0, True), (10.0, -2.1, False), (1.0, 0.0, False)]
)
def test_the_rule_wants_an_interval_above_0_and_little_lost(cil: float, til: float, holds: bool) -> None:
    # gains of 1, 2 and 3: 2 ± 4.303 / √3 reaches below 0
    assert follows_rule(tables(cil, til), STREAMS[0]) is holds
    chosen = CANDIDATE if holds else PRESENT
    assert f"It is `{chosen}`" in describe_choice(tables(cil, til))
    said = "so is the default" if chosen == LearnConfig().method else "the default departs from it"
    assert said in describe_choice(tables(cil, til))


def test_one_stream_that_fails_is_enough() -> None:
    some = tables().runs
    some.loc[(some["stream"] == STREAMS[1]) & (some["method"] == CANDIDATE), "AP til"] -= 3
    assert f"the rule fails on `{STREAMS[1]}`;" in describe_choice(Tables(some, {}))
    assert [row[-1] for row in gain_table(Tables(some, {})).rows] == ["holds", "fails", "holds"]


def test_seeds_that_are_missing_decide_nothing() -> None:
    some = tables().runs
    fewer = Tables(some[~((some["method"] == PRESENT) & (some["seed"] == SEEDS[2]))], {})
    assert follows_rule(fewer, STREAMS[0]) is None
    assert describe_choice(fewer) == "The runs are not complete."
    beside = Tables(some[some["method"] != BESIDE], {})
    assert follows_rule(beside, STREAMS[0])
    assert "| `stdlib-split` | +11.0 ± 2.5 | +0.0 ± 0.0 | holds |" in make_page(beside).to_markdown()


@pytest.mark.parametrize("changes, knows", [((3, -1, 0), True), ((3, -1.1, 0), False), ((-0.5, 0, 0.4), False)])
def test_known_tasks_have_their_adapters_if_they_gain_and_no_stream_loses(
    changes: tuple[float, ...], knows: bool
) -> None:
    some = tables().runs
    for stream, change in zip(STREAMS, changes, strict=True):
        some.loc[(some["stream"] == stream) & (some["method"] == ROUTED), "AP til"] -= change
    assert knows_tasks(Tables(some, {})) is knows
    page = " ".join(make_page(Tables(some, {})).to_markdown().split())
    assert f"By it the choice is `{'adapter' if knows else 'router'}`; " in page
    assert knows_tasks(Tables(some[some["method"] != ROUTED], {})) is None


def test_settings_of_most_pages_are_those_that_a_method_has() -> None:
    assert earlier_settings("sapt") == {"target_modules": "auto", "known_task": "router"}
    assert earlier_settings("replay-lora") == {"target_modules": "auto"}
    assert earlier_settings("finetune") == {}
