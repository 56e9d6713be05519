"""`regard check`: what it says of old tasks, and with which code it ends."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regard import LearnResult
from regard.commands.learn.check import drops_table
from regard.continual.forgetting import ForgottenTask
from tests.commands.learn import learned
from tests.commands.learn.marks import READS_ENGLISH

pytestmark = READS_ENGLISH
Regard = Callable[..., Any]

OVER = "95 % intervals over seeds; over test rows where a task has one, or equal drops"
OPEN = "cannot tell: {}, whose interval has drops on both sides of the margin"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder of made-up runs of these methods and tasks."""

    def write(*methods: str, tasks: tuple[str, ...] = learned.TASKS) -> Path:
        scores = learned.matrix(methods, tasks=tasks)
        tables = learned.tables(scores)
        named = {name: tables[name] for name in ("cost", "diagnostics", "interference")}
        return LearnResult(accuracy_matrix=scores, **named, metadata=learned.record()).save(tmp_path / "run")

    return write


def test_a_dropped_task_is_told_of_with_code_1(regard: Regard, run: Callable[..., Path]) -> None:
    """Fine-tuning loses 8 points with each of the later tasks, the drops of all seeds being the same."""
    ended = regard("check", run("finetune"))
    assert (ended.code, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0].split() == ["task", "before", "after", "drop", "interval", "verdict"]
    assert lines[1].split()[:4] == ["Politics", "96.1", "72.1", "24.0"]
    assert [line.rstrip().split("  ")[-1] for line in lines[1:4]] == ["dropped", "dropped", "cannot tell"]
    assert lines[4:] == ["", f"2 of 3 old tasks dropped by more than 1 point (TIL, {OVER})", OPEN.format(1)]


def test_what_the_intervals_leave_open_is_told_with_code_3(regard: Regard, run: Callable[..., Path]) -> None:
    ended = regard("check", run("prescale"))
    assert (ended.code, ended.err) == (3, "")
    assert [line.rstrip().split("  ")[-1] for line in ended.out.splitlines()[1:4]] == ["cannot tell"] * 3
    told = f"\n0 of 3 old tasks dropped by more than 1 point (TIL, {OVER})\n"
    assert ended.out.endswith(told + OPEN.format(3) + "\n")


def test_where_all_are_kept_it_ends_with_0(regard: Regard, run: Callable[..., Path]) -> None:
    ended = regard("check", run("prescale"), "--margin", 20)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f"\n0 of 3 old tasks dropped by more than 20 points (TIL, {OVER})\n")


def test_the_margin_decides(regard: Regard, run: Callable[..., Path]) -> None:
    folder = run("finetune")
    assert regard("check", folder, "--margin", 30).code == 3
    assert regard("check", folder, "--margin", 50).code == 0
    assert regard("check", folder, "--margin", 0.5, "--scenario", "cil").code == 1


@pytest.mark.exhaustive
def test_several_methods_are_told_apart_one_after_the_other(regard: Regard, run: Callable[..., Path]) -> None:
    ended = regard("check", run("prescale", "finetune", "joint"))
    assert ended.code == 1
    lines = [line.split() for line in ended.out.splitlines()[:7]]
    assert lines[0][:2] == ["method", "task"]
    assert [line[0] for line in lines[1:]] == ["prescale"] * 3 + ["finetune"] * 3
    assert max(map(len, ended.out.splitlines()[:7])) <= 80


def test_where_there_is_nothing_to_check_it_says_why_with_code_0(regard: Regard, run: Callable[..., Path]) -> None:
    ended = regard("check", run("prescale", tasks=("Politics",)))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "nothing to check: no run has learnt a second task, the most is 1\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options,said",
    [
        (("--margin", "wide"), "--margin: expected a number, got 'wide'"),
        (("--margin", "-1"), "margin: expected a number of points of at least 0"),
        (("--margin", "nan"), "margin: expected a number of points of at least 0"),
        (("--scenario", "dil"), "scenario: expected one of til, cil, got 'dil'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_gets_one_line(options: tuple[str, ...], said: str, regard: Regard, run: Callable[..., Path]) -> None:
    assert said in regard("check", run("finetune"), *options).complaint


def test_a_folder_that_is_no_run_of_learning_is_refused(regard: Regard, tmp_path: Path) -> None:
    assert "regard check: no run in nowhere" in regard("check", "nowhere").complaint
    (tmp_path / "half.work").mkdir()
    assert "half.work is an unfinished one: its command with --resume goes on" in regard("check", "half").complaint
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text('{"command": "pretrain"}')
    assert "the run in other is one of `regard pretrain`" in regard("check", "other").complaint
    (tmp_path / "other" / "results.json").write_text('{"command": "learn"}')
    assert "the run in other has schema version None" in regard("check", "other").complaint


def test_intervals_of_one_seed_are_said_to_be_over_test_rows(
    regard: Regard, run: Callable[..., Path], tmp_path: Path
) -> None:
    result = LearnResult.load(run("finetune"))
    scores = result.accuracy_matrix
    one = dataclasses.replace(result, accuracy_matrix=scores[scores["seed"] == scores["seed"].iloc[0]])
    assert "(TIL, 95 % intervals over test rows)" in regard("check", one.save(tmp_path / "one")).out


def test_long_names_lose_their_middle_in_a_narrow_terminal() -> None:
    """Names of tasks often differ at their ends alone."""
    tasks = [f"which library is documented here, of {count}" for count in ("three", "four")]
    drops = [
        ForgottenTask("s", "finetune", "til", task, 90.0, 80.0, 10.0, 5.0, 15.0, 50, (1, 2), "dropped")
        for task in tasks
    ]
    console = Console(width=80)
    with console.capture() as told:
        console.print(drops_table(drops, 70))
    _, *lines = told.get().splitlines()
    assert [line.split("  ")[0][-8:] for line in lines] == ["of three", " of four"]
    assert all("…" in line and len(line.rstrip()) <= 70 for line in lines)
