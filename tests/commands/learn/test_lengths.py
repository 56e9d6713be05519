"""The line on lengths: what was fitted, and what is cut; on the terminal, the page and in the record."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.commands.learn.config import LearnConfig, split_methods
from regard.commands.learn.lengths import choose_length, describe_lengths
from regard.commands.learn.words import write_warnings
from regard.data.examples import Examples
from tests.commands.learn import learned
from tests.continual import small_tasks

FITTED = "fitted to 95 % of each task's training texts (at most 128), cuts"


def cut(task: str, rows: int, tokens: int, option: str = "length", longest: int = 90) -> dict[str, Any]:
    return {
        **{"option": option, "task": task, "rows": rows, "num_rows": 100},
        **{"tokens": tokens, "num_tokens": 1000, "longest": longest},
    }


def run(*rows: dict[str, Any], length: int = 32, fitted: bool = False) -> dict[str, Any]:
    return {"length": length, "target_length": 16, "fitted": fitted, "truncation": list(rows)}


@pytest.mark.parametrize(
    "method, settings, length",
    [
        ("finetune,l2p", ("top_k=2", "prompt_length=3"), 10),
        ("progprompt,finetune", ("num_virtual_tokens=2",), 10),
        ("finetune", (), 16),
    ],
)
def test_a_length_has_room_for_the_prompts_of_all_methods(method: str, settings: tuple[str, ...], length: int) -> None:
    """Of a model of 16 positions: 2 · 3 tokens of l2p, of progressive prompts 2 in each of three tasks."""
    tasks = small_tasks.stream(3)
    texts = (("the " * 60,),) * 20
    long = Examples(texts=texts, labels=(0, 1) * 10)
    tasks = replace(tasks, tasks=tuple(replace(task, train=long) for task in tasks.tasks))  # type: ignore[arg-type]
    by_method = split_methods(LearnConfig(method=method, set=settings))
    with pytest.warns(UserWarning, match="which 6 of prompts leave") if length < 16 else nullcontext():
        assert choose_length(by_method, tasks, small_tasks.loaded()) == length
    assert choose_length([replace(one, length=12) for one in by_method], tasks, small_tasks.loaded()) == 12


@pytest.mark.parametrize(
    "runs, line",
    [
        ([run()], ""),
        ([{}], ""),
        ([run(fitted=True)], f"length 32, {FITTED} no text"),
        (
            [run(cut("news", 2, 4), cut("mail", 0, 0), cut("talk", 40, 300, longest=1200))],
            "length 32 cuts 14 % of the texts and 10 % of their tokens: talk 40 %, news 2 %; the longest has 1,200 "
            "tokens, --length allows more up to what the model takes",
        ),
        (
            [run(cut("news", 10, 100), fitted=True), run(cut("news", 20, 100), length=40, fitted=True)],
            f"length 32 to 40, {FITTED} 15 % of the texts and 10 % of their tokens: news 15 %; the longest has 90 "
            "tokens, --length allows more up to what the model takes",
        ),
        (
            [{**run(cut("news", 10, 100), fitted=True), "fitted_tasks": 2}],
            "length 32, fitted to 95 % of the training texts of the first 2 tasks, with which the run began (at most "
            "128), cuts 10 % of the texts and 10 % of their tokens: news 10 %; the longest has 90 tokens, --length of "
            "a run that begins with all tasks allows more up to what the model takes",
        ),
        (
            [run(cut("news", 10, 1), cut("news", 50, 100, "target_length"))],
            "length 32 cuts 10 % of the texts and under 1 % of their tokens: news 10 %; the longest has 90 tokens, "
            "--length allows more up to what the model takes; target-length 16 cuts 50 % of the answers and 10 % of "
            "their tokens: news 50 %; the longest has 90 tokens, --target-length allows more",
        ),
    ],
)
def test_the_line_says_which_tasks_lose_how_much(runs: list[dict[str, Any]], line: str) -> None:
    assert describe_lengths(runs) == line


def test_the_report_has_the_line_once_for_all_methods() -> None:
    of_runs = [{"method": name, "seed": 39, **run(cut("news", 10, 100))} for name in ("finetune", "prescale")]
    notes = write_warnings(learned.tables(), learned.record(runs=of_runs))
    assert [note for note in notes if "cuts" in note] == [
        "Length 32 cuts 10 % of the texts and 10 % of their tokens: news 10 %; the longest has 90 tokens, --length "
        "allows more up to what the model takes."
    ]
    assert not any("cuts" in note for note in write_warnings(learned.tables(), learned.record()))


def learn(regard: Callable[..., Any], words: Path, methods: str, *options: Any) -> Any:
    small = ("--method", methods, "--num-epochs", 1, "--batch-size", 4, "--diagnostic-samples", 0)
    ended = regard("learn", words / "words.jsonl", "--model", words / "model", *small, "--no-save-models", *options)
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.exhaustive
def test_the_length_is_fitted_unless_it_is_said(regard: Callable[..., Any], words: Path, tmp_path: Path) -> None:
    """Of texts of at most nine tokens; told once, and recorded for every run. Of what is said only a cut is told."""
    ended = learn(regard, words, "finetune,probe", "--out", "run")
    assert ended.err.splitlines()[0].startswith(f"length 16, {FITTED} no text")
    assert ended.err.count("length 16") == 1
    assert "Length 16, fitted" in " ".join(ended.out.split())
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    assert record["config"]["length"] is None
    assert [(one["length"], one["fitted"], one["truncation"]) for one in record["runs"]] == [(16, True, [])] * 2
    assert "Length 16, fitted" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    ended = learn(regard, words, "probe", "--length", 5, "--out", "short")
    assert ended.err.startswith("length 5 cuts ")
    assert ended.err.splitlines()[0].endswith("--length allows more up to what the model takes")
    record = json.loads((tmp_path / "short" / "results.json").read_text())
    assert {one["task"] for one in record["runs"][0]["truncation"]} == {"cat-dog", "red-blue-green", "run-sit"}
    assert "length" not in learn(regard, words, "probe", "--length", 10, "--out", "whole").err
