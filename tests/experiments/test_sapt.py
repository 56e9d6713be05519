"""The page of SAPT is what its tables make, and its findings are judged by the rules that it states."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.common.claims import (
    AGAINST,
    AS_PUBLISHED,
    DRAWN,
    HOLDS,
    IN_PART,
    NOT_RUN,
    UNDECIDED,
    Verdict,
    judge_claims,
)
from experiments.common.figures import save_figures
from experiments.common.parts import Page
from experiments.pages import declare_not_run
from experiments.sapt import figures as sapt_figures
from experiments.sapt.analysis_tables import CURVES, curve_table, describe_decoder
from experiments.sapt.claims import CLAIMS, LLAMA, T5, baselines
from experiments.sapt.page import PAPER, SHOWN
from experiments.sapt.run import ORDERS, ROWS, SEEDS
from experiments.sapt.tables import ANALYSES, COLUMNS, MEASURES, PUBLISHED, RECORD, Tables
from regard.continual.methods import METHODS
from regard.errors import UserError
from regard.runs.intervals import t_interval
from tests.experiments import sapt_runs
from tests.experiments.sapt_runs import SCORES, analysis_of, run_of, work_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Nothing changes them: made once."""
    return Tables.gather(work_of(tmp_path_factory.mktemp("runs") / "work"), "abc123")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Runs of both orders, and analyses."""
    work = work_of(tmp_path_factory.mktemp("runs") / "work")
    work_of(work, {row: SCORES[row][:2] for row in ("sapt", "sequential-lora", "separate")}, "4")
    analysis_of(
        work, "share", "real, 10%", [("average_performance cil", None, 61.0), ("own_adapter_weight end", None, 0.876)]
    )
    analysis_of(
        work, "share", "real, 2%", [("average_performance cil", None, 60.0), ("own_adapter_weight end", None, 0.5)]
    )
    curve = [(name, float(x), float(x)) for name in CURVES for x in range(1, 11)]
    analysis_of(work, "fifty", "sapt, 50 tasks", [*curve, ("average_performance cil", None, 10.0)])
    analysis_of(work, "pair", "similar", [("task 1 end", None, 55.0), ("weight of block 1 in task 2", None, 0.25)])
    written = [
        ("average_performance til", None, 40.0),
        ("forgetting_rate til", None, 2.0),
        ("own_adapter_weight end", None, 0.875),
        ("seconds", None, 9.0),
    ]
    analysis_of(work, "decoder", "sapt", [*written, ("average_performance by tasks", 1.0, 3.0)])
    return Tables.gather(work, "abc123")


def find_verdict(tables: Tables, words: str) -> Verdict:
    """Return the verdict of the claim that begins with these words."""
    matches = [verdict for verdict in judge_claims(CLAIMS, tables) if verdict.claim.text.startswith(words)]
    assert len(matches) == 1
    return matches[0]


def files_of(page: Page) -> dict[str, str]:
    return {table.name: table.to_csv() for table in page.tables}


def gathered(folder: Path, scores: Mapping[str, Sequence[float]]) -> Tables:
    return Tables.gather(work_of(folder / "work", scores))


# -- tables ----------------------------------------------------------------------------------------------------------


def test_measures_are_those_of_hand(tables: Tables) -> None:
    """Two tasks of three had a point more when they were learnt; the headline is among all labels."""
    stream = tables.whole
    ap = tables.mean(stream, "sapt")
    assert ap is not None
    wanted = t_interval([70.0, 71.0, 72.0])
    assert [ap.n, ap.mean, ap.ci_low] == pytest.approx([3, 71.0, wanted.ci_low])
    values = {
        (metric, setting): tables.mean(stream, "sapt", metric, setting)
        for metric, setting in (
            ("average_performance", "til"),
            ("forgetting_rate", "cil"),
            ("learning_accuracy", "cil"),
            ("fwt", "til"),
        )
    }
    means = [one.mean for one in values.values() if one is not None]
    assert means == pytest.approx([76.0, 1.0, 71 + 2 / 3, 71 + 2 / 3 - (71 + 72 + 73.5) / 3])
    assert tables.mean(stream, "joint", "forgetting_rate") is None
    assert tables.mean(stream, "separate") is None


@pytest.mark.exhaustive
def test_differences_are_paired_by_seed_and_order(both: Tables) -> None:
    """Order 4 has two seeds: five pairs in all, those of the orders apart beside them."""
    assert both.streams == ["orders 3 and 4", "order 3", "order 4"]
    assert [both.num_runs(stream, "sapt") for stream in both.streams] == [5, 3, 2]
    found = both.difference(both.whole, "sequential-lora", "sapt")
    assert found is not None
    wanted = t_interval([-40.0, -39.0, -38.0, -40.0, -39.0])
    assert [found.n, found.mean, found.ci_low] == pytest.approx([5, wanted.mean, wanted.ci_low])
    told = both.differences
    one = told[
        (told["method"] == "sequential-lora") & (told["scenario"] == "cil") & (told["metric"] == "average_performance")
    ]
    assert dict(zip(one["stream"], one["n"], strict=True)) == {"orders 3 and 4": 5, "order 3": 3, "order 4": 2}


def test_the_gate_is_told_when_a_task_is_learnt_and_at_the_end(tables: Tables) -> None:
    """Three tasks: the first is alone when it is learnt; the last is not looked at again."""
    own = tables.own_weights("sapt", "end")
    assert list(own.index) == ["books", "films", "songs"]
    assert own.to_list() == pytest.approx([0.8, 0.8, 0.9])
    assert tables.own_weights("sapt", "learning").to_list() == pytest.approx([1.0, 0.9, 0.9])
    least = tables.of_gate("sapt", "own_adapter_weight_end", "min")
    assert least is not None
    assert least.n == 3
    assert least.mean == pytest.approx(0.8)
    assert tables.of_gate("sequential-lora", "drift") is None
    assert set(tables.gated()) == set(sapt_runs.OWN)


def test_gates_are_compared_over_the_runs_that_both_rows_have(both: Tables) -> None:
    """SAPT has five runs of two orders, its variant one of them: beside it SAPT has that one alone, and no interval."""
    both = dataclasses.replace(both, gate=both.gate[(both.gate["row"] == "sapt") | (both.gate["seed"] == SEEDS[1])])
    every, one = both.of_gate("sapt", "drift"), both.of_gate("sapt", "drift", beside=PUBLISHED)
    assert every is not None
    assert one is not None
    assert [every.n, one.n] == [5, 1]
    assert one.mean == pytest.approx((math.log(1 / 0.8) + 0.9 * math.log(0.9 / 0.8)) / 3)
    assert both.of_gate("sapt", "drift", beside="sequential-lora") is None


def test_own_weights_of_one_order_are_in_its_order(both: Tables) -> None:
    found = both.own_weights("sapt", "end", "4")
    assert list(found.index) == ["songs", "books", "films"]
    assert found.to_list() == pytest.approx([0.8, 0.8, 0.9])


def test_drift_is_the_divergence_of_mean_weights(tables: Tables) -> None:
    """KL([1] ‖ 0.8) of the first task, KL([0.1, 0.9] ‖ [0.1, 0.8, 0.1]) of the second, 0 of the third."""
    drift = tables.gate[(tables.gate["row"] == "sapt") & (tables.gate["seed"] == SEEDS[0])]["drift"].to_list()
    assert drift == pytest.approx([math.log(1 / 0.8), 0.9 * math.log(0.9 / 0.8), 0.0])
    shut = tables.gate[(tables.gate["row"] == "sapt, gate published")]["routed_score"]
    assert set(shut) == {75.0}


@pytest.mark.exhaustive
def test_what_is_saved_is_what_is_read(both: Tables, tmp_path: Path) -> None:
    both.save(tmp_path / "results")
    again = Tables.load(tmp_path / "results")
    for name in (*COLUMNS, "analyses"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(both, name), rtol=1e-5)
    assert again.record == both.record
    assert again.record["orders"]["4"]["tasks"] == ["songs", "books", "films"]
    names = [*COLUMNS, "metrics", "differences", "analyses"]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {RECORD, *(f"sapt-{name}.csv" for name in names)}


@pytest.mark.exhaustive
def test_without_analyses_there_are_none(tables: Tables, tmp_path: Path) -> None:
    tables.save(tmp_path / "results")
    assert not (tmp_path / "results" / ANALYSES).exists()
    again = Tables.load(tmp_path / "results")
    assert again.analyses.empty
    assert list(again.analyses) == list(MEASURES)


@pytest.mark.parametrize("spoil", ["nothing", "other json", "unknown row", "tasks", "analysis", "no folder"])
def test_folders_without_runs_are_refused(tmp_path: Path, spoil: str) -> None:
    work = tmp_path / "work"
    if spoil != "no folder":
        work_of(work, {} if spoil == "nothing" else {"sapt": (70.0,)})
    run = run_of("sapt", 1, 70.0)
    if spoil == "other json":
        (work / "order-3" / "x.json").write_text("[1]", encoding="utf-8")
    if spoil == "unknown row":
        (work / "order-3" / "x.json").write_text(json.dumps({**run, "row": "magic"}), encoding="utf-8")
    if spoil == "tasks":
        run["stream"]["order"] = [0, 2, 1]
        (work / "order-3" / "x.json").write_text(json.dumps(run), encoding="utf-8")
    if spoil == "analysis":
        (work / "analysis-share").mkdir()
        (work / "analysis-share" / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"^work: expected"):
        Tables.gather(work)


def test_tables_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tables: expected sapt"):
        Tables.load(tmp_path)


# -- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_findings_follow_the_numbers(tables: Tables) -> None:
    assert find_verdict(tables, "SAPT performs better at the end").word == AS_PUBLISHED
    assert find_verdict(tables, "SAPT is at most 3 points").word == AS_PUBLISHED
    assert find_verdict(tables, "SAPT forgets at most 2").word == HOLDS
    assert find_verdict(tables, "SAPT learns each task").word == HOLDS
    assert find_verdict(tables, "The gate is open").word == HOLDS
    assert find_verdict(tables, "The published gate gives").word == HOLDS
    assert find_verdict(tables, "Without reflection").word == AS_PUBLISHED
    assert find_verdict(tables, "A density").word == AS_PUBLISHED
    assert find_verdict(tables, "Adapters learnt under").word == NOT_RUN
    assert "`sapt, not aligned`" in find_verdict(tables, "Adapters learnt under").evidence
    order = find_verdict(tables, "Methods come in the order published with T5")
    assert order.word == IN_PART  # joint is above SAPT
    assert order.claim.published.startswith("sequential-lora 46.0, incremental-lora 64.7")


@pytest.mark.exhaustive
def test_numbers_against_the_claims_are_said(tmp_path: Path) -> None:
    scores = {
        "sapt": (30.0, 31.0, 32.0),
        "sapt, density": (50.0, 51.0, 52.0),
        "sapt, without reflection": (40.0, 41.0, 42.5),
        "sequential-lora": (60.0, 61.0, 62.0),
        "joint": (70.0, 71.0, 72.0),
        "separate": (70.0, 71.0, 72.0),
    }
    turned = gathered(tmp_path, scores)
    for words in (
        "SAPT performs better at",
        "SAPT is at most 3",
        "SAPT learns each",
        "A density",
        "Methods come in the order",
    ):
        verdicts = [one for one in judge_claims(CLAIMS, turned) if one.claim.text.startswith(words)]
        assert {one.word for one in verdicts} <= {AGAINST, IN_PART}, words
    assert find_verdict(turned, "SAPT performs better at").word == AGAINST
    assert find_verdict(turned, "Without reflection").word == IN_PART  # forgets more, and is better at the end


@pytest.mark.exhaustive
def test_few_runs_decide_nothing(tmp_path: Path) -> None:
    one = gathered(tmp_path, {row: finals[:1] for row, finals in SCORES.items()})
    assert {verdict.word for verdict in judge_claims(CLAIMS, one)} == {UNDECIDED, DRAWN, NOT_RUN}


def test_baselines_are_told_no_task(tables: Tables) -> None:
    """Neither what has a model or a head for each task, nor all tasks at once, nor SAPT in other settings."""
    assert baselines(tables, tables.whole) == ["sequential-lora", "incremental-lora", "replay-lora"]


def test_published_numbers_are_of_known_rows() -> None:
    for numbers in (T5, LLAMA):
        assert set(numbers) <= set(ROWS)
        assert list(numbers.values()) == sorted(numbers.values())
    needed = {row for claim in CLAIMS for row in claim.needs}
    assert needed <= set(ROWS)
    assert {row.method for row in ROWS.values()} <= set(METHODS)
    assert ORDERS == ("3", "4")


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_page_has_every_row_and_number(tables: Tables, tmp_path: Path) -> None:
    tables.save(tmp_path / "results")
    declare_not_run(tmp_path / "results" / "sapt.json", SHOWN)
    page = PAPER.page(tmp_path / "results")
    files, text = files_of(page), " ".join(page.to_markdown().split())
    first = "sapt,3,71.0 ± 2.5,76.0 ± 2.5,1.0 ± 0.0,-1.0 ± 0.0,71.7 ± 2.5,76.7 ± 2.5,-0.5 ± 0.7,"
    assert first + "14,3.0,3.00,82.0,81.9\n" in files["sapt-scores"]  # three tasks of 3 s and 1.5 s
    assert "sequential-lora,-39.00 ± 2.48*," in files["sapt-to-sapt"]
    assert '"sapt, gate published",0.47 ± 0.00,0.20 ± 0.00,' in files["sapt-gates"]
    assert "films,0.90,0.80,0.20,0.10,0.90,0.30\n" in files["sapt-own-weights"]
    assert "| sapt | 3 | 71.0 ± 2.5 | 1.0 ± 0.0 | 76.7 ± 2.5 | 14 |" in text
    assert "`inflora` 0.0005 and `osf` 0.0001." in text
    assert "`sapt` reflects on 100 vectors a task" in text
    assert "Last revision abc123." in text
    assert "no data for yahoo" in text
    assert "Chance among own labels: 50.0 %." in text
    assert "Order 3, without any run: `sapt, published samples`" in text
    assert "{" not in text


@pytest.mark.exhaustive
def test_orders_and_analyses_are_in_the_tables(both: Tables, tmp_path: Path) -> None:
    both.save(tmp_path / "results")
    declare_not_run(tmp_path / "results" / "sapt.json", SHOWN)
    page = PAPER.page(tmp_path / "results")
    files, text = files_of(page), " ".join(page.to_markdown().split())
    assert files["sapt-orders"].startswith('row,"AP, order 3","F.Ra, order 3","AP, order 4","F.Ra, order 4"\n')
    assert "sapt,5,70.8 ± 1.0," in files["sapt-scores"]
    cases = [row for row in csv.DictReader(io.StringIO(files["sapt-cases"])) if row["analysis"] == "share"]
    assert [(row["case"], row["AP"], row["end"]) for row in cases] == [
        ("real, 2%", "60.0", "0.50"),
        ("real, 10%", "61.0", "0.88"),
    ]
    assert '"sapt, 50 tasks",own weight,3.00,8.00,2.67\n' in files["sapt-fifty"]
    assert "Variants of `sapt` were run in order 3 alone" in text
    assert "Order 4, without any run: `incremental-lora`" in text


@pytest.mark.exhaustive
def test_pages_of_few_rows_can_be_made(tmp_path: Path) -> None:
    gathered(tmp_path, {"sequential-lora": (30.0,)}).save(tmp_path / "results")
    with pytest.raises(UserError, match="tables: expected runs of every row of sapt-scores, found none of sapt; "):
        PAPER.page(tmp_path / "results")
    declare_not_run(tmp_path / "results" / "sapt.json", SHOWN)
    page = PAPER.page(tmp_path / "results")
    assert "| sequential-lora | 1 | 30.0 |" in page.to_markdown()
    assert "| sapt | not run | – |" in page.to_markdown()
    assert len(save_figures(page.figures, tmp_path / "figures")) == 2


# -- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_pictures_are_small_and_the_same_each_time(both: Tables, tmp_path: Path) -> None:
    figures = sapt_figures.make_figures(both)
    first, second = (save_figures(figures, tmp_path / name) for name in ("one", "two"))
    assert len(first) == 5
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert len(one.read_bytes()) < 200_000


def lines_of(drawn: Any) -> dict[str, Any]:
    """The heights of the lines of a figure's first axes, by their labels."""
    return {str(line.get_label()): np.asarray(line.get_ydata()) for line in drawn.axes[0].lines}


def test_what_is_drawn_is_the_tables(tables: Tables) -> None:
    given = sapt_figures.weight_map(tables, "3", "sapt", "learning")
    assert given[1] == pytest.approx([0.1, 0.9, math.nan], nan_ok=True)
    assert sapt_figures.weight_map(tables, "3", "sapt", "end")[0] == pytest.approx([0.8, 0.1, 0.1])
    drawn: Any = {
        str(line.get_label()): np.asarray(line.get_ydata()) for line in sapt_figures.draw_curves(tables).axes[0].lines
    }
    assert drawn["sapt"] == pytest.approx([72.0, 72.0, 71.0])
    assert drawn["joint, at the end"] == pytest.approx([72.0, 72.0])
    lines: Any = {
        str(line.get_label()): np.asarray(line.get_ydata()) for line in sapt_figures.draw_own(tables).axes[0].lines
    }
    assert lines["sapt, at the end"] == pytest.approx([0.8, 0.8, 0.9])


# -- what is said beside the tables -----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_methods_that_are_no_better_than_plain_ones_are_named(tmp_path: Path) -> None:
    scores = {
        "sapt": [60.0, 61.0, 62.0],
        "sequential-lora": [20.0, 21.0, 22.0],
        "migu": [20.5, 20.5, 22.5],
        "epi": [50.0, 51.0, 52.0],
    }
    said = find_verdict(gathered(tmp_path, scores), "SAPT performs better at the end").evidence
    assert "Not above `sequential-lora`: `migu`." in said
    assert "Among the labels of a text's own task above 0 for " in said


def test_what_the_decoder_came_to_is_said_in_points() -> None:
    rows = [
        ("sapt", "average_performance til", 23.5),
        ("joint", "average_performance til", 27.5),
        ("replay-lora", "average_performance til", 20.0),
    ]
    rows += [("separate", "learning_accuracy til", 29.0), ("sapt", "learning_accuracy til", 24.5)]
    found = pd.DataFrame(
        [
            {"analysis": "decoder", "case": case, "measure": name, "x": None, "value": value}
            for case, name, value in rows
        ]
    )
    said = describe_decoder(found)
    assert "4.0 points below `joint`" in said
    assert "3.5 points above `replay-lora`" in said
    assert "4.5 points below what `separate` learns" in said
    assert describe_decoder(found[found["case"] != "sapt"]) == ""


def test_the_bound_of_an_own_weight_is_told_beside_it(both: Tables) -> None:
    more = [("most own_adapter_weight by tasks", float(x), 1 / x) for x in range(1, 11)]
    rows = [
        {"analysis": "fifty", "case": "sapt, 50 tasks", "seed": 1, "measure": n, "x": x, "value": v} for n, x, v in more
    ]
    table = curve_table(pd.concat([both.analyses, pd.DataFrame(rows)]))
    assert ["sapt, 50 tasks", "own weight, at most", "0.46", "0.13"] in [list(row[:4]) for row in table.rows]
