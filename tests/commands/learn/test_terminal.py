"""What a report on continual learning computes and writes as text: metrics, intervals, forgetting, the terminal."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from regard.commands.learn.charts import MAX_DOTS, average_forgetting, average_seen_tasks, make_dot_panel
from regard.commands.learn.diagnostics import average_layers
from regard.commands.learn.metrics import (
    METRICS,
    Estimate,
    format_bytes,
    format_estimate,
    format_fixed,
    format_p_value,
    get_metric,
    order_metrics,
)
from regard.commands.learn.page import learn_page
from regard.commands.learn.tables import compute_correlation, compute_forgetting
from regard.commands.learn.terminal import FUTURE_NOTE, learn_summary, shorten_names
from regard.commands.learn.words import describe_overlap
from regard.report.labels import format_signed
from tests.commands.learn import learned

TABLES = learned.tables()


def terminal(*tables: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(learn_summary(*tables))
    return out.getvalue()


def half(*values: float) -> float:
    return float(learned.QUANTILE * np.std(values, ddof=1) / np.sqrt(len(values)))


# -- numbers


def test_every_metric_of_the_paper_has_a_title() -> None:
    names = [
        "area",
        "something_else",
        "average_performance",
        "forgetting_rate",
        "forgetting",
        "bwt",
        "fwt",
        "intransigence",
        "learning_accuracy",
    ]
    assert order_metrics(names)[:3] == ["average_performance", "forgetting", "forgetting_rate"]
    assert order_metrics(names)[-1] == "something_else"
    assert (get_metric("forgetting_rate").title, get_metric("something_else").title) == ("F.Ra", "something else")
    assert [name for name, one in METRICS.items() if not one.higher_is_better] == [
        "forgetting",
        "forgetting_rate",
        "intransigence",
    ]


def test_correlations() -> None:
    x, y = [1.0, 2.0, 4.0, 7.0], [2.0, 1.0, 5.0, 4.0]
    assert compute_correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(compute_correlation(x[:2], y[:2]))
    assert np.isnan(compute_correlation(x, [1.0] * 4))


def test_forgetting_is_first_score_less_last() -> None:
    found = compute_forgetting(TABLES["matrix"].query("scenario == 'cil'"))
    assert found.query("method == 'finetune'").groupby("task_index")["forgetting"].mean().to_dict() == {
        1: 24,
        2: 16,
        3: 8,
    }
    assert "joint" not in set(found["method"])


def test_unfinished_rows_make_no_mean() -> None:
    rows = TABLES["matrix"].query("task_index <= after_task and scenario == 'til'").iloc[1:]
    assert 1 not in set(average_seen_tasks(rows.query("method == 'finetune' and seed == 39"))["after_task"])
    assert set(average_forgetting(rows.query("method == 'finetune' and seed == 39"))["after_task"]) == set()
    assert set(average_forgetting(rows.query("method == 'finetune' and seed == 123"))["value"]) == {8, 12, 16}


def test_without_a_value_for_all_layers_their_mean_is_taken() -> None:
    table = TABLES["diagnostics"]
    found = average_layers(table[table["layer"].notna()]).set_index(
        ["method", "seed", "order", "task_index", "statistic", "after_task"]
    )
    assert found.loc[("finetune", 39, learned.ORDER, 2, "over_smoothing", 2), "value"] == 6
    own = average_layers(table).set_index(["method", "seed", "order", "task_index", "statistic", "after_task"])
    assert own.loc[("finetune", 39, learned.ORDER, 2, "over_smoothing", 2), "value"] == 17


# -- texts


@pytest.mark.parametrize(
    "one, text",
    [
        (Estimate(3, 90.918, 90.508, 91.328), "90.92 ± 0.41"),
        (Estimate(1, 90.918, np.nan, np.nan), "90.92"),
        (Estimate(3, 90.0, 80.0, 91.0), "90.00 (80.00 to 91.00)"),
        (Estimate(3, -0.5, -0.6, -0.4), "−0.50 ± 0.10"),
        (None, "–"),
    ],
)
def test_estimates(one: Estimate | None, text: str) -> None:
    assert format_estimate(one) == text


def test_intervals_overlap_where_they_touch() -> None:
    one, above, touching = Estimate(3, 2, 1, 3), Estimate(3, 5, 4, 6), Estimate(3, 4, 3, 5)
    assert describe_overlap(above, one) == describe_overlap(one, above) == "the 95 % intervals do not overlap"
    assert describe_overlap(one, touching) == describe_overlap(touching, one) == "the 95 % intervals overlap"
    assert "no intervals" in describe_overlap(one, Estimate(1, 2, np.nan, np.nan))


def test_numbers() -> None:
    assert (format_fixed(-0.004), format_fixed(1234.5), format_fixed(np.nan)) == ("0.00", "1,234.50", "–")
    assert tuple(format_signed(value, 2) for value in (0.001, 2, -2)) == ("0.00", "+2.00", "−2.00")
    assert (format_bytes(0), format_bytes(1536), format_bytes(2**20), format_bytes(np.nan)) == (
        "0 B",
        "1.50 KiB",
        "1.00 MiB",
        "–",
    )
    assert (format_p_value(0.0004), format_p_value(0.0312), format_p_value(np.nan)) == ("< 0.001", "0.031", "–")


def test_dots_are_thinned() -> None:
    points = [("m", "", i, i, "") for i in range(2 * MAX_DOTS)]
    (panel,) = make_dot_panel("Many", "", "x", points, [("m", 0, 0)])
    assert len(panel["points"]) == MAX_DOTS
    assert make_dot_panel("None", "", "x", points, [("other", 0, 0)]) == []


def test_script_is_shipped_beside_its_page() -> None:
    source = Path(learn_page.__code__.co_filename).parent / "page.js"
    assert source.read_text(encoding="utf-8").strip() in learn_page(TABLES, {})


# -- the terminal


def test_summary_fits_and_tells_what_matters() -> None:
    text = terminal(TABLES, learned.record())
    assert max(len(line) for line in text.splitlines()) <= 80
    rows = [line.split() for line in text.splitlines()]
    width = format_fixed(half(0, 0.1, 0.2))
    assert ["method", "runs", "AP", "TIL", "FGT", "TIL", "AP", "CIL", "FGT", "CIL"] in rows
    first = ["94.60", "±", width, "2.00", "±", "0.00"]
    assert ["prescale", "3", *first, "74.60", "±", width, "2.00", "±", "0.00"] in rows
    assert [row[0] for row in rows[4:7]] == ["joint", "prescale", "finetune"]
    assert "after 1" not in text


def test_summary_of_one_run_has_its_matrix() -> None:
    scores = learned.matrix(("finetune",), (39,), ("a", "a much longer name than there is room for", "c"))
    rows = [line.split() for line in terminal(learned.tables(scores), {}).splitlines()]
    assert ["TIL", "a", "a", "much", "longer", "name", "t…", "c"] in rows
    assert ["before", "(50.0)", "–", "–"] in rows
    assert ["after", "3", "80.0", "88.0", "96.0"] in rows
    assert ["after", "3", "60.0", "68.0", "76.0"] in rows


def test_scores_of_tasks_not_yet_learnt_are_marked() -> None:
    """Where there are such: their digits stand below those of the others."""
    scores = learned.matrix(("finetune",), (39,))
    lines = terminal(learned.tables(scores), {}).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("TIL")))
    assert lines[start + 2].split() == ["after", "1", "96.0", "(50.0)", "–", "–"]
    assert lines[start + 5].split() == ["after", "4", "72.0", "80.0", "88.0", "96.0"]
    assert lines[start + 6] == FUTURE_NOTE
    assert lines[start + 1].index("50.0") == lines[start + 2].index("96.0")
    assert lines.count(FUTURE_NOTE) == 1
    assert FUTURE_NOTE not in terminal(learned.tables(scores[scores["task_index"] <= scores["after_task"]]), {})


@pytest.mark.parametrize(
    "names, wide, told",
    [
        (("Politics", "Police"), 8, ["Politics", "Police"]),
        (("task591_sciq", "task363_sst2"), 6, ["591_s…", "363_s…"]),
        (("task1572_samsum", "task1510_evalution"), 7, ["1572_s…", "1510_e…"]),
        (("amazon_books", "amazon_baby"), 7, ["books", "baby"]),
        (("amazon_books", "amazon_music", "yelp_food"), 7, ["1 amaz…", "2 amaz…", "yelp_f…"]),
        (("a long name",), 6, ["a lon…"]),
        (("the same name", "the same name"), 7, ["1 name", "2 name"]),
        (("long", "long name"), 6, ["long", "long …"]),
    ],
)
def test_names_keep_what_tells_them_apart(names: tuple[str, ...], wide: int, told: list[str]) -> None:
    found = shorten_names(names, wide)
    assert found == told
    assert max(map(len, found)) <= wide


def test_names_of_many_tasks_are_told_apart() -> None:
    tasks = [f"task{number}_of_natural_instructions" for number in (591, 363, 1290, 181, 2, 1510, 639)]
    lines = terminal(learned.tables(learned.matrix(("finetune",), (39,), tasks)), {}).splitlines()
    assert max(map(len, lines)) <= 80
    (head,) = [line.split() for line in lines if line.startswith("CIL")]
    assert len(set(head)) == 8
    assert head[1].startswith("591")


def test_names_of_methods_take_the_room_that_there_is() -> None:
    name = "sapt-task-free reuse_threshold=1 gate=published"
    scores = learned.matrix((name, "finetune"), (39,), settings=("til",))
    lines = terminal(learned.tables(scores), {}).splitlines()
    assert any(line.startswith(f"{name}     1   91.50") for line in lines)
    assert max(map(len, lines)) <= 80


def test_summary_takes_names_as_they_are() -> None:
    text = terminal(learned.tables(learned.matrix(("[bold]a", "b\nc"))), {})
    assert "[bold]a" in text
    assert "b↵c" in text


def test_summary_cuts_long_names() -> None:
    scores = learned.matrix(("x" * 60, "y" * 60), (39, 123))
    lines = terminal(learned.tables(scores), {}).splitlines()
    assert max(map(len, lines)) <= 80
    assert [len(line) for line in lines if "x…" in line] == [80]
