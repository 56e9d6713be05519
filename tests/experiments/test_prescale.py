"""The page of pre-scaling is what its tables make, and its findings are judged by the rules that it states."""

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
    IN_PART,
    NOT_RUN,
    UNDECIDED,
    Verdict,
    judge_claims,
)
from experiments.common.figures import save_figures
from experiments.pages import declare_not_run
from experiments.prescale import figures as prescale_figures
from experiments.prescale.claims import CLAIMS, PUBLISHED, published
from experiments.prescale.page import PAPER, SHOWN
from experiments.prescale.run import LOOKED_AT, ROWS, SEEDS, STREAMS
from experiments.prescale.tables import COLUMNS, RECORD, Tables
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.errors import UserError
from regard.runs.intervals import t_interval, t_quantile
from tests.continual import small_tasks

ROOT = Path(__file__).parents[2]
NAMES = ("plants", "films")
SCORES = {
    "finetune": (70.0, 72.0, 74.0),
    "probe-finetune": (90.0, 91.0, 92.0),
    "prescale": (95.0, 96.5, 98.0),
    "joint": (95.2, 96.6, 98.0),
}
"""The final score of both tasks, seed by seed."""
SMOOTH = {"finetune": (0.5, 0.52, 0.54), "probe-finetune": (0.3, 0.3, 0.3), "prescale": (0.4, 0.41, 0.42)}


def cells(row: str, final: float, learnt: float) -> list[dict[str, Any]]:
    """A matrix of two tasks: the first falls from `learnt` to `final`, the second has `final`."""
    found = [
        (0, 1, "til", 50.0),
        (1, 1, "til", learnt),
        (1, 2, "til", 50.0),
        (2, 1, "til", final),
        (2, 2, "til", final),
    ]
    found += [(1, 1, "cil", learnt), (2, 1, "cil", final / 2), (2, 2, "cil", final / 2)]
    kept = [cell for cell in found if row != "joint" or cell[0] == 2]
    return [
        {"after_task": after, "task_index": at, "task": NAMES[at - 1], "scenario": setting, "score": score, "n": 50}
        for after, at, setting, score in kept
    ]


def looks(smooth: float) -> list[dict[str, Any]]:
    """Diagnostics of two layers before and after each of two tasks; after is 0.1 more than before."""
    return [
        {
            **{"after_task": after, "task_index": at, "task": NAMES[at - 1], "statistic": statistic},
            **{"layer": layer, "value": base + 0.1 * (after == at) + 0.01 * (layer or 0), "standard_error": 0.01},
        }
        for statistic, base in (("over_smoothing", smooth - 0.1), ("sink_deviation", 0.2), ("sink_deviation_top5", 0.2))
        for at in (1, 2)
        for after in (at - 1, at)
        for layer in ((None, 0, 1) if statistic != "sink_deviation_top5" else (None,))
    ]


def run_of(row: str, place: int, final: float, stream: str = "db-split") -> dict[str, Any]:
    """A run as the experiment leaves it."""
    cost = {"seconds": 3.0, "flops": 1e12, "peak_memory_mib": 900.0, "steps": 8, "examples_per_second": 40.0}
    drawn = {name: {"train": {"a": 6, "b": 6}, "test": {"a": 25, "b": 25}} for name in NAMES}
    return {
        "stream": {
            "name": stream,
            "order": [0, 1],
            "record": {"published": "a paper", "drawn": drawn, "overlaps": {NAMES[0]: {"dropped_from_train": 4}}},
        },
        "row": row,
        "seed": SEEDS[place],
        "matrix": cells(row, final, 99.0),
        "cost": [{**cost, "task_index": at, "memory_bytes": at, "memory_examples": at} for at in (1, 2)],
        "diagnostics": looks(SMOOTH[row][place]) if row in SMOOTH else [],
        "regard": "0.1.0",
        "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.23"},
        "seconds": 9.0,
    }


def work_of(folder: Path, scores: Mapping[str, Sequence[float]] = SCORES, stream: str = "db-split") -> Path:
    """A folder of runs, one a row and seed."""
    (folder / stream).mkdir(parents=True)
    for row, finals in scores.items():
        for place, final in enumerate(finals):
            text = json.dumps(run_of(row, place, final, stream))
            (folder / stream / f"{row}-{SEEDS[place]}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Nothing changes them: made once."""
    return Tables.gather(work_of(tmp_path_factory.mktemp("runs") / "work"), "abc123")


def find_verdict(tables: Tables, words: str, stream: str = "db-split") -> Verdict:
    """Return the verdict of the claim that begins with these words."""
    verdicts = judge_claims(CLAIMS, tables)
    matches = [verdict for verdict in verdicts if verdict.claim.text.startswith(words) and verdict.stream == stream]
    assert len(matches) == 1
    return matches[0]


# -- tables ----------------------------------------------------------------------------------------------------------


def test_measures_are_those_of_hand(tables: Tables) -> None:
    mean = tables.mean("db-split", "finetune")
    assert mean is not None
    half = t_quantile(0.95, 2) * 2 / math.sqrt(3)
    assert mean.n == 3
    assert [mean.mean, mean.ci_low, mean.ci_high] == pytest.approx([72.0, 72 - half, 72 + half])
    fgt = tables.mean("db-split", "finetune", "forgetting")
    assert fgt is not None
    assert fgt.mean == pytest.approx(99 - 72)
    cil = tables.mean("db-split", "finetune", scenario="cil")
    assert cil is not None
    assert cil.mean == pytest.approx(36.0)
    learning = tables.mean("db-split", "finetune", "learning_accuracy")
    assert learning is not None
    assert learning.mean == pytest.approx((99 + 72) / 2)
    assert tables.mean("db-split", "joint", "forgetting") is None


def test_differences_are_paired_by_seed(tables: Tables) -> None:
    found = tables.difference("db-split", "prescale", "finetune")
    assert found is not None
    wanted = t_interval([25.0, 24.5, 24.0])
    assert found.n == 3
    assert [found.mean, found.ci_low] == pytest.approx([24.5, wanted.ci_low])
    assert tables.difference("db-split", "prescale", "ewc") is None


def test_diagnostics_are_means_over_tasks_then_seeds(tables: Tables) -> None:
    after = tables.layers("db-split", "prescale", "over_smoothing", "last", "after")
    whole = after[after["layer"].isna()].iloc[0]
    assert (whole["n"], whole["mean"], whole["std"]) == (3, pytest.approx(0.41), pytest.approx(0.01))
    one = after[after["layer"] == 1].iloc[0]
    assert one["mean"] == pytest.approx(0.42)
    before = tables.layers("db-split", "prescale", "over_smoothing", "all", "before")
    assert before[before["layer"].isna()]["mean"].iloc[0] == pytest.approx(0.31)
    assert tables.diagnosed("db-split", "prescale", "over_smoothing", "after")[SEEDS[0]] == pytest.approx(0.4)


def test_what_is_saved_is_what_is_read(tables: Tables, tmp_path: Path) -> None:
    tables.save(tmp_path / "results")
    again = Tables.load(tmp_path / "results")
    for name in ("matrix", "cost", "diagnostics", "seeds"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(tables, name), rtol=1e-5)
    assert again.record == tables.record
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        RECORD,
        *(f"prescale-{name}.csv" for name in COLUMNS),
    }
    assert tables.record["revision"] == "abc123"
    assert tables.record["streams"]["db-split"]["most_rows_dropped"] == 4


def test_costs_are_summed_over_tasks(tables: Tables) -> None:
    one = tables.cost.iloc[0]
    assert (one["seconds"], one["steps"], one["memory_bytes"], one["run_seconds"]) == (6.0, 16, 2, 9.0)


def test_rows_and_seeds_stand_in_the_order_of_the_experiment(tables: Tables) -> None:
    assert tables.rows("db-split") == ["finetune", "probe-finetune", "prescale", "joint"]
    assert list(dict.fromkeys(tables.matrix["seed"])) == list(SEEDS[:3])


@pytest.mark.parametrize("spoil", ["nothing", "other json", "unknown row", "orders", "no folder"])
def test_folders_without_runs_are_refused(tmp_path: Path, spoil: str) -> None:
    work = tmp_path / "work"
    if spoil != "no folder":
        work_of(work, {} if spoil == "nothing" else SCORES)
    if spoil == "other json":
        (work / "db-split" / "x.json").write_text("[1]", encoding="utf-8")
    if spoil in ("unknown row", "orders"):
        run = run_of("finetune", 0, 70.0)
        run["row"], run["stream"]["order"] = ("magic", [0, 1]) if spoil == "unknown row" else ("finetune", [1, 0])
        (work / "db-split" / "x.json").write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(UserError, match=r"^work: expected"):
        Tables.gather(work)


def test_tables_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^tables: expected prescale"):
        Tables.load(tmp_path)


# -- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_findings_follow_the_numbers(tables: Tables) -> None:
    assert find_verdict(tables, "Fine-tuning scores below probing").word == AS_PUBLISHED
    assert find_verdict(tables, "Probing then fine-tuning scores below").word == AS_PUBLISHED
    assert find_verdict(tables, "Pre-scaling is near").word == AS_PUBLISHED
    assert find_verdict(tables, "Pre-scaling forgets less (FGT) than fine-tuning").word == AS_PUBLISHED
    assert find_verdict(tables, "Over-smoothing is lower").word == IN_PART
    assert find_verdict(tables, "Over-smoothing falls").word == AGAINST
    assert find_verdict(tables, "Sink deviation (the strongest sink) is higher").word == UNDECIDED
    assert find_verdict(tables, "Full scaling scores above uniform").word == NOT_RUN
    assert "`prescale uniform`" in find_verdict(tables, "Full scaling scores above uniform").evidence


def test_evidence_has_means_and_differences(tables: Tables) -> None:
    verdict = find_verdict(tables, "Fine-tuning scores below probing")
    assert verdict.evidence == (
        "`probe-finetune` 91.0 ± 2.5, `finetune` 72.0 ± 5.0. "
        "Difference +19.00 ± 2.48 (3 runs): its interval excludes 0."
    )
    assert verdict.claim.published.startswith("DB: finetune 66.22, probe-finetune 98.47; News:")
    assert "its interval contains 0" in find_verdict(tables, "Pre-scaling is near").evidence


def test_an_order_against_the_paper_is_said(tmp_path: Path) -> None:
    scores = {"finetune": SCORES["prescale"], "probe-finetune": SCORES["finetune"]}
    turned = Tables.gather(work_of(tmp_path / "work", scores))
    assert find_verdict(turned, "Fine-tuning scores below probing").word == AGAINST


@pytest.mark.exhaustive
def test_one_seed_tells_nothing(tmp_path: Path) -> None:
    one = Tables.gather(work_of(tmp_path / "work", {row: scores[:1] for row, scores in SCORES.items()}))
    assert {verdict.word for verdict in judge_claims(CLAIMS, one)} == {UNDECIDED, DRAWN, NOT_RUN}
    assert "(one run, no interval)" in find_verdict(one, "Pre-scaling is near").evidence


def test_published_numbers_are_of_known_rows() -> None:
    for stream, rows in PUBLISHED.items():
        assert stream in STREAMS
        assert set(rows) <= set(ROWS)
        assert all(0 <= number <= 100 for of in rows.values() for number in of.values())
    assert published("news-series", "prescale", "forgetting") == 4.40
    assert published("stdlib-split", "prescale", "average_performance") is None


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_page_has_every_stream_row_and_number(tmp_path: Path) -> None:
    work = work_of(tmp_path / "work")
    work_of(work, {row: SCORES[row] for row in ("finetune", "prescale")}, "stdlib-split")
    Tables.gather(work, "abc123").save(tmp_path / "results")
    left_out = [f"{row} on {stream}" for row in SHOWN for stream in ("db-split", "stdlib-split")]
    declare_not_run(tmp_path / "results" / "prescale.json", left_out)
    page = PAPER.page(tmp_path / "results")
    markdown = page.to_markdown()
    files = {table.name: table.to_csv() for table in page.tables}
    scores = files["prescale-scores"]
    assert "db-split,finetune,3,72.0 ± 5.0,27.0 ± 5.0,85.5 ± 2.5,36.0 ± 2.5,6,2.0,66.22 / 39.15,15.90\n" in scores
    assert "db-split,joint,3,96.6 ± 3.5,–,–,48.3 ± 1.7,6,2.0,99.88 / –,–\n" in scores
    assert "stdlib-split,prescale,3," in scores
    assert "db-split,prescale,+24.50 ± 1.24*," in files["prescale-differences"]
    diagnostics = files["prescale-all-layers"]
    assert "db-split,Over-smoothing,prescale,3,0.310,0.410,+0.100 ± 0.000*,-0.110 ± 0.025*\n" in diagnostics
    assert "db-split,Over-smoothing,prescale,after the last,3,0.410,0.420\n" in files["prescale-layers"]
    assert "| finetune | 72.0 ± 5.0 | 27.0 ± 5.0 |" in markdown
    text = " ".join(markdown.split())
    assert "Revision abc123." in text
    assert "On db-split, without any run: `probe`" in text
    assert "`finetune` (3)" in text
    assert "{" not in markdown


# -- pictures --------------------------------------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "stream": "stdlib-split",
    "degrees": [
        {"row": row, "when": when, "layer": layer, "value": 0.1 * layer}
        for row in prescale_figures.DRAWN
        for when in ("before", "after")
        for layer in (0, 1)
    ],
    "scales": [{"tokens": ["[CLS]", "$a", "b"], "label": "x", "classes": ["x", "y"], "weights": [[0.1, 0.6, 0.3]] * 2}],
    "states": {row: [{"class": "x", "x": 0.0, "y": 1.0}, {"class": "y", "x": 1.0, "y": 0.0}] for row in SCORES},
    "tasks": [{"name": "x-y", "classes": ["x", "y"]}],
}


@pytest.mark.exhaustive
def test_pictures_are_small_and_the_same_each_time(tables: Tables, tmp_path: Path) -> None:
    figures = prescale_figures.make_figures(tables, OWN)
    first, second = (save_figures(figures, tmp_path / name) for name in ("one", "two"))
    assert len(first) == 5
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.read_bytes().startswith(b"<?xml")
        assert len(one.read_bytes()) < 200_000
    assert "$a" in (tmp_path / "one" / "prescale-scales.svg").read_text(encoding="utf-8")


def test_lines_and_bars_are_the_tables(tables: Tables) -> None:
    axes = prescale_figures.draw_layers(tables).axes[0]
    lines = {str(line.get_label()): list(map(float, np.asarray(line.get_ydata()))) for line in axes.lines}
    assert lines["prescale, after"] == [pytest.approx(0.3), pytest.approx(0.31)]
    assert lines["finetune, before"] == [pytest.approx(0.2), pytest.approx(0.21)]
    bars = prescale_figures.draw_smoothing(tables).axes[0]
    heights = [patch.get_height() for patch in bars.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([0.42, 0.2, 0.31, 0.52, 0.3, 0.41])


def test_drawn_rows_are_looked_at() -> None:
    assert set(prescale_figures.DRAWN) <= set(LOOKED_AT)


def test_without_the_two_runs_the_other_figures_are_drawn(tables: Tables, tmp_path: Path) -> None:
    assert prescale_figures.read_data(tmp_path) is None
    assert [figure.name for figure in prescale_figures.make_figures(tables, None)] == [
        "prescale-layers",
        "prescale-smoothing",
    ]


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.manifold", None)
    with pytest.raises(UserError, match=r"pip install 'regard\[tasks\]'"):
        prescale_figures.check_sklearn()


@pytest.mark.exhaustive
def test_near_states_lie_near_in_two_dimensions() -> None:
    pytest.importorskip("sklearn")
    drawn = np.random.default_rng(0)
    groups = np.concatenate([drawn.normal(size=(12, 8)) * 0.01 + at for at in (0.0, 50.0)]).astype(np.float32)
    found = prescale_figures.project(groups)
    assert found.shape == (24, 2)
    within = np.ptp(found[:12], axis=0).max()
    assert np.abs(found[:12].mean(0) - found[12:].mean(0)).max() > within
    assert np.array_equal(found, prescale_figures.project(groups))


def test_maps_and_states_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prescale_figures, "WORDS", (1, 100))
    learner = make_learner(
        small_tasks.stream(), METHODS["prescale"](), small_tasks.loaded(), small_tasks.BUDGET, seed=1
    )
    for one in prescale_figures.scaling_maps(learner):
        weights = np.array(one["weights"])
        assert weights.shape == (len(one["classes"]), len(one["tokens"]))
        assert weights == pytest.approx(1 / len(one["tokens"]), abs=1e-4)
        assert one["label"] in one["classes"]
    monkeypatch.setattr(prescale_figures, "project", lambda states: states[:, :2])
    found = prescale_figures.project_states(learner)
    assert {one["class"] for one in found} == set(learner.stream.classes)
    monkeypatch.setattr(prescale_figures, "WORDS", (1000, 2000))
    with pytest.raises(UserError, match="expected 3 test texts"):
        prescale_figures.scaling_maps(learner)
