"""What is printed is printed on any terminal, and what cannot be is told in one line: results are there by then."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from regard import cli
from regard.data.hub import network_errors
from regard.data.tables import read_text_lines
from regard.errors import UserError, naming_option
from regard.runs.command_line import print_summary
from regard.runs.output_dir import readable_errors
from regard.runs.progress import ProgressEvent, show_progress
from regard.runs.rank import IN_JOB
from regard.runs.work_dir import lock_dir

Printing = Callable[[], int]


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Printing:
    """Run a command that prints a summary, and return its exit code."""
    monkeypatch.setattr(cli.check, "run", lambda args: print_summary("2 tasks · größe", tmp_path))
    return lambda: cli.main(["check", "run"])


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second is that of LC_ALL=C
def test_signs_that_a_terminal_lacks_are_escaped(
    errors: str, printing: Printing, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    assert printing() == 0
    assert raw.getvalue().startswith(rb"2 tasks \xb7 gr\xf6\xdfe")


def test_a_pipe_that_is_closed_ends_the_command(printing: Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich ended it with code 1, by which `regard check` tells of forgetting."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert printing() == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_below_the_output_is_one_line(
    printing: Printing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert printing() == 2
    assert capsys.readouterr().err == "regard check: standard output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_goes_on_where_its_log_is_full(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's run would end with the disk of its log, or as the terminal that it began on is gone."""
    file = open("/dev/full", "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    with show_progress() as on_progress:
        on_progress(ProgressEvent(phase="training", note="a note", milestone=True))
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    file.close()


def test_an_argument_that_is_no_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "run\udcff"]) == 2
    assert capsys.readouterr().err.startswith(r"regard: expected arguments in UTF-8, got 'run\udcff'; ")


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        Path("/nowhere/file").read_text(encoding="utf-8")

    monkeypatch.setattr(cli.check, "run", fail)
    assert cli.main(["check", "run"]) == 2
    assert capsys.readouterr().err == "regard check: /nowhere/file: No such file or directory\n"


@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(10**16), lambda: torch.empty(2**62, 4), lambda: numpy.zeros(10**16)],
    ids=["too large", "too large to count", "numpy"],
)
def test_too_little_memory_is_one_line(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.check, "run", lambda args: make())
    assert cli.main(["check", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("regard check: out of memory: ")
    assert "alloc_cpu" not in line
    monkeypatch.setattr(cli.check, "run", lambda args: raise_error(MemoryError()))
    assert cli.main(["check", "run"]) == 2
    said = "regard check: out of memory; ask for less at once, as by smaller numbers\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(cli.check, "run", lambda args: raise_error(RuntimeError("a fault of our own")))
    with pytest.raises(RuntimeError, match="a fault of our own"):
        cli.main(["check", "run"])


def raise_error(error: BaseException) -> None:
    raise error


def write_to_full_disk() -> None:
    with naming_option("out", "cannot"), readable_errors("runs"):
        raise OSError(28, "No space left on device")


def write_tokenizer_to_full_disk() -> None:
    """As the package tokenizers raises it."""
    with readable_errors("runs"):
        raise Exception("No space left on device (os error 28)")


def lock_twice(folder: Path) -> None:
    with lock_dir(folder, "learn"), lock_dir(folder, "learn"):
        pass


def lose_the_hub(folder: Path) -> None:
    connection = network_errors()[0]("the peer closed the connection")
    assert not isinstance(connection, OSError)
    raise UserError(f"model: '{folder.name}' could not be had from the hub") from connection


@pytest.mark.every_value
@pytest.mark.parametrize("in_job", [False, True])
@pytest.mark.parametrize(
    "fail, repeated",
    [
        (lambda folder: raise_error(UserError("rate: expected more")), False),
        (lambda folder: list(read_text_lines(folder / "none.csv")), False),
        (lambda folder: raise_error(KeyboardInterrupt()), True),
        (lambda folder: raise_error(OSError(5, "Input/output error", "runs")), True),
        (lambda folder: write_to_full_disk(), True),
        (lock_twice, True),
        (lose_the_hub, True),
    ],
)
def test_a_launcher_is_told_what_another_attempt_may_mend(
    fail: Callable[[Path], object], repeated: bool, in_job: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli.check, "run", lambda args: fail(tmp_path))
    monkeypatch.delenv(IN_JOB, raising=False)
    if in_job:
        monkeypatch.setenv(IN_JOB, "1")
    assert cli.main(["check", "run"]) == (75 if in_job and repeated else 2)


def test_an_error_of_the_system_that_tokenizers_tell_of_may_be_gone_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher took a full disk for a mistake of the user."""
    monkeypatch.setattr(cli.check, "run", lambda args: write_tokenizer_to_full_disk())
    monkeypatch.setenv(IN_JOB, "1")
    assert cli.main(["check", "run"]) == 75
