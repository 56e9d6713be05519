"""The page of sinks: its claims, its table, and the stored tables behind it."""

import dataclasses
import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.common.claims import (
    AGAINST,
    AS_PUBLISHED,
    IN_PART,
    NOT_RUN,
    UNDECIDED,
    Verdict,
    judge_claims,
)
from experiments.pages import declare_not_run
from experiments.sinks import page as sinks_page
from experiments.sinks import run as sinks
from experiments.sinks.claims import CLAIMS
from experiments.sinks.tables import Tables
from regard.commands.pretrain.config import preset_config
from regard.errors import UserError

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
    "batch 8": {"batch_size": 8},
    "1 % of the text": {"data_fraction": 0.01},
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


def runs_of(*rows: list[dict[str, Any]]) -> Tables:
    """Made-up runs with curves of two steps."""
    ends = pd.DataFrame([run for row in rows for run in row]).reindex(columns=list(sinks.COLUMNS))
    curves = pd.DataFrame(
        [{"row": name, "step": step, "alpha_first": 0.1} for name in ends["row"].unique() for step in (0, 2400)]
    )
    return Tables(ends, curves.reindex(columns=["row", *sinks.CURVE]), CHANGES, RECORD)


def find_verdict(tables: Tables, words: str) -> Verdict:
    """Return the verdict of the claim that contains these words."""
    matches = [verdict for verdict in judge_claims(CLAIMS, tables) if words in verdict.claim.text]
    assert len(matches) == 1
    return matches[0]


def save(runs: Tables, folder: Path) -> None:
    folder.mkdir(parents=True)
    runs.ends.to_csv(folder / sinks.TABLE, index=False)
    runs.curves.to_csv(folder / sinks.CURVES, index=False)
    (folder / sinks.RECORD).write_text(json.dumps(dict(runs.record)), encoding="utf-8")


def test_numbers_of_a_row_are_those_of_its_seeds() -> None:
    """Rates 10, 12, 14: s = 2, t = 4.3027, half of the interval 4.3027 · 2 / √3 = 4.97; losses 0.01, 0, −0.01 apart."""
    runs = runs_of(
        made("softmax", **SINKING, emergence_step=(600, 800, math.nan)),
        made("sigmoid", sink_rate=(0, 1, 2), valid_loss=(4.01, 4.1, 4.19)),
        made("fixed token at 1", sink_rate=(0, 0, 0), sink_rate_max=(20, 20, 1), sink_position=(1, 1, 33)),
        made("ReLU", sink_rate=(7,), valid_loss=(4.25,)),
    )
    softmax, sigmoid = (sinks_page._cells(runs, sinks_page.OPERATION, row) for row in ("softmax", "sigmoid"))
    assert softmax[2:6] == ("3 of 3", "12.0 ± 5.0", "–", "0")
    assert softmax[-2:] == ("–", "600, 800, –")
    assert sigmoid[3] == r"1.0 ± 2.5\*"
    assert sigmoid[-2] == "+0.000 ± 0.025"
    moved = sinks_page._cells(runs, sinks_page.INPUT, "fixed token at 1")
    assert moved[5].startswith("1 (13.7 ± ")
    assert moved[-2].endswith("‡")
    assert sinks_page._cells(runs, sinks_page.REST, "ReLU")[2:4] == ("1 of 3", "7.0")
    assert sinks_page._cells(runs, sinks_page.REST, "ReLU")[-2] == "+0.250"


def test_a_row_with_a_free_first_token_is_compared_with_one_that_has_the_same() -> None:
    freed = made("first token free", **SINKLESS, valid_loss=(4.3, 4.3, 4.3))
    token = made("sink token", **SINKLESS, valid_loss=(4.2, 4.2, 4.2001))
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
        ("Softmax grows", [BASE_SINKS], AS_PUBLISHED),
        ("Softmax grows", [made("softmax", **SINKLESS)], AGAINST),
        ("Softmax grows", [made("softmax", sink_rate=(1, 2, 9))], UNDECIDED),
        ("Softmax grows", [made("softmax", sink_rate=(50,))], UNDECIDED),
        ("Softmax grows", [], NOT_RUN),
        ("Sigmoid without", [BASE_SINKS, made("sigmoid", **SINKLESS)], AS_PUBLISHED),
        (
            "Sigmoid without",
            [BASE_SINKS, made("sigmoid", **SINKLESS, valid_loss=(4.5, 4.6, 4.71))],
            IN_PART,
        ),
        (
            "Sigmoid without",
            [BASE_SINKS, made("sigmoid", **SINKING, valid_loss=(4.5, 4.6, 4.71))],
            AGAINST,
        ),
        (
            "ELU without",
            [BASE_SINKS, made("elu", sink_rate=(0, 0, 0), sink_rate_max=(9, 9, 9), valid_loss=(5, 5.1, 5.2))],
            AGAINST,
        ),
        ("ELU without", [made("softmax", **SINKLESS), made("elu", **SINKLESS)], UNDECIDED),
        ("ELU without", [BASE_SINKS], NOT_RUN),
        (
            "brings the sink back",
            [made("sigmoid", **SINKLESS), made("sigmoid, normalised", **SINKING)],
            AS_PUBLISHED,
        ),
        (
            "brings the sink back",
            [made("sigmoid", **SINKLESS), made("sigmoid, normalised", **SINKLESS)],
            AGAINST,
        ),
        (
            "brings the sink back",
            [made("sigmoid", **SINKING), made("sigmoid, normalised", **SINKING)],
            UNDECIDED,
        ),
        (
            "normalized kernel",
            [BASE_SINKS, made("elu kernel, normalised", **SINKING, valid_loss=(4.5, 4.6, 4.71))],
            AS_PUBLISHED,
        ),
        (
            "linear kernel",
            [BASE_SINKS, made("linear", **SINKLESS, valid_loss=(4.5, 4.6, 4.71))],
            AS_PUBLISHED,
        ),
        ("linear kernel", [BASE_SINKS, made("linear", **SINKLESS)], IN_PART),
        ("(K bias)", [BASE_SINKS, made("K bias", **SINKLESS, **VIRTUAL)], AS_PUBLISHED),
        ("(K bias)", [BASE_SINKS, made("K bias", **SINKING, **VIRTUAL)], IN_PART),
        (
            "(K bias)",
            [BASE_SINKS, made("K bias", **SINKING, virtual_sink_rate=(0, 0, 0))],
            AGAINST,
        ),
        ("(V bias)", [BASE_SINKS, made("V bias", **SINKING)], AS_PUBLISHED),
        ("(V bias)", [BASE_SINKS, made("V bias", **SINKLESS)], AGAINST),
        (
            "token in front",
            [BASE_SINKS, made("first token free", **SINKLESS), made("sink token", **SINKLESS, **VIRTUAL)],
            IN_PART,
        ),
        (
            "grows with weight decay",
            [BASE_SINKS, made("weight decay 0", **SINKLESS), made("weight decay 5", **SINKLESS)],
            AS_PUBLISHED,
        ),
        (
            "grows with weight decay",
            [BASE_SINKS, made("weight decay 0", sink_rate=(20, 21, 22)), made("weight decay 5", sink_rate=(6, 7, 8))],
            AGAINST,
        ),
        ("grows with weight decay", [BASE_SINKS, made("weight decay 0", **SINKLESS)], NOT_RUN),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(4, 2, 0))], AS_PUBLISHED),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(5, 6, 5))], AGAINST),
        ("prefix LM", [made("prefix 5", **SINKING, sink_position=(4, 2, 5))], UNDECIDED),
        ("prefix LM", [made("prefix 5", **SINKLESS)], UNDECIDED),
        ("window", [made("window 16", **SINKING)], UNDECIDED),
        ("fixed at another", [made("fixed token at 1", **SINKING, sink_position=(1, 1, 1))], AS_PUBLISHED),
        ("fixed at another", [made("fixed token at 1", **SINKING)], AGAINST),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", **SINKLESS)], AS_PUBLISHED),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", **SINKING)], UNDECIDED),
        ("lower learning", [BASE_SINKS, made("learning rate 0.001", sink_rate=(30, 32, 35))], AGAINST),
        ("hidden state", [BASE_SINKS, made("sigmoid", norm_ratio=(1, 1, 1))], AS_PUBLISHED),
        ("hidden state", [BASE_SINKS, made("sigmoid", norm_ratio=(9, 10, 12))], AGAINST),
        ("Positions do not", [BASE_SINKS, *(made(row, **SINKING) for row in OF_PARTS)], AS_PUBLISHED),
        ("Positions do not", [BASE_SINKS, made("t5", **SINKING), made("none", **SINKLESS)], IN_PART),
        ("Positions do not", [made("softmax", **SINKLESS), made("t5", **SINKING)], UNDECIDED),
        ("feed-forward layer does not", [BASE_SINKS, made("ReLU", **SINKLESS)], AGAINST),
        ("number of heads does not", [BASE_SINKS, made("one head", **SINKING)], AS_PUBLISHED),
        ("Batch size does not", [BASE_SINKS, made("batch 8", **SINKLESS)], AGAINST),
        ("less data", [BASE_SINKS, made("1 % of the text", sink_rate=(0, 1, 2))], AS_PUBLISHED),
    ],
)
def test_a_finding_is_decided_by_the_runs(claim: str, rows: list[list[dict[str, Any]]], verdict: str) -> None:
    judged = find_verdict(runs_of(*(rows or [made("gated", **SINKLESS)])), claim)
    assert judged.word == verdict, judged.evidence


def test_a_window_wide_enough_for_a_sink_is_judged_by_its_place() -> None:
    runs = runs_of(made("window", **SINKING))
    wide = dataclasses.replace(runs, changes={"window": {"window": 32}})
    assert find_verdict(wide, "With a window").word == AS_PUBLISHED
    narrow = find_verdict(dataclasses.replace(runs, changes={"window": {"window": 19}}), "With a window")
    assert narrow.word == UNDECIDED
    assert "gets at most 0.30" in narrow.evidence  # 19 / 64 = 0.297, below ε


def test_every_row_is_on_one_axis() -> None:
    every = runs_of(*(made(row, **SINKING) for row in sinks.ROWS))
    runs = dataclasses.replace(every, changes=sinks.ROWS)
    groups = sinks_page.rows_by_axis(runs)
    assert sorted(row for rows in groups.values() for row in rows) == sorted(sinks.ROWS)
    decays = [float(runs.changes[row].get("weight_decay", 0.5)) for row in groups[sinks_page.DECAY]]
    assert decays == sorted(decays)
    starred = {row for row in runs.rows if runs.is_proxy(row)}
    assert {"sigmoid", "elu", "linear", "mlp kernel", "elu kernel, normalised"} <= starred
    assert not {"softmax", "sigmoid, normalised", "softpick", "K bias"} & starred


def test_a_page_of_few_rows_says_what_is_missing(tmp_path: Path) -> None:
    runs = runs_of(made("softmax", **SINKING), made("K bias", sink_rate=(0, 0), virtual_sink_rate=(50, 60)))
    save(runs, tmp_path / "results")
    declare_not_run(tmp_path / "results" / "sinks.json", sinks_page.SHOWN)
    text = " ".join(sinks_page.PAPER.page(tmp_path / "results").to_markdown().split())
    assert "Rows with fewer than 3 seeds: 1, as the tables say." in text
    assert "The paper's base has no fixed token and a weight decay of 0.1. Changed to one of these: No run" in text
    assert "Without any run: `sigmoid`, `elu`" in text
    assert "2,400 steps of 16 × 64 tokens: 2.46M tokens, 0.5 times a text of 4.92M." in text
    assert "Tested claims: as published 2, not run 24." in text


def test_a_page_without_softmax_can_be_made(tmp_path: Path) -> None:
    save(runs_of(made("elu", **SINKLESS), made("first token free", **SINKLESS)), tmp_path / "results")
    declare_not_run(tmp_path / "results" / "sinks.json", sinks_page.SHOWN)
    page = sinks_page.PAPER.page(tmp_path / "results").to_markdown()
    assert "| elu | 3 of 3 |" in page
    assert "Changed to one of these: `first token free`: Sink₁ 1.0 ± 2.5 %" in " ".join(page.split())
    assert "| softmax | not run |" in page


def test_tables_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    runs = runs_of(made("softmax", **SINKING))
    save(runs, tmp_path / "results")
    runs.ends.drop(columns="norm_ratio").to_csv(tmp_path / "results" / sinks.TABLE, index=False)
    with pytest.raises(UserError, match="missing: norm_ratio"):
        Tables.load(tmp_path / "results")
    with pytest.raises(UserError, match=r"missing: sinks\.csv"):
        Tables.load(tmp_path)


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
    ends, curves, left = sinks.collect_tables(["softmax", "one head"], 3, ["text"], Path("work"))
    assert ends[["row", "seed", "seconds"]].to_numpy().tolist() == [["one head", 0, 60.0]]
    assert len(curves) == 1
    assert left["recipe"]["num_heads"] == preset_config("pico").num_heads != one["num_heads"]
    assert {"data", "seed"}.isdisjoint(left["recipe"])
    assert left["seeds"] == 3
    assert left["rows"] == {"softmax": {}, "one head": {"num_heads": 1}}
    assert "here" not in json.dumps(left)
