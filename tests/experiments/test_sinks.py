"""The pages of results are what the committed tables make, and what they say is computed from their rows."""

import dataclasses
import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.papa import page as papa_page
from experiments.sinks import findings as sinks_findings
from experiments.sinks import page as sinks_page
from experiments.sinks import run as sinks
from experiments.sinks.plan import Runs
from regard.commands.pretrain.config import preset_config
from regard.commands.sweep.means import Difference
from regard.errors import UserError

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / papa_page.PAGE).read_text(encoding="utf-8") == papa_page.page()


def test_the_committed_tables_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for task in papa_page.TASKS:
        scores = pd.read_csv(papa_page.FOLDER / f"papa-{task}-scores.csv")
        assert scores.groupby(["constants", "rank_heads_by", "dynamic_fraction"])["seed"].nunique().eq(3).all()
        assert set(papa_page.SOURCES) | {"average", "none"} <= set(scores["constants"])
        assert set(papa_page.OTHERS) | {"lambda", "none"} == set(scores["rank_heads_by"])
        own = scores[(scores["constants"] == "average") & (scores["rank_heads_by"] == "lambda")]
        assert set(own["dynamic_fraction"]) == {1 / 2, 1 / 8, 1 / 16, 0}


def test_what_is_said_is_computed() -> None:
    """Hand-made scores: averages lose to zeros on one task, and lambda to a layer order in one case of two."""
    rows = []
    for task, average in (("ner", 0.8), ("pos", 0.5)):
        for constants in (*papa_page.SOURCES, "average", f"average of {papa_page.ELSEWHERE[task]}"):
            rows.append((task, constants, "lambda", 0.0, average if constants.startswith("average") else 0.6))
        for fraction, score in ((1 / 2, 0.9), (1 / 8, 0.7)):
            for select in ("lambda", *papa_page.OTHERS):
                better = task == "ner" and select == "last-layers" and fraction == 1 / 8
                rows.append(
                    (task, "average", select, fraction, score + (0.1 if better else -0.1 * (select != "lambda")))
                )
        rows.append((task, "none", "none", 1.0, 1.0))
    columns = ["task", "constants", "rank_heads_by", "dynamic_fraction", "mean"]
    points = pd.DataFrame(rows, columns=columns)
    said = papa_page._sources_said(points, ["ner", "pos"]).replace("\n", " ")
    assert "on 1 of 2 tasks (POS: identity, toeplitz, zeros no worse)" in said
    assert "score +0.000 against the task's own" in said
    assert "Lambda beats both orders by layer in 3 of 4 cases" in papa_page._orders_said(points, ["ner", "pos"])


# -- sinks -----------------------------------------------------------------------------------------------------------

OF_INPUTS: dict[str, dict[str, Any]] = {
    "window 16": {"window": 16},
    "prefix 5": {"prefix": 5, "fixed_token": None},
    "first token free": {"fixed_token": None},
    "fixed token at 1": {"fixed_token": 1},
    "sink token": {"attention": "sink-token", "fixed_token": None},
}
OF_NUMBERS = {
    **{f"weight decay {value:g}": {"weight_decay": value} for value in (0.0, 1.0, 5.0)},
    "learning rate 0.001": {"learning_rate": 1e-3},
}
OF_PARTS: dict[str, dict[str, Any]] = {
    **{name: {"positions": name} for name in ("none", "alibi", "t5")},
    "post-norm": {"norm": "post"},
    "ReLU": {"ffn": "relu"},
    "one head": {"num_heads": 1},
}
CHANGES: dict[str, dict[str, Any]] = {
    "softmax": {},
    **{name: {"attention": name} for name in ("sigmoid", "elu", "linear", "gated")},
    "sigmoid, normalised": {"attention": "sigmoid-normalised"},
    "elu kernel, normalised": {"attention": "elu-kernel-normalised"},
    "K bias": {"attention": "k-bias"},
    "V bias": {"attention": "v-bias"},
    **OF_INPUTS,
    **OF_NUMBERS,
    **OF_PARTS,
}
SETTING: dict[str, Any] = {
    "max_steps": 2400,
    "batch_size": 16,
    "length": 64,
    "weight_decay": 0.5,
    "learning_rate": 0.01,
}
RECORD = {
    "recipe": preset_config("pico", fixed_token=0, **SETTING).to_dict(),
    "model": {"parameters": 327_296},
    "data": {"domains": [{"name": "novels", "train_tokens": 4_915_200}]},
    "watch": {"samples": 100, "length": 64, "epsilon": 0.3, "uniform": 0.0741},
    "versions": {"torch": "2.13.0"},
    "rows": CHANGES,
    "seeds": 3,
}
SINKING, SINKLESS = {"sink_rate": (10, 12, 14)}, {"sink_rate": (0, 1, 2)}


def made(row: str, **given: Sequence[float]) -> list[dict[str, Any]]:
    """Runs of a row, one a seed; what is not given is that of a model without a sink."""
    seeds = len(next(iter(given.values())))
    columns: dict[str, Sequence[float]] = {
        "valid_loss": (4.0, 4.1, 4.2)[:seeds],
        "sink_rate": (0.0,) * seeds,
        "sink_rate_max": given.get("sink_rate", (0.0,) * seeds),
        "sink_position": (0.0,) * seeds,
        "alpha_first": (0.08,) * seeds,
        "norm_ratio": (1.0,) * seeds,
        "virtual_sink_rate": (math.nan,) * seeds,
        "emergence_step": (math.nan,) * seeds,
        "seconds": (90.0,) * seeds,
        **given,
    }
    return [
        {"row": row, "seed": seed, **{name: float(values[seed]) for name, values in columns.items()}}
        for seed in range(seeds)
    ]


def runs_of(*rows: list[dict[str, Any]]) -> Runs:
    """Made-up runs with curves of two steps."""
    ends = pd.DataFrame([run for row in rows for run in row]).reindex(columns=list(sinks.COLUMNS))
    curves = pd.DataFrame(
        [{"row": name, "step": step, "alpha_first": 0.1} for name in ends["row"].unique() for step in (0, 2400)]
    )
    return Runs(ends, curves.reindex(columns=["row", *sinks.CURVE]), CHANGES, RECORD)


def said(runs: Runs, claim: str) -> sinks_findings.Finding:
    """The finding whose claim holds these words."""
    found = [one for one in sinks_findings.findings(runs) if claim in one.claim.said]
    assert len(found) == 1
    return found[0]


def kept(runs: Runs, folder: Path) -> None:
    folder.mkdir(parents=True)
    runs.ends.to_csv(folder / sinks.TABLE, index=False)
    runs.curves.to_csv(folder / sinks.CURVES, index=False)
    (folder / sinks.RECORD).write_text(json.dumps(dict(runs.record)), encoding="utf-8")


@pytest.mark.skipif(
    not (ROOT / sinks.FOLDER / sinks.TABLE).exists(), reason="the tables of the sink experiment are not there yet"
)
def test_the_page_of_sinks_is_made_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / sinks_page.PAGE).read_text(encoding="utf-8") == sinks_page.page()
    assert (ROOT / sinks_page.PICTURE).exists()


def test_numbers_of_a_row_are_those_of_its_seeds() -> None:
    """Rates 10, 12, 14: s = 2, t = 4.3027, half of the interval 4.3027 · 2 / √3 = 4.97; losses 0.01, 0, −0.01 apart."""
    runs = runs_of(
        made("softmax", **SINKING, emergence_step=(600, 800, math.nan)),
        made("sigmoid", sink_rate=(0, 1, 2), valid_loss=(4.01, 4.1, 4.19)),
        made("fixed token at 1", sink_rate=(0, 0, 0), sink_rate_max=(20, 20, 1), sink_position=(1, 1, 33)),
        made("ReLU", sink_rate=(7,), valid_loss=(4.25,)),
    )
    softmax, sigmoid = (sinks_page._cells(runs, sinks_page.OPERATION, row) for row in ("softmax", "sigmoid"))
    assert softmax[1:5] == ("3 of 3", "12.0 ± 5.0", "–", "0")
    assert softmax[-2:] == ("–", "600, 800, –")
    assert sigmoid[2] == r"1.0 ± 2.5\*"
    assert sigmoid[-2] == "+0.000 ± 0.025"
    moved = sinks_page._cells(runs, sinks_page.INPUT, "fixed token at 1")
    assert moved[4].startswith("1 (13.7 ± ")
    assert moved[-2].endswith("‡")
    assert sinks_page._cells(runs, sinks_page.REST, "ReLU")[1:3] == ("1 of 3", "7.0")
    assert sinks_page._cells(runs, sinks_page.REST, "ReLU")[-2] == "+0.250"


def test_a_row_with_a_free_first_token_is_compared_with_one_that_has_the_same() -> None:
    freed = made("first token free", **SINKLESS, valid_loss=(4.3, 4.3, 4.3))
    token = made("sink token", **SINKLESS, valid_loss=(4.2, 4.2, 4.2))
    runs = runs_of(made("softmax", **SINKING), freed, token)
    assert sinks_page._cells(runs, sinks_page.BIASES, "sink token")[-2] == "-0.100 ± 0.000†"
    assert sinks_page._to_reference(runs, "first token free").endswith("‡")
    without = runs_of(made("softmax", **SINKING), token)
    assert sinks_page._to_reference(without, "sink token").endswith("‡")


BASE_SINKS = made("softmax", **SINKING, norm_ratio=(5, 6, 7))
VIRTUAL = {"virtual_sink_rate": (50, 60, 70)}


@pytest.mark.parametrize(
    "claim, rows, verdict",
    [
        ("Softmax grows", [BASE_SINKS], sinks_findings.HELD),
        ("Softmax grows", [made("softmax", **SINKLESS)], sinks_findings.AGAINST),
        ("Softmax grows", [made("softmax", sink_rate=(1, 2, 9))], sinks_findings.OPEN),
        ("Softmax grows", [made("softmax", sink_rate=(50,))], sinks_findings.OPEN),
        ("Softmax grows", [], sinks_findings.ABSENT),
        ("Sigmoid without", [BASE_SINKS, made("sigmoid", **SINKLESS)], sinks_findings.HELD),
        (
            "Sigmoid without",
            [BASE_SINKS, made("sigmoid", **SINKLESS, valid_loss=(4.5, 4.6, 4.71))],
            sinks_findings.PARTLY,
        ),
        (
            "Sigmoid without",
            [BASE_SINKS, made("sigmoid", **SINKING, valid_loss=(4.5, 4.6, 4.71))],
            sinks_findings.AGAINST,
        ),
        (
            "ELU without",
            [BASE_SINKS, made("elu", sink_rate=(0, 0, 0), sink_rate_max=(9, 9, 9), valid_loss=(5, 5.1, 5.2))],
            sinks_findings.AGAINST,
        ),
        ("ELU without", [made("softmax", **SINKLESS), made("elu", **SINKLESS)], sinks_findings.OPEN),
        ("ELU without", [BASE_SINKS], sinks_findings.ABSENT),
        (
            "brings the sink back",
            [made("sigmoid", **SINKLESS), made("sigmoid, normalised", **SINKING)],
            sinks_findings.HELD,
        ),
        (
            "brings the sink back",
            [made("sigmoid", **SINKLESS), made("sigmoid, normalised", **SINKLESS)],
            sinks_findings.AGAINST,
        ),
        (
            "brings the sink back",
            [made("sigmoid", **SINKING), made("sigmoid, normalised", **SINKING)],
            sinks_findings.OPEN,
        ),
        (
            "normalised kernel",
            [BASE_SINKS, made("elu kernel, normalised", **SINKING, valid_loss=(4.5, 4.6, 4.71))],
            sinks_findings.HELD,
        ),
        (
            "linear kernel",
            [BASE_SINKS, made("linear", **SINKLESS, valid_loss=(4.5, 4.6, 4.71))],
            sinks_findings.HELD,
        ),
        ("linear kernel", [BASE_SINKS, made("linear", **SINKLESS)], sinks_findings.PARTLY),
        ("(K bias)", [BASE_SINKS, made("K bias", **SINKLESS, **VIRTUAL)], sinks_findings.HELD),
        ("(K bias)", [BASE_SINKS, made("K bias", **SINKING, **VIRTUAL)], sinks_findings.PARTLY),
        (
            "(K bias)",
            [BASE_SINKS, made("K bias", **SINKING, virtual_sink_rate=(0, 0, 0))],
            sinks_findings.AGAINST,
        ),
        ("(V bias)", [BASE_SINKS, made("V bias", **SINKING)], sinks_findings.HELD),
        ("(V bias)", [BASE_SINKS, made("V bias", **SINKLESS)], sinks_findings.AGAINST),
        (
            "token in front",
            [BASE_SINKS, made("first token free", **SINKLESS), made("sink token", **SINKLESS, **VIRTUAL)],
            sinks_findings.PARTLY,
        ),
        (
            "grows with weight decay",
            [BASE_SINKS, made("weight decay 0", **SINKLESS), made("weight decay 5", **SINKLESS)],
            sinks_findings.HELD,
        ),
        (
            "grows with weight decay",
            [BASE_SINKS, made("weight decay 0", sink_rate=(20, 21, 22)), made("weight decay 5", sink_rate=(6, 7, 8))],
            sinks_findings.AGAINST,
        ),
        ("grows with weight decay", [BASE_SINKS, made("weight decay 0", **SINKLESS)], sinks_findings.ABSENT),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(4, 2, 0))], sinks_findings.HELD),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(5, 6, 5))], sinks_findings.AGAINST),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(4, 2, 5))], sinks_findings.OPEN),
        ("prefix LM", [made("prefix 5", **SINKLESS)], sinks_findings.OPEN),
        ("window", [made("window 16", **SINKING)], sinks_findings.OPEN),
        ("fixed at another", [made("fixed token at 1", **SINKING, sink_position=(1, 1, 1))], sinks_findings.HELD),
        ("fixed at another", [made("fixed token at 1", **SINKING)], sinks_findings.AGAINST),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", **SINKLESS)], sinks_findings.HELD),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", **SINKING)], sinks_findings.OPEN),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", sink_rate=(30, 32, 35))], sinks_findings.AGAINST),
        ("hidden state", [BASE_SINKS, made("sigmoid", norm_ratio=(1, 1, 1))], sinks_findings.HELD),
        ("hidden state", [BASE_SINKS, made("sigmoid", norm_ratio=(9, 10, 12))], sinks_findings.AGAINST),
        ("do not decide", [BASE_SINKS, *(made(row, **SINKING) for row in OF_PARTS)], sinks_findings.HELD),
        ("do not decide", [BASE_SINKS, made("t5", **SINKING), made("ReLU", **SINKLESS)], sinks_findings.PARTLY),
        ("do not decide", [made("softmax", **SINKLESS), made("t5", **SINKING)], sinks_findings.OPEN),
    ],
)
def test_a_finding_is_decided_by_the_runs(claim: str, rows: list[list[dict[str, Any]]], verdict: str) -> None:
    one = said(runs_of(*(rows or [made("gated", **SINKLESS)])), claim)
    assert one.verdict == verdict, one.evidence


def test_a_window_wide_enough_for_a_sink_is_judged_by_its_place() -> None:
    runs = runs_of(made("window", **SINKING))
    wide = dataclasses.replace(runs, changes={"window": {"window": 32}})
    assert said(wide, "With a window").verdict == sinks_findings.HELD
    narrow = said(dataclasses.replace(runs, changes={"window": {"window": 19}}), "With a window")
    assert narrow.verdict == sinks_findings.OPEN
    assert "gets 0.30 at the most" in narrow.evidence  # 19 / 64 = 0.297, below ε


def test_every_row_stands_in_one_table() -> None:
    every = runs_of(*(made(row, **SINKING) for row in sinks.ROWS))
    runs = dataclasses.replace(every, changes=sinks.ROWS)
    tables = sinks_page.by_axis(runs)
    shown = [row for rows in tables.values() for row in rows if row != "softmax"]
    assert sorted(shown) == sorted(set(sinks.ROWS) - {"softmax"})
    assert all("softmax" in rows for rows in tables.values())
    decays = [float(runs.changes[row].get("weight_decay", 0.5)) for row in tables[sinks_page.DECAY]]
    assert decays == sorted(decays)
    starred = {row for row in runs.rows if runs.starred(row)}
    assert {"sigmoid", "elu", "linear", "mlp kernel", "elu kernel, normalised"} <= starred
    assert not {"softmax", "sigmoid, normalised", "softpick", "K bias"} & starred


def test_a_page_of_few_rows_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    runs = runs_of(made("softmax", **SINKING), made("K bias", sink_rate=(0, 0), virtual_sink_rate=(50, 60)))
    kept(runs, tmp_path / sinks.FOLDER)
    assert sinks_page.main([]) == 0
    page = (tmp_path / sinks_page.PAGE).read_text(encoding="utf-8")
    told = " ".join(page.split())
    assert "With fewer seeds: `K bias` (2 of 3 seeds)." in told
    assert "The base of the paper has no fixed token and a weight decay of 0.1. Changed to that alone: There is" in told
    assert "Without any run: `sigmoid`, `elu`" in told
    assert "2,400 steps of 16 sequences of 64 tokens: 2.46M tokens, 0.5 times a text of 4.92M." in told
    assert "Of 18 findings: 2 as in the paper; 16 not run." in told
    assert (tmp_path / sinks_page.PICTURE).stat().st_size > 1000
    assert sinks_page.main(["--check"]) == 0
    (tmp_path / sinks_page.PAGE).write_text(page.replace("12.0", "13.0"), encoding="utf-8")
    assert sinks_page.main(["--check"]) == 1


def test_a_page_without_softmax_can_be_made(tmp_path: Path) -> None:
    kept(runs_of(made("elu", **SINKLESS), made("first token free", **SINKLESS)), tmp_path / "results")
    page = sinks_page.page(tmp_path / "results")
    assert "| elu | 3 of 3 |" in page
    assert "Changed to that alone: `first token free`: Sink₁ 1.0 ± 2.5 %, at least 5 % in 0 of 3" in " ".join(
        page.split()
    )
    assert "| softmax" not in page


def test_tables_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    runs = runs_of(made("softmax", **SINKING))
    kept(runs, tmp_path / "results")
    runs.ends.drop(columns="norm_ratio").to_csv(tmp_path / "results" / sinks.TABLE, index=False)
    with pytest.raises(UserError, match="missing: norm_ratio"):
        Runs.load(tmp_path / "results")
    with pytest.raises(UserError, match=r"missing: sinks\.csv"):
        Runs.load(tmp_path)


def test_the_record_of_the_experiment_is_of_what_the_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a row with one head is finished, the recipe that is kept has the heads of softmax."""
    one = sinks.of_row("one head", 0, ["text"]).to_dict()
    cost, ended = {"seconds": 60.0}, dict.fromkeys(sinks.FINAL, 1.0)
    record = {"config": one, "emergence": {"step": None}, "cost": cost, "data": {"domains": [{"source": "here"}]}}
    record |= {"model": {}, "watch": {}, "versions": {"torch": "2", "platform": "here"}}
    history = pd.DataFrame([dict.fromkeys(sinks.CURVE, 1.0)])
    monkeypatch.setattr(sinks, "_finished", lambda place, wanted: place.name == "one-head-0")
    monkeypatch.setattr(
        sinks.PretrainResult, "load", lambda place: types.SimpleNamespace(metadata=record, final=ended, history=history)
    )
    ends, curves, left = sinks.collected(["softmax", "one head"], 3, ["text"], Path("work"))
    assert ends[["row", "seed", "seconds"]].to_numpy().tolist() == [["one head", 0, 60.0]]
    assert len(curves) == 1
    assert left["recipe"]["num_heads"] == preset_config("pico").num_heads != one["num_heads"]
    assert {"data", "seed"}.isdisjoint(left["recipe"])
    assert left["seeds"] == 3
    assert left["rows"] == {"softmax": {}, "one head": {"num_heads": 1}}
    assert "here" not in json.dumps(left)


@pytest.mark.parametrize(
    "low, high, part",
    [
        (-0.2, -0.1, True),
        (-0.1, 0.04, True),
        (0.01, 0.05, True),
        (-0.1, 0.2, None),
        (0.04, 0.2, None),
        (0.1, 0.2, False),
    ],
)
def test_a_loss_is_no_higher_where_the_whole_interval_says_so(low: float, high: float, part: bool | None) -> None:
    assert sinks_findings.no_more(Difference((low + high) / 2, low, high, True)) is part
    assert sinks_findings.no_more(None) is None
    assert sinks_findings.no_more(Difference(0.0, float("nan"), float("nan"), True)) is None
