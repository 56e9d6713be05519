"""The report on a sweep: combinations, differences, page and terminal."""

import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from regard.commands.sweep.means import Comparison, Mean, average, difference, format_mean, name_combination
from regard.commands.sweep.page import LINES, over_seeds, sweep_page
from regard.commands.sweep.terminal import sweep_summary
from regard.commands.sweep.words import format_difference, make_key_figures
from regard.report.labels import format_signed
from regard.runs.intervals import SeedDifference
from tests.commands.pretrain import pretrain_run
from tests.report.parsed import Parsed, assert_accessible, assert_self_contained

T_2, T_10 = 4.302653, 2.228139
"""The 0.975 quantiles of Student's t for 2 and for 10 degrees of freedom."""

LOSSES = {"softmax": [3.70, 3.72, 3.74], "sigmoid": [3.71, 3.72, 3.75], "elu": [3.90, 3.93, 3.91]}


def trials(losses: dict[str, list[float]] | None = None) -> pd.DataFrame:
    """Finished trials over one varied field; the sink rate is ten times the loss for softmax and 0 for the others."""
    rows = [
        {
            **{"key": f"{name}-{seed}", "seed": seed, "attention": name, "valid_loss": loss},
            **{"sink_rate": 10 * loss if name == "softmax" else 0.0, "alpha_first": loss / 20},
        }
        for name, values in (losses or LOSSES).items()
        for seed, loss in enumerate(values)
    ]
    return pd.DataFrame(rows)


def record(names: Sequence[str] = tuple(LOSSES), seeds: int = 3, **changed: Any) -> dict[str, Any]:
    """The record of the sweep that `trials` is of, every trial finished."""
    every = [
        {
            **{"key": f"{name}-{seed}", "values": {"attention": name}, "seed": seed},
            **{"state": "done", "attempts": 1, "error": None},
        }
        for name in names
        for seed in range(seeds)
    ]
    return {"vary": {"attention": list(names)}, "seeds": seeds, "trials": every, **changed}


def histories(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """A history for each trial, its validation loss raised by a tenth for each seed."""
    base = pretrain_run.history(200, 10, 50)
    return {
        str(row.key): base.assign(valid_loss=base["valid_loss"] + 0.1 * float(row.seed))
        for row in table.itertuples(index=False)
    }


RUN = (trials(), record(), histories(trials()))


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed(sweep_page(*RUN))


def ids(page: Parsed) -> set[str | None]:
    return {attributes.get("id") for _, attributes in page.tags}


def terminal(*tables: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(sweep_summary(*tables))
    return out.getvalue()


# -- differences and means


def test_paired_differences_are_those_of_a_paired_t_test() -> None:
    table = trials()
    first, rows = (table[table["attention"] == name] for name in ("softmax", "elu"))
    found = difference(first, rows, "valid_loss")
    gaps = np.subtract(LOSSES["elu"], LOSSES["softmax"])
    half = T_2 * gaps.std(ddof=1) / math.sqrt(3)
    assert found is not None
    assert found.pairs > 0
    np.testing.assert_allclose((found.low, found.high), (gaps.mean() - half, gaps.mean() + half), rtol=1e-4)
    assert found.value == pytest.approx(np.mean(LOSSES["elu"]) - np.mean(LOSSES["softmax"]))
    assert not found.overlaps


def test_other_seeds_give_welchs_interval() -> None:
    random = np.random.default_rng(3)
    first, rows = random.normal(0, 1, 6), random.normal(1, 3, 9)
    table = [pd.DataFrame({"seed": np.arange(len(v)) + s, "x": v}) for v, s in ((first, 0), (rows, 100))]
    found = difference(*table, "x")
    assert found is not None
    assert found.pairs == 0
    variances = first.var(ddof=1) / 6, rows.var(ddof=1) / 9
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / 5 + variances[1] ** 2 / 8)
    assert math.floor(freedom) == 10
    half = T_10 * math.sqrt(sum(variances))
    np.testing.assert_allclose((found.high - found.low) / 2, half, rtol=1e-4)
    np.testing.assert_allclose(found.value, rows.mean() - first.mean())


def test_combinations_of_one_name_are_told_apart() -> None:
    """A list, and a text with a comma: each has its own trials."""
    table = trials({"x": [1.0, 2.0], "y": [3.0, 5.0]})
    planned = record(("x", "y"), 2)
    for trial in planned["trials"]:
        trial["values"] = {"data": ["a, b"] if trial["key"].startswith("x") else ["a", "b"]}
    found = Comparison.of(table, planned).combinations
    assert [(item.name, len(item.rows), item.num_planned) for item in found] == [
        ("data a, b", 2, 2),
        ("data a, b (2)", 2, 2),
    ]
    assert [item.rows["key"].str[0].unique().tolist() for item in found] == [["x"], ["y"]]


def test_one_seed_gives_a_difference_without_interval() -> None:
    one, other = (pd.DataFrame({"seed": [0], "x": [value]}) for value in (1.0, 3.0))
    found = difference(one, other, "x")
    assert found is not None
    assert found.value == 2
    assert not found.has_interval
    assert difference(one, other.assign(x=np.nan), "x") is None
    assert difference(one.iloc[:0], other, "x") is None


def test_means_are_told_to_the_errors_second_digit() -> None:
    mean = average(np.array([3.70, 3.72, 3.74]))
    assert mean.error == pytest.approx(0.02 / math.sqrt(3))
    assert format_mean(mean) == "3.720 ± 0.012"
    assert format_mean(average(np.array([37.4567])), "%") == "37.5 %"
    assert format_mean(average(np.array([2.0, 2.0]))) == "2.00"
    assert format_mean(average(np.array([])), "%") == "–"


@pytest.mark.parametrize(
    "value, places, text", [(-0.0123, 3, "−0.012"), (0.0004, 3, "0.000"), (1.5, None, "+1.50"), (0.0, None, "0")]
)
def test_signs(value: float, places: int | None, text: str) -> None:
    assert format_signed(value, places) == text


@pytest.mark.parametrize(
    "value, half, told",
    [
        (-1.08, 1.1, ["−1.08", "−2.18 to +0.02", "overlaps 0"]),
        (-1.12, 1.1, ["−1.12", "−2.22 to −0.02", "lower"]),
        (-1.5, 1.1, ["−1.5", "−2.6 to −0.4", "lower"]),
        (0.0, 0.0, ["0.000", "0.000 to 0.000", "overlaps 0"]),
    ],
)
def test_an_end_near_0_is_not_written_as_0(value: float, half: float, told: list[str]) -> None:
    assert format_difference(SeedDifference(value, half, 3), "") == told


def test_equal_extremes_are_all_named() -> None:
    rows = [(f"k{i}", seed, 3.0 + seed, value) for i, value in enumerate((0.0, 0.0, 5.0)) for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["key", "seed", "valid_loss", "sink_rate"])
    planned = [{"key": f"k{i}", "values": {"attention": name}, "seed": 0} for i, name in enumerate("abc")]
    figures = make_key_figures(Comparison.of(table, {"vary": {"attention": []}, "trials": planned}))
    notes = {figure.label: figure.note for figure in figures}
    assert notes == {
        "Validation loss, lowest": "the same: a, b, c",
        "Sink₀, highest": "c",
        "Sink₀, lowest": "the same: a, b",
    }


def test_names_tell_the_field_where_the_value_alone_would_not() -> None:
    values = {"attention": "sigmoid", "weight_decay": 0.5, "fixed_token": None, "random_tokens": [0, 1]}
    assert name_combination(values) == "sigmoid, weight decay 0.5, fixed token none, random tokens 0, 1"


def test_curves_are_means_over_the_seeds_at_common_steps() -> None:
    frames = [
        pd.DataFrame({"step": [0, 1, 2, 2, 3], "x": [1.0, None, 99.0, 3.0, 9.0]}),  # of one step the last value counts
        pd.DataFrame({"step": [0, 1, 2], "x": [3.0, 5.0, 7.0]}),
        pd.DataFrame({"step": [0, 1, 2]}),
    ]
    step, mean, error = over_seeds(frames, "x")
    assert (step.tolist(), mean.tolist()) == ([0, 2], [2, 5])
    np.testing.assert_allclose(error, [math.sqrt(2) / math.sqrt(2), math.sqrt(8) / math.sqrt(2)])
    assert np.isnan(over_seeds(frames[1:], "x")[2]).all()
    assert over_seeds(frames[2:], "x")[0].size == 0


# -- the page


def test_page_is_self_contained_and_accessible(parsed: Parsed) -> None:
    assert_self_contained(parsed)
    assert_accessible(parsed)


def test_table_tells_means_and_errors(parsed: Parsed) -> None:
    assert "softmax 3 3.720 ± 0.012" in parsed.text
    assert "37.20 ± 0.12 %" in parsed.text
    assert "Sweep over attention" in parsed.text
    assert "3 combinations · 3 seeds · 9 of 9 trials finished" in parsed.text


def test_emergence_is_counted_over_seeds(parsed: Parsed) -> None:
    table = trials().assign(emergence_step=[1000, 1400, None, *[None] * 6])
    page = Parsed(sweep_page(table, record(), {}))
    assert "2 of 3, step 1,200" in page.text
    assert page.text.count("none") == 2
    assert "Sink emerged" not in parsed.text


def test_differences_say_where_they_overlap_zero(parsed: Parsed) -> None:
    assert "Difference from softmax" in parsed.text
    half = T_2 * np.std([0.01, 0.0, 0.01], ddof=1) / math.sqrt(3)
    mean = 0.02 / 3
    assert f"sigmoid +{mean:.3f} −{half - mean:.3f} to +{half + mean:.3f} overlaps 0" in parsed.text
    assert "Validation loss against softmax: 1 higher, 1 not told apart (interval overlaps 0)." in parsed.text
    assert "Sink₀ against softmax: 2 lower." in parsed.text
    assert "paired by seed (Student’s t), not corrected" in parsed.text


def test_equal_differences_of_all_seeds_say_nothing_of_chance() -> None:
    table = trials({"softmax": [3.5, 3.75], "sigmoid": [3.25, 3.5], "elu": [3.5, 3.875]})
    page = Parsed(sweep_page(table, record(seeds=2), {}))
    assert "softmax: 1 not told apart (interval overlaps 0), 1 without an interval." in page.text
    assert "sigmoid −0.25 – no interval" in page.text
    two = table[table["attention"] != "elu"].drop(columns=["sink_rate", "alpha_first"])
    page = Parsed(sweep_page(two, record(["softmax", "sigmoid"], seeds=2), {}))
    assert "The differences of all seeds are equal" in page.text


def test_speed_is_told_but_not_tested() -> None:
    table = trials().assign(tokens_per_second=[12_000.0 + 100 * i for i in range(9)])
    page = Parsed(sweep_page(table, record(), {}))
    assert "12,100 ± 58" in page.text
    assert page.text.count("Tokens per second") == 1


def test_curves_are_drawn_with_bands(parsed: Parsed) -> None:
    first = parsed.data["panels"]["panels"][0]
    assert first["caption"] == "Validation loss"
    ours = [point for point in first["points"] if point["series"] == "elu"]
    base = pretrain_run.history(200, 10, 50).dropna(subset="valid_loss")
    np.testing.assert_allclose([point["value"] for point in ours], base["valid_loss"] + 0.1, rtol=1e-4)
    np.testing.assert_allclose(ours[0]["high"] - ours[0]["value"], 0.1 / math.sqrt(3), rtol=1e-2)
    assert {tuple(style) for style in first["lines"]} == {("softmax", 0, 0), ("sigmoid", 1, 0), ("elu", 2, 0)}
    mass = next(panel for panel in parsed.data["panels"]["panels"] if panel["caption"] == "Mean α₀")
    assert mass["note"] == f"mean over heads, position 0; uniform attention: {pretrain_run.UNIFORM:.3g}"


def test_key_figures_name_the_extremes(parsed: Parsed) -> None:
    assert "Validation loss, lowest3.720 ± 0.012softmax" in parsed.text
    assert "Sink₀, highest37.20 ± 0.12 %softmax" in parsed.text


def test_failed_trials_are_listed_with_their_error() -> None:
    table = trials().query("key not in ('elu-1', 'elu-2')")
    told = record()
    told["trials"][7] |= {"state": "failed", "attempts": 3, "error": "the loss is not finite at step 40"}
    told["trials"][8] |= {"state": "planned", "attempts": 0}
    page = Parsed(sweep_page(table, told, histories(table)))
    assert "elu seed 1 failed 3 the loss is not finite at step 40" in page.text
    assert "elu seed 2 planned 0 –" in page.text
    assert "7 of 9 trials finished" in page.text
    assert "2 trials without a result; means are over the seeds that have one." in page.text
    assert "elu 1 of 3" in page.text
    assert "elu +0.18 – no interval" in page.text
    lines = terminal(table, told)
    assert "elu, seed 1: the loss is not finite at step 40" in lines


def test_without_any_result_the_failures_are_still_told() -> None:
    told = record(("softmax",), 1)
    told["trials"][0] |= {"state": "failed", "error": "disk full"}
    page = Parsed(sweep_page(trials().iloc[:0], told, {}))
    assert_self_contained(page)
    assert "disk full" in page.text
    assert not {"panels", "means-title", "differences-title"} & ids(page)
    assert "disk full" in terminal(trials().iloc[:0], told)


def test_one_seed_is_said_and_gets_no_interval() -> None:
    table = trials({name: values[:1] for name, values in LOSSES.items()})
    page = Parsed(sweep_page(table, record(seeds=1), histories(table)))
    assert "One seed for each combination: there are no standard errors and no intervals." in page.text
    assert "overlaps" not in page.text
    assert "±" not in page.text
    assert "elu +0.2 – no interval" in page.text
    assert all(point["low"] is None for panel in page.data["panels"]["panels"] for point in panel["points"])


def test_one_combination_has_nothing_to_differ_from() -> None:
    table = trials({"softmax": LOSSES["softmax"]})
    page = Parsed(sweep_page(table, record(("softmax",)), {}))
    assert not {"differences-title", "panels"} & ids(page)
    assert "means-title" in ids(page)


def test_combinations_of_two_fields_and_more_than_can_be_drawn() -> None:
    fields = list(itertools.product(("softmax", "sigmoid"), range(11)))
    rows = [(f"k{i}", 0, name, decay, 3.0 + i) for i, (name, decay) in enumerate(fields)]
    table = pd.DataFrame(rows, columns=["key", "seed", "attention", "weight_decay", "valid_loss"])
    planned = [{"key": key, "values": {"attention": name, "weight_decay": decay}} for key, _, name, decay, _ in rows]
    told = {"vary": {"attention": [], "weight_decay": []}, "trials": planned}
    page = Parsed(sweep_page(table, told, histories(table)))
    assert f"Only the first {LINES} of 22 combinations are drawn." in page.text
    assert "sigmoid, weight decay 10" in page.text
    styles = page.data["panels"]["panels"][0]["lines"]
    assert len({(ink, stroke) for _, ink, stroke in styles}) == len(styles) == LINES


def test_hostile_texts_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    told = record(name=evil, command=evil)
    told["trials"][0] |= {"values": {"attention": evil}}
    told["trials"][8] |= {"error": evil, "state": evil}
    page = Parsed(sweep_page(trials().query("key != 'elu-2'"), told, RUN[2]))
    assert_self_contained(page)
    assert [attributes.get("id") for attributes, _ in page.scripts] == ["regard-data", None, None]
    assert "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(evil) >= 5


# -- the terminal


def test_summary_fits_and_tells_means() -> None:
    text = terminal(*RUN[:2])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "3.720 ± 0.012" in text
    assert "37.20 ± 0.12 %" in text
    assert "not told apart" in text


def test_summary_keeps_both_ends_of_long_names() -> None:
    table = pd.DataFrame([(f"k{i}", 0, 3.0) for i in range(2)], columns=["key", "seed", "valid_loss"])
    values = [{"attention": "x" * 80, "weight_decay": decay} for decay in (0.1, 0.5)]
    planned = [{"key": f"k{i}", "values": value} for i, value in enumerate(values)]
    text = terminal(table, {"vary": {"attention": [], "weight_decay": []}, "trials": planned})
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "decay 0.1 " in text
    assert "decay 0.5 " in text


def test_large_means_are_told_to_five_digits() -> None:
    assert format_mean(average(np.array([12_345.0, 12_346.0]))) == "12,346 ± 0.5"


def test_equal_values_have_no_error_of_rounding() -> None:
    assert format_mean(average(np.array([0.1, 0.1, 0.1]) + np.array([0.0, 1e-17, 1e-16]))) == "0.1"


def test_means_over_fewer_trials_than_there_are_say_so() -> None:
    assert format_mean(Mean(2, 3.05, 0.05), of=3) == "3.050 ± 0.050 (n = 2)"
    assert format_mean(Mean(3, 3.05, 0.05), of=3) == "3.050 ± 0.050"


def test_a_key_figure_says_how_many_of_the_trials_it_is_of() -> None:
    """Two seeds of b diverged: the mean of the other is lowest, and is of one trial of three."""
    table = trials({"a": [3.0, 3.0, 3.0], "b": [math.nan, 2.0, math.nan]})
    best = make_key_figures(Comparison.of(table, record(("a", "b"))))[0]
    assert (best.label, best.value, best.note) == ("Validation loss, lowest", "2.00 (n = 1)", "b")


def test_the_summary_says_how_many_of_the_trials_a_mean_is_of() -> None:
    """The mean of 3.71 and 3.75 is 3.73, its standard error 0.02."""
    text = terminal(trials(LOSSES | {"sigmoid": [3.71, math.nan, 3.75]}), record())
    assert max(len(line) for line in text.splitlines()) <= 80
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith(("comb", "sigmoid"))]
    assert cells == [
        ["combination", "seeds", "Validation loss", "Sink₀"],
        ["sigmoid", "3", "3.730 ± 0.020 (n = 2)", "0 %"],
    ]
