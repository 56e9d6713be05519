"""One command makes all runs and pages, and goes on where it stopped."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments import all as everything
from experiments.all import Step, describe_steps, main, make_steps, select_steps, sum_hours
from experiments.pages import ALL
from regard.errors import UserError

STEPS = make_steps("files", "novels.txt", Path("runs"))


def test_every_experiment_has_runs_and_then_its_page() -> None:
    assert {step.experiment for step in STEPS} == set(ALL)
    for name in ALL:
        own = [step for step in STEPS if step.experiment == name]
        assert [step.module == "experiments.pages" for step in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].arguments[0] == name


def test_the_modules_exist_and_understand_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(importlib.util.find_spec(step.module) for step in STEPS)
    texts = {step.module: Path(str(importlib.util.find_spec(step.module).origin)).read_text() for step in STEPS}  # type: ignore[union-attr]
    shared = {"make_missing(": "common/runs.py", "measure_models(": "sinks/models.py"}
    parsers = {call: (Path(everything.__file__).parent / path).read_text() for call, path in shared.items()}
    for step in STEPS:
        known = texts[step.module] + "".join(text for call, text in parsers.items() if call in texts[step.module])
        for option in (argument for argument in step.arguments if argument.startswith("--")):
            assert f'"{option}"' in known, step.line


def test_hours_are_those_of_the_stored_runs(tmp_path: Path) -> None:
    (tmp_path / "cost.csv").write_text("stream,seconds\na,3600\na,1800\nb,7200\n", encoding="utf-8")
    assert sum_hours(tmp_path / "cost.csv", "seconds", stream="a") == 1.5
    assert sum_hours(tmp_path / "none.csv", "seconds") is None
    steps = [Step("x", "experiments.x", ("--data", "d"), 1.5), Step("x", "experiments.y", ()), STEPS[-1]]
    assert describe_steps(steps).split("\n") == [
        "  1.5h  python -m experiments.x --data d",
        "     ?  python -m experiments.y",
        "  page  python -m experiments.pages causes",
        "  1.5h in all on one core, less what is finished",
    ]


def test_some_experiments_are_chosen_by_name() -> None:
    assert {step.experiment for step in select_steps(STEPS, "sapt, papa")} == {"sapt", "papa"}
    with pytest.raises(UserError, match=r"only: expected some of .* \(sinks needs --text\), got 'sinks'"):
        select_steps(make_steps("files", None, Path("runs")), "sinks")


def test_steps_are_run_in_turn_until_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Any] = []

    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        called.append(line[2])
        return subprocess.CompletedProcess(line, 3 * (len(called) == 2))

    monkeypatch.setattr(everything.subprocess, "run", run)
    given = ["--data", "files", "--only", "routing"]
    assert main([*given, "--list"]) == 0
    assert called == []
    assert main(given) == 3
    assert called == ["experiments.routing.run", "experiments.routing.routers"]
    assert "The same command goes on here." in capsys.readouterr().out
    assert main(["--data", "files", "--only", "magic"]) == 2
