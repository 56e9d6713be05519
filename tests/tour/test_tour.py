"""The tour: steps that are kept, go on after an interruption, and what its page says."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import demo.__main__ as tour
from demo.steps import LEARN, LINES, Step, make_steps
from demo.story import compare_sinks, describe_loss
from regard.cli import parser

STEPS = [
    Step(name, name, (name, "--out", name), f"{name}/results.json", (turn, 1))
    for turn, name in enumerate(("one", "two"))
]
BESIDE = [replace(step, turn=(1, place)) for place, step in enumerate(STEPS)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The tour over two steps, each of which ends as told: an exit code, or an interruption."""
    monkeypatch.setattr(tour, "make_steps", lambda options: STEPS)
    monkeypatch.setattr(tour, "make_page", lambda folder, seconds, total: f"page of {', '.join(seconds)}")

    def call(**ends: Any) -> tuple[int, list[str]]:
        ran: list[str] = []

        def fake(line: list[str], *, cwd: Path, **options: Any) -> Any:
            name = line[3]
            ran.append(name)
            end = ends.get(name, 0)
            if end == "interrupted":
                raise KeyboardInterrupt
            if end == 0:
                (cwd / name).mkdir()
                (cwd / name / "results.json").touch()
            return SimpleNamespace(stderr=["a line\n"] if options.get("stderr") else None, wait=lambda: end)

        monkeypatch.setattr(subprocess, "Popen", fake)
        return tour.main(["--out", str(tmp_path)]), ran

    return call


def test_finished_steps_are_kept(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run() == (0, ["one", "two"])
    assert (tmp_path / "index.html").read_text() == "page of one, two"
    assert run() == (0, [])


@pytest.mark.parametrize("end, code", [(2, 2), ("interrupted", 130)])
def test_a_step_that_did_not_end_is_run_again(
    end: Any, code: int, run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(two=end) == (code, ["one", "two"])
    assert "the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "index.html").exists()
    assert run() == (0, ["two"])


def test_steps_of_a_turn_run_side_by_side_and_name_their_lines(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(tour, "make_steps", lambda options: BESIDE)
    assert run()[0] == 0
    assert {"   one: a line", "   two: a line"} <= set(capsys.readouterr().out.splitlines())


def test_a_turn_on_one_core_is_one_step_after_another(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(tour, "make_steps", lambda options: BESIDE)
    assert run(one=2) == (2, ["one"])
    assert run() == (0, ["one", "two"])
    assert "a line" not in capsys.readouterr().out
    assert run(two=2)[0] == 0, "both are kept"


def test_a_step_with_another_command_is_not_kept(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run(two=2)
    changed = Step("one", "one", ("one", "--out", "one", "--seeds", "2"), "one/results.json")
    monkeypatch.setattr(tour, "make_steps", lambda options: [changed, STEPS[1]])
    assert run(one=1)[1] == ["one"]


def test_the_commands_of_the_tour_are_commands(tmp_path: Path) -> None:
    tour.write_texts(tmp_path)
    assert all((tmp_path / name).stat().st_size > 1000 for name in (LINES, LEARN))
    for step in make_steps({"sapt": ["--save-steps", "3"]}):
        assert parser().parse_args(list(step.command)).command == step.command[0]


@pytest.mark.parametrize(
    "softmax, sigmoid, told",
    [(40.0, 0.0, "as published"), (40.0, 12.0, "not as published"), (2.0, 0.0, "says nothing about sigmoid")],
)
def test_the_page_says_what_two_sink_rates_show(softmax: float, sigmoid: float, told: str) -> None:
    assert told in compare_sinks(softmax, sigmoid)


@pytest.mark.parametrize(
    "low, high, told", [(0.5, 3.0, "It loses something"), (-1.0, 3.9, "up to 3.9 %"), (0.0, 0.0, "is the same")]
)
def test_the_page_says_what_the_interval_of_a_drop_shows(low: float, high: float, told: str) -> None:
    assert told in describe_loss(low, high)
